"""The kernel of dsd in Gluon is used where it can be, and computes what the kernel in whose place it runs does, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", minversion="3.6")

from blocksparse_moe import expert_mlp
from blocksparse_moe_kernels import BlockSparse, Columns, Topology, versions
from blocksparse_moe_kernels.launch import fold_halves, stack_weight
from blocksparse_moe_kernels.triton import dsd as op
from blocksparse_moe_kernels.triton import replay
from blocksparse_moe_kernels.triton.descriptors import weight_form

from .support import HAS_CUDA

if not versions.gluon_is_known():
    pytest.skip("Gluon of this Triton is not known", allow_module_level=True)

from blocksparse_moe_kernels.triton import dsd_gluon, gluon_rings
from blocksparse_moe_kernels.triton.gluon_rings import TILE

from .gluon_support import ROUTINGS, SIZES, assert_same, half, inside, needs_hopper, randn, run_schedule

# ---------------------------------------------------------------- where it is used

E, N, H = 2, 24, 40


def applies(w=None, bias=None, config=TILE) -> bool:
    """Of operands on a CPU, which counts as sm_90."""
    w = half(E, N, H) if w is None else w
    topology = Topology.from_ids(torch.zeros(4, 1, dtype=torch.int64), E)
    weight = fold_halves(stack_weight("dsd", w, topology, None))
    form = weight_form(weight) if weight.halves == 1 else None
    return dsd_gluon.applies(weight, form, bias, config)


GIVEN = {
    "nothing special": {},
    "fp16": {"w": half(E, N, H).half()},
    "a dense sparse side": {"w": half(E, H, N).transpose(1, 2)},
    "halves that follow each other": {"w": half(E, 2, N, H)},
    "a single step": {"w": half(E, 8, H)},
    "padded weights": {"w": half(E, N, H + 8)[..., :H]},
}
EXCLUDED = {
    "a bias": {"bias": half(E, H)},
    "another tile": {"config": replace(TILE, block_m=64)},
    "pointers": {"config": replace(TILE, tma=False)},
    "halves apart": {"w": half(E, N, 2, H).transpose(1, 2)},
    "weights without a dense axis": {"w": half(E, N, H, 2)[..., 0]},
    "fp32": {"w": half(E, N, H).float()},
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


# ---------------------------------------------------------------- its barriers


def test_rings_under_random_schedules():
    for seed in range(60):
        run_schedule(seed, steps=1 + seed % 5, tiles=1 + seed % 3, gathers=False)


def test_the_model_sees_a_fault():
    with pytest.raises(AssertionError, match="weight overwritten"):
        for seed in range(60):
            run_schedule(seed, steps=8, tiles=3, gathers=False, fault="slots freed too early")


# ---------------------------------------------------------------- on a GPU


@pytest.fixture
def launched(monkeypatch):
    """One entry for each launch of the kernel."""
    seen, real = [], dsd_gluon.launch_dsd
    monkeypatch.setattr(dsd_gluon, "launch_dsd", lambda *args: seen.append(args) or real(*args))
    return seen


def down(E: int, F: int, H: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return randn(E, H, F, dtype=dtype, scale=F**-0.5).transpose(1, 2)


def up(E: int, F: int, H: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return randn(E, 2 * F, H, dtype=dtype, scale=F**-0.5)


WEIGHTS: dict[str, Callable[..., Tensor]] = {"down": down, "grad_rows": up}


def sparse(w: Tensor, topology: Topology) -> BlockSparse:
    """What no expert has is NaN: it must not be read, or not reach a result."""
    values = randn(topology.num_slots, w.shape[1], dtype=w.dtype)
    values[int(topology.num_rows) :] = torch.nan
    return BlockSparse(values, topology, Columns.equal(w.shape[1], topology.num_experts))


def both(launched, monkeypatch, s: BlockSparse, w: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The result of this kernel and of the one in whose place it runs; rows that do not exist are not written."""
    kept = int(s.topology.num_rows)

    def run() -> list[Tensor]:
        y = op.dsd(s, w, config=TILE)
        assert y[kept:].isnan().all()
        return [y[:kept]]

    launched.clear()
    ours = run()
    assert len(launched) == 1
    with monkeypatch.context() as patch:
        patch.setattr(op, "_gluon", None)
        plain = run()
    assert len(launched) == 1
    return ours, plain


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("product", WEIGHTS)
def test_the_same_bits(product, routing, sizes, launched, monkeypatch, fresh_memory):
    T, H, F, E, K = SIZES[sizes]
    topology, w = Topology.from_ids(ROUTINGS[routing](T, E, K), E), WEIGHTS[product](E, F, H)
    assert_same(*both(launched, monkeypatch, sparse(w, topology), w))
    fresh_memory.check_guards()


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("product", WEIGHTS)
def test_fp16(product, launched, monkeypatch, fresh_memory):
    T, H, F, E, K = SIZES["of 16 bytes only"]
    topology, w = Topology.from_ids(ROUTINGS["uneven"](T, E, K), E), WEIGHTS[product](E, F, H, torch.float16)
    assert_same(*both(launched, monkeypatch, sparse(w, topology), w))
    fresh_memory.check_guards()


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("steps", range(1, 10))
@pytest.mark.parametrize("product", WEIGHTS)
def test_numbers_of_steps(product, steps, launched, monkeypatch, fresh_memory):
    """Fewer than the ring has slots, and any remainder."""
    w = WEIGHTS[product](16, 32 * steps - 8, 520)
    topology = Topology.from_ids(ROUTINGS["uneven"](2000, 16, 4), 16)
    assert_same(*both(launched, monkeypatch, sparse(w, topology), w))
    fresh_memory.check_guards()


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("product", WEIGHTS)
def test_views(product, launched, monkeypatch, fresh_memory):
    """Values and weights that are views of larger ones, what lies between them NaN."""
    T, H, F, E, K = SIZES["of 16 bytes only"]
    topology, w = Topology.from_ids(ROUTINGS["uneven"](T, E, K), E), WEIGHTS[product](E, F, H)
    s = sparse(w, topology)
    expected, _ = both(launched, monkeypatch, s, w)
    wide = inside(w) if product == "grad_rows" else inside(w.transpose(1, 2)).transpose(1, 2)
    ours, plain = both(launched, monkeypatch, replace(s, values=inside(s.values)), wide)
    assert_same(ours, plain)
    assert_same(ours, expected)


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("product", WEIGHTS)
def test_30_runs(product, sizes, launched, fresh_memory):
    T, H, F, E, K = SIZES[sizes]
    topology, w = Topology.from_ids(ROUTINGS["uneven"](T, E, K), E), WEIGHTS[product](E, F, H)
    s, kept, results = sparse(w, topology), int(topology.num_rows), []
    for _ in range(30):
        results.append(op.dsd(s, w, config=TILE)[:kept])
        fresh_memory.buffers.clear()
        assert_same(results[-1:], results[:1])
    assert len(launched) == 30


@needs_hopper
@pytest.mark.gpu
def test_the_layer_takes_it(launched, monkeypatch):
    """By itself, forward and backward; later calls of the form launch it on their own tensors."""
    T, H, F, E, K = SIZES["multiples of all tiles"]
    up_proj, down_proj = up(E, F, H), down(E, F, H).transpose(1, 2)
    topology = Topology.from_ids(ROUTINGS["uneven"](T, E, K), E)

    def layer(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        y = expert_mlp(x, topology, up_proj, down_proj)
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
        return y.detach(), grad

    tokens = [randn(T, H, dtype=torch.bfloat16) for _ in range(3)]
    results = [layer(x) for x in tokens]
    first_calls = len(launched)
    assert first_calls >= 2
    replay._recordings.clear()
    monkeypatch.setattr(op, "_gluon", None)
    for x, result in zip(tokens, results, strict=True):
        assert_same(list(layer(x)), list(result))
    assert len(launched) == first_calls
