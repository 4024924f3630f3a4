"""The kernel in Gluon that takes dA' through the activation is used where it can be, and is as exact as the two passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", minversion="3.6")

from blocksparse_moe import expert_mlp
from blocksparse_moe_kernels import BlockSparse, Columns, Topology, get_activation, versions
from blocksparse_moe_kernels.launch import fold_halves, stack_weight
from blocksparse_moe_kernels.triton import replay
from blocksparse_moe_kernels.triton import sdd_activation_backward as op
from blocksparse_moe_kernels.triton.activation_backward import sum_dots
from blocksparse_moe_kernels.triton.descriptors import weight_form

from .support import DEVICE, HAS_CUDA, assert_within_budget

if not versions.gluon_is_known():
    pytest.skip("Gluon of this Triton is not known", allow_module_level=True)

from blocksparse_moe_kernels.triton import gluon_rings
from blocksparse_moe_kernels.triton import sdd_activation_backward_gluon as fused
from blocksparse_moe_kernels.triton.gluon_rings import TILE

from .gluon_support import ROUTINGS, SIZES, half, inside, needs_hopper, randn, run_schedule

CLAMPED = "swiglu(alpha=1.702, gate_limit=7, up_limit=7, up_offset=1)"
PLANS = [fused.Plan(3, 32, 4), fused.Plan(3, 64, 2), fused.Plan(4, 32, 2)]

# ---------------------------------------------------------------- where it is used

E, F, H = 2, 16, 256


def applies(x=None, w=None, pre=None, activation="swiglu", config=TILE) -> bool:
    """Of operands on a CPU, which counts as sm_90."""
    x = torch.empty(4, H, dtype=torch.bfloat16) if x is None else x
    w = torch.empty(E, x.shape[1], F, dtype=x.dtype).transpose(1, 2) if w is None else w
    pre = torch.empty(4, 2 * w.shape[1], dtype=x.dtype) if pre is None else pre
    topology = Topology.from_ids(torch.zeros(x.shape[0], 1, dtype=torch.int64), E)
    weight = fold_halves(stack_weight("sdd", w, topology, None))
    return fused.applies(x, weight, weight_form(weight), pre, get_activation(activation), config)


GIVEN = {
    "nothing special": {},
    "fp16": {"x": half(4, H).half()},
    "limits": {"activation": CLAMPED},
    "a dense hidden axis": {"w": half(E, F, H)},
    "an odd number of 8 columns": {"w": half(E, 24, H)},
    "padded weights": {"w": half(E, F, H + 8)[..., :H]},
    "rows of x that lie apart": {"x": half(4, 2 * H + 8)[:, 8 : H + 8]},
}
EXCLUDED = {
    "no gate": {"activation": "gelu", "pre": half(4, F)},
    "interleaved": {"activation": "swiglu(interleaved)"},
    "no pieces of 16 bytes": {"w": half(E, 20, H)},
    "a pre-activation at an odd address": {"pre": half(4 * 2 * F + 1)[1:].view(4, 2 * F)},
    "another tile": {"config": replace(TILE, block_m=64)},
    "pointers": {"config": replace(TILE, tma=False)},
    "weights without a dense axis": {"w": half(E, F, H, 2)[..., 0]},
    "fp32": {"x": half(4, H).float()},
    "no whole steps": {"x": half(4, H + 8)},
    "fewer steps than slots": {"x": half(4, H - 64)},
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_it_applies(given):
    assert applies(**given)


@pytest.mark.parametrize("given", EXCLUDED.values(), ids=EXCLUDED)
def test_it_does_not_apply(given):
    assert not applies(**given)


@pytest.mark.parametrize("architecture", [80, 89, 100, 120])
def test_only_hopper_has_it(architecture, monkeypatch):
    monkeypatch.setattr(gluon_rings, "architecture_of", lambda device: architecture)
    assert not applies()


@pytest.mark.skipif(HAS_CUDA, reason="kernels are compiled where there is a GPU")
def test_the_interpreter_has_it_not():
    assert op._gluon is None


def test_the_sum_of_dots():
    ids = torch.tensor([[1, -1], [0, 1], [2, 0]], device=DEVICE)
    topology, weights = Topology.from_ids(ids, 2), torch.rand(3, 2, device=DEVICE)
    dots, bias_dot = torch.randn(3, 6, device=DEVICE), torch.randn(6, device=DEVICE)
    dots[:, 4:], bias_dot[4:] = torch.nan, torch.nan
    for added in (None, bias_dot):
        expected = torch.zeros(6, device=DEVICE)
        expected[topology.slots[:4].long()] = dots[:, :4].sum(0) + (0 if added is None else added[:4])
        torch.testing.assert_close(sum_dots(dots, topology, weights, added), expected.view(3, 2))


# ---------------------------------------------------------------- its barriers


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_rings_under_random_schedules(plan):
    for seed in range(40):
        run_schedule(seed, steps=4 + seed % 4, tiles=1 + seed % 3, gathers=True, plan=plan)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("fault", ["results not waited for", "stores waited for too late", "slots freed too early"])
def test_the_model_sees_a_fault(fault, plan):
    with pytest.raises(AssertionError):
        for seed in range(60):
            run_schedule(seed, steps=5, tiles=3, gathers=True, fault=fault, plan=plan)


# ---------------------------------------------------------------- on a GPU


@pytest.fixture
def launched(monkeypatch):
    """One entry for each launch of the kernel."""
    seen, real = [], fused.launch_sdd_activation_backward
    monkeypatch.setattr(fused, "launch_sdd_activation_backward", lambda *args: seen.append(args) or real(*args))
    return seen


WEIGHTS = {
    "down": lambda E, F, H, dtype=torch.bfloat16: randn(E, H, F, dtype=dtype, scale=F**-0.5).transpose(1, 2),
    "up": lambda E, F, H, dtype=torch.bfloat16: randn(E, F, H, dtype=dtype, scale=F**-0.5),
}


class Operands:
    """Of one call: what belongs to dropped slots and their tokens is NaN."""

    def __init__(
        self,
        sizes: str = "of 16 bytes only",
        routing: str = "uneven",
        form: str = "down",
        dtype: torch.dtype = torch.bfloat16,
        activation: str = "swiglu",
        weights: bool = True,
        scale: float = 1.0,
    ) -> None:
        T, H, F, E, K = SIZES[sizes]
        ids = ROUTINGS[routing](T, E, K)
        ids[0] = -1
        self.topology, self.activation = Topology.from_ids(ids, E), get_activation(activation)
        self.kept = int(self.topology.num_rows)
        self.x, self.w = randn(T, H, dtype=dtype), WEIGHTS[form](E, F, H, dtype)
        self.x[0] = torch.nan
        pre = randn(T * K, 2 * F, dtype=dtype, scale=scale)
        pre[self.kept :] = torch.nan
        self.pre = BlockSparse(pre, self.topology, Columns.equal(2 * F, E))
        self.weights = torch.rand(T, K, device=ids.device) + 0.1 if weights else None
        if weights:
            self.weights[(ids < 0) | (ids >= E)] = torch.nan

    def run(self, **options) -> dict[str, Tensor]:
        """Results, of rows that exist, once it is known that the others are as they are to be."""
        grad_pre, scaled, grad_weights = op.sdd_activation_backward(
            self.x, self.w, self.topology, self.pre, self.activation, self.weights, config=TILE, **options
        )
        assert not grad_pre.values[self.kept :].any() and scaled.values[self.kept :].isnan().all()
        results = {"grad_pre": grad_pre.values[: self.kept], "scaled": scaled.values[: self.kept]}
        if self.weights is None:
            assert grad_weights is None
        else:
            slots = self.topology.slots.long()
            in_rows = grad_weights.reshape(-1)[slots]
            assert grad_weights.dtype == self.weights.dtype and not in_rows[self.kept :].any()
            results["grad_weights"] = in_rows[: self.kept]
        return results

    def expected(self, bias_dot: Tensor | None = None) -> dict[str, Tensor]:
        """In fp64."""
        rows, offsets = self.topology.tokens[: self.kept], self.topology.offsets.tolist()
        x, pre = self.x.double()[rows], self.pre.values[: self.kept].double().requires_grad_()
        blocks = [x[a:b] @ w.double().T for a, b, w in zip(offsets, offsets[1:], self.w, strict=False)]
        grad, hidden = torch.cat(blocks), self.activation(pre)
        scale = torch.ones(self.kept, 1, dtype=torch.float64, device=x.device)
        if self.weights is not None:
            scale = self.weights.reshape(-1)[self.topology.slots[: self.kept].long(), None].double()
        (grad_pre,) = torch.autograd.grad(hidden, pre, scale * grad)
        results = {"grad_pre": grad_pre, "scaled": (scale * hidden).detach()}
        if self.weights is not None:
            dots = torch.linalg.vecdot(grad, hidden.detach())
            results["grad_weights"] = dots if bias_dot is None else dots + bias_dot[: self.kept]
        return results


def compare(operands: Operands, launched, monkeypatch, **options) -> dict[str, Tensor]:
    """Of this kernel, which is as exact as the two passes allow."""
    launched.clear()
    ours = operands.run(**options)
    assert len(launched) == 1
    with monkeypatch.context() as patch:
        patch.setattr(op, "_gluon", None)
        passes = operands.run(**options)
    assert len(launched) == 1
    for name, expected in operands.expected(**options).items():
        assert not ours[name].isnan().any(), name
        assert_within_budget(name, ours[name], expected, passes[name], operands.x.dtype)
    return ours


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("form", WEIGHTS)
@pytest.mark.parametrize("weights", [True, False])
def test_as_the_two_passes(weights, form, routing, sizes, launched, monkeypatch, fresh_memory):
    compare(Operands(sizes, routing, form, weights=weights), launched, monkeypatch)
    fresh_memory.check_guards()


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_every_plan(sizes, plan, launched, monkeypatch, fresh_memory):
    launch = fused.launch_sdd_activation_backward
    monkeypatch.setattr(fused, "launch_sdd_activation_backward", lambda *args: launch(*args, plan))
    compare(Operands(sizes), launched, monkeypatch)
    fresh_memory.check_guards()


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "geglu_tanh", "reglu", "relu2_glu", CLAMPED])
def test_activations(activation, dtype, launched, monkeypatch, fresh_memory):
    compare(Operands(activation=activation, dtype=dtype, scale=4), launched, monkeypatch)
    fresh_memory.check_guards()


@needs_hopper
@pytest.mark.gpu
def test_the_part_of_a_bias(launched, monkeypatch, fresh_memory):
    operands = Operands()
    dot = randn(operands.topology.num_slots, dtype=torch.float32)
    dot[operands.kept :] = torch.nan
    compare(operands, launched, monkeypatch, bias_dot=dot)


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("form", WEIGHTS)
def test_layouts(form, launched, monkeypatch, fresh_memory):
    """Operands that are views of larger ones, what lies between them NaN."""
    operands = Operands(form=form)
    expected = operands.run()
    operands.x, w = inside(operands.x), operands.w
    operands.w = inside(w) if form == "up" else inside(w.transpose(1, 2)).transpose(1, 2)
    operands.weights = torch.stack([operands.weights, torch.full_like(operands.weights, torch.nan)], dim=2)[..., 0]
    ours = operands.run()
    assert len(launched) == 2
    assert all(torch.equal(ours[name], values) for name, values in expected.items())


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES)
def test_30_runs(sizes, launched, fresh_memory):
    operands = Operands(sizes)
    first = operands.run()
    for _ in range(29):
        fresh_memory.buffers.clear()
        assert all(torch.equal(values, first[name]) for name, values in operands.run().items())
    assert len(launched) == 30


@needs_hopper
@pytest.mark.gpu
def test_replayed_in_the_layer(launched, monkeypatch):
    """The layer takes it by itself; later calls of the form launch it on their own tensors."""
    T, H, F, E, K = SIZES["multiples of all tiles"]
    topology = Topology.from_ids(ROUTINGS["uneven"](T, E, K), E)
    up, down = randn(E, 2 * F, H, dtype=torch.bfloat16, scale=H**-0.5), randn(E, H, F, dtype=torch.bfloat16, scale=F**-0.5)

    def gradients(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        leaves = [randn(T, H, dtype=torch.bfloat16), torch.rand(T, K, device=up.device), up, down]
        x, weights, *_ = leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        y = expert_mlp(x, topology, leaves[2], leaves[3], routing_weights=weights)
        return list(torch.autograd.grad(y, leaves, torch.randn_like(y)))

    ours = [gradients(seed) for seed in range(3)]
    assert len(launched) == 1
    replay._recordings.clear()
    again = gradients(2)
    assert all(torch.equal(some, other) for some, other in zip(ours[2], again, strict=True))
    replay._recordings.clear()
    monkeypatch.setattr(op, "_gluon", None)
    for seed, found in enumerate(ours):
        for some, other in zip(found, gradients(seed), strict=True):
            assert (some - other).float().norm() <= 1e-2 * other.float().norm()
    assert len(launched) == 2
