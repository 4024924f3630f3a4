"""The backend `te` on any machine, with a stand-in for Transformer Engine; tests/test_te_engine.py has the real one."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blocksparse_moe import Experts, MoEConfig, Router, RouterConfig, Topology, dMoE, products
from blocksparse_moe.backends import ExpertSpec, report, select
from blocksparse_moe.backends import te as te_backend
from blocksparse_moe.backends.execution import Execution
from blocksparse_moe.backends.te import engine as te_engine
from blocksparse_moe.backends.te import products as te_products
from blocksparse_moe.backends.te import run as te_run
from blocksparse_moe.backends.te.fused import conditions
from blocksparse_moe.backends.te.products import interleave
from blocksparse_moe.backends.te.recipes import RECIPES
from blocksparse_moe.backends.te.weights import stacked_grads, views_of
from blocksparse_moe_kernels import Columns, reference

from .support import DEVICE, assert_within_budget, randn, routings
from .te_stand_in import BLACKWELL, HOPPER, MODULE

CUDA = torch.device("cuda", 0)


def spec(precision: str | None = None, *, require_fused: bool = False, **changes: object) -> ExpertSpec:
    execution = Execution("te", precision, require_fused)
    plain = ExpertSpec(Columns.equal(128, 4), 256, "swiglu", False, torch.bfloat16, CUDA, execution=execution)
    return replace(plain, **changes)


@pytest.fixture
def on(monkeypatch):
    """Answers of a device, or a reason, in place of Transformer Engine's."""

    def answer(engine):
        monkeypatch.setattr(te_backend, "ask", lambda device: engine)
        monkeypatch.setattr(products, "_capability", lambda device: getattr(engine, "capability", (9, 0)))

    return answer


# -------------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": torch.device("cpu")}, "needs a CUDA device; the tensors are on cpu"),
        ({"columns": Columns.of([1, 2, 3, 4])}, "multiplies experts of one size only"),
        ({"dtype": torch.float64}, "computes in bf16, fp16 and fp32; got torch.float64"),
        ({"recompute": True}, "does not recompute .*transformer_engine.pytorch.checkpoint"),
    ],
)
def test_refusals_of_the_layer(on, change, reason):
    on(HOPPER)
    with pytest.raises(NotImplementedError, match=f"backend 'te' {reason}"):
        select(spec(**change))


@pytest.mark.parametrize(
    ("precision", "nearest"), [("mxfp8", "fp8_block"), ("nvfp4", "fp8_block"), ("fp8_block", None), ("bf16", None)]
)
def test_recipes_of_hopper(on, precision, nearest):
    on(HOPPER)
    if nearest is None:
        assert select(spec(precision))[0].name == "te"
        return
    with pytest.raises(NotImplementedError) as error:
        select(spec(precision))
    reason = str(HOPPER.available[precision]).rstrip(".")
    assert f"cannot compute in {precision} on cuda:0 (compute capability 9.0): {reason}." in str(error.value)
    assert f'The nearest that runs here is precision="{nearest}"' in str(error.value)
    assert ("backend='triton' emulates mxfp8" in str(error.value)) == (precision == "mxfp8")


def test_the_nearest_recipe_is_one_that_runs(on):
    on(replace(HOPPER, capability=(8, 0), available=dict.fromkeys(HOPPER.available, "too old.")))
    for precision in set(RECIPES) - {"bf16"}:
        with pytest.raises(NotImplementedError, match="nearest that runs here is the dtype of the weights: leave"):
            select(spec(precision))
    on(replace(HOPPER, available=HOPPER.available | {"fp8_block": "CUDA >= 12.9 is needed."}))
    with pytest.raises(NotImplementedError, match='nearest that runs here is precision="fp8_current"'):
        select(spec("fp8_block"))


@pytest.mark.parametrize(("precision", "multiple"), [("fp8_current", 16), ("fp8_block", 16), ("mxfp8", 32)])
def test_sizes_that_a_recipe_cannot_take(on, precision, multiple):
    on(BLACKWELL)
    with pytest.raises(
        NotImplementedError,
        match=f"with sizes 200: H and F must be multiples of {multiple}. The nearest that takes them is the dtype",
    ):
        select(spec(precision, hidden_size=200))
    assert select(spec("bf16", hidden_size=201))[0].name == "te"


def test_bf16_is_bf16(on):
    on(HOPPER)
    with pytest.raises(ValueError, match=r'precision="bf16": the experts compute in torch.float32'):
        select(spec("bf16", dtype=torch.float32))
    assert select(spec(None, dtype=torch.float32))[0].name == "te"


def test_other_backends_leave_fp8_to_it(on):
    on(HOPPER)
    for name in ("torch", "triton"):
        with pytest.raises(NotImplementedError, match=f"backend '{name}' does not compute in fp8_current.*use backend='te'"):
            select(replace(spec(), execution=Execution(name, "fp8_current")))
    auto = replace(spec(), execution=Execution("auto", "fp8_current"))
    assert select(auto)[0].name == "te"
    on("needs Transformer Engine >= 2.17, which is not installed")
    with pytest.raises(NotImplementedError, match=r"backend 'te' needs Transformer Engine >= 2.17, which is not installed"):
        select(auto)
    assert "nothing runs here" in report(auto)


@pytest.mark.parametrize("precision", ["fp8", "MXFP8", "", "int8"])
def test_unknown_precisions(precision):
    with pytest.raises(ValueError, match=f"precision: '{precision}' is not known; choose one of bf16"):
        dMoE(MoEConfig(8, 8, 2), backend="te", precision=precision)


# -------------------------------------------------------------------- absent, too old, broken


@pytest.fixture
def fresh_load():
    te_engine.load.cache_clear()
    te_engine.ask.cache_clear()
    yield
    te_engine.load.cache_clear()
    te_engine.ask.cache_clear()


@pytest.mark.parametrize(
    ("version", "failure", "message"),
    [
        (None, None, r"needs Transformer Engine >= 2.17, which is not installed \(pip install 'blocksparse-moe\[te\]'\)"),
        ("2.16.1", None, "needs Transformer Engine >= 2.17; found 2.16.1"),
        ("main-abc", None, "found one whose version is 'main-abc', which cannot be compared"),
        (
            "2.20.2",
            ImportError("undefined symbol: cublasLt"),
            "found Transformer Engine 2.20.2, which cannot be imported.*cublas",
        ),
        ("2.20.2", OSError("libtransformer_engine.so"), "cannot be imported beside torch .*OSError: libtransformer_engine.so"),
        ("2.20.2", AssertionError("Minimum torch"), "cannot be imported.*AssertionError: Minimum torch"),
        ("2.20.2", ValueError("invalid literal for int()"), "cannot be imported.*ValueError: invalid literal"),
    ],
)
def test_an_engine_that_is_not_there(monkeypatch, fresh_load, version, failure, message):
    was_there = "transformer_engine" in sys.modules
    monkeypatch.setattr(products, "_capability", lambda device: (9, 0))

    def of(distribution: str) -> str:
        if distribution != te_engine.DISTRIBUTION:
            return metadata.distribution(distribution).version
        if version is None:
            raise metadata.PackageNotFoundError(distribution)
        return version

    def broken(name: str) -> ModuleType:
        raise failure

    monkeypatch.setattr(te_engine.metadata, "version", of)
    if failure is not None:
        monkeypatch.setattr(te_engine, "import_module", broken)
    with pytest.raises(NotImplementedError, match=message):
        select(spec())
    assert "nothing runs here" in report(spec())
    layer = dMoE(MoEConfig(8, 8, 2), backend="te")
    layer.experts.execution = Execution("auto")
    assert layer(torch.randn(3, 8)).shape == (3, 8)  # nothing else is affected
    assert ("transformer_engine" in sys.modules) == was_there


# -------------------------------------------------------------------- fused or not


def test_every_condition_is_named(on):
    on(BLACKWELL)
    assert all(condition.holds for condition in conditions(BLACKWELL, "mxfp8", spec("mxfp8")))
    text = report(spec("mxfp8"))
    assert "fused grouped MLP; the conditions:" in text and "unfused" not in text and "FAILS" not in text
    assert "never run here by this project" in text and "padded to 256" in text
    assert "first weight is copied" in text and "streams" not in text


@pytest.mark.parametrize(("registered", "fails"), [(True, []), (False, ["NVTE_CUTEDSL_FUSED_GROUPED_MLP", "registered"])])
def test_a_variable_that_may_have_come_too_late(on, registered, fails):
    engine = replace(BLACKWELL, imported_before=True, fused_registered=registered)
    failing = [condition for condition in conditions(engine, "mxfp8", spec("mxfp8")) if not condition.holds]
    assert len(failing) == len(fails) and all(words in str(one) for words, one in zip(fails, failing, strict=True))
    on(engine)
    assert "set to 1 now, but it was imported before this package could look" in report(spec("mxfp8"))


def test_the_variable_is_read_before_the_import(monkeypatch, fresh_load):
    def imported(name: str) -> ModuleType:
        monkeypatch.setenv(te_engine.FUSED_VARIABLE, "1")
        return ModuleType(name)

    monkeypatch.delenv(te_engine.FUSED_VARIABLE, raising=False)
    monkeypatch.setattr(te_engine, "installed", lambda: "2.20.2")
    monkeypatch.setattr(te_engine, "import_module", imported)
    assert isinstance(te_engine.load(), ModuleType)
    assert te_engine._at_import.fused_variable is None


def test_a_frontend_of_no_version(on):
    (condition,) = (
        one
        for one in conditions(replace(BLACKWELL, cudnn_frontend="main-abc"), "mxfp8", spec("mxfp8"))
        if "frontend" in one.needs
    )
    assert not condition.holds and "main-abc" in str(condition)


@pytest.mark.parametrize(
    ("precision", "advice"),
    [("mxfp8", "emulates mxfp8 without it"), ("fp8_block", "precision=\"mxfp8\" with backend='auto'"), (None, "needs none")],
)
def test_what_runs_without_it(on, precision, advice):
    on("needs Transformer Engine >= 2.17, which is not installed")
    for device in (CUDA, torch.device("cpu")):
        with pytest.raises(NotImplementedError, match=re.escape(advice)):
            select(spec(precision, device=device))


@pytest.mark.parametrize(
    ("change", "engine", "words"),
    [
        ({}, {"fused_variable": None}, "NVTE_CUTEDSL_FUSED_GROUPED_MLP=1 .*not set"),
        ({}, {"fused_variable": "0"}, "NVTE_CUTEDSL_FUSED_GROUPED_MLP=1 .*set to 0"),
        ({}, {"capability": (11, 0)}, r"compute capability 10.x \(Blackwell\) \(11.0\)"),
        ({}, {"cudnn_frontend": "1.9.0"}, r"nvidia-cudnn-frontend >= 1.23.0 \(1.9.0\)"),
        ({}, {"cudnn_frontend": None}, "nvidia-cudnn-frontend .*not installed"),
        ({}, {"fused_registered": False}, "is registered by Transformer Engine .*not registered"),
        ({"hidden_size": 288}, {}, "multiples of 64 .*H=288"),
        ({"activation": "geglu"}, {}, "plain swiglu .*geglu"),
        ({"bias": True}, {}, "no biases"),
        ({"dtype": torch.float16}, {}, "computation in bf16 .*float16"),
    ],
)
def test_a_condition_that_fails(on, change, engine, words):
    on(replace(BLACKWELL, **engine))
    text = report(spec("mxfp8", **change))
    assert "unfused grouped MLP; the conditions:" in text
    (failing,) = [line for line in text.splitlines() if "FAILS" in line]
    assert re.search(words, failing)
    with pytest.raises(NotImplementedError, match="would run unfused, and require_fused=True was asked for: FAILS"):
        select(spec("mxfp8", require_fused=True, **change))


def test_a_report_of_hopper(on):
    on(HOPPER)
    text = report(spec("fp8_current"))
    assert text.startswith("backend te (asked for)")
    for words in (
        "Transformer Engine 2.20.2, cuBLASLt 13.1",
        "precision fp8_current: Float8CurrentScaling, rows of each expert padded to 16",
        "unfused grouped MLP",
        "FAILS: precision mxfp8 (fp8_current)",
        "no CUDA graphs",
        "torch.compile",
    ):
        assert words in text


def test_the_order_of_the_fused_kernel():
    weight = torch.arange(2 * 128 * 3).view(2, 128, 3)
    mixed = interleave(weight)
    assert torch.equal(mixed[:, :32], weight[:, :32]) and torch.equal(mixed[:, 32:64], weight[:, 64:96])
    assert torch.equal(mixed[:, 64:96], weight[:, 32:64]) and torch.equal(mixed[:, 96:], weight[:, 96:])


# -------------------------------------------------------------------- weights are views


def test_views_share_memory_and_give_one_gradient():
    stacked = torch.randn(3, 4, 5, requires_grad=True)
    views = views_of(stacked, stacked)
    assert all(view.data_ptr() == stacked[i].data_ptr() for i, view in enumerate(views))
    (views[0].sum() + 2 * views[2].sum()).backward()
    assert torch.equal(stacked.grad, torch.tensor([1.0, 0, 2])[:, None, None].expand(3, 4, 5))


def test_gradients_in_one_piece_are_taken_as_they_are():
    packed = torch.randn(3, 4, 5)
    assert stacked_grads(tuple(packed), packed.shape).data_ptr() == packed.data_ptr()
    apart = [part.clone() for part in packed]
    apart[1] = None
    result = stacked_grads(tuple(apart), packed.shape)
    assert torch.equal(result[0], packed[0]) and (result[1] == 0).all() and torch.equal(result[2], packed[2])
    assert stacked_grads((None, None, None), packed.shape) is None
    swapped = (packed[1], packed[0], packed[2])
    assert torch.equal(stacked_grads(swapped, packed.shape), torch.stack(swapped))


# -------------------------------------------------------------------- the whole path


@pytest.fixture
def stand_in(monkeypatch):
    """The layer's path on this machine's device, with the stand-in's products."""
    monkeypatch.setattr(te_backend, "ask", lambda device: HOPPER)
    monkeypatch.setattr(te_run, "load", lambda: MODULE)
    monkeypatch.setattr(te_products, "recipe_of", lambda precision: RECIPES[precision].name)
    monkeypatch.setattr(te_backend.TransformerEngine, "why_not", lambda self, spec: None)


def layer(activation="swiglu", bias=False, precision=None, num_experts=4, dtype=torch.float32) -> Experts:
    router = RouterConfig(top_k=1, normalize=False)
    config = MoEConfig(24, 16, num_experts, activation=activation, bias=bias, router=router, init_std=0.3)
    experts = Experts(config, device=DEVICE, dtype=dtype, backend="te", precision=precision)
    for name, parameter in experts.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return experts


def gradients(experts: Experts, x: Tensor, topology: Topology, weights: Tensor | None, grad: Tensor) -> dict[str, Tensor]:
    x = x.detach().clone().requires_grad_()
    weights = None if weights is None else weights.detach().clone().requires_grad_()
    experts.zero_grad()
    y = experts(x, topology, weights)
    y.backward(grad)
    found = {"y": y.detach(), "x": x.grad, **{name: p.grad.clone() for name, p in experts.named_parameters()}}
    return found if weights is None else found | {"weights": weights.grad}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("precision", [None, "fp8_current"])
def test_the_whole_path(stand_in, precision):
    """With exact products, padded or not, it computes what every other backend does."""

    @given(data=st.data())
    def agrees(data):
        routing = data.draw(routings())
        topology = routing.topology
        experts = layer(
            data.draw(st.sampled_from(["swiglu", "gelu", "geglu(interleaved)"])),
            data.draw(st.booleans()),
            precision,
            routing.num_experts,
        )
        x, grad = (randn(topology.num_tokens, 24, dtype=torch.float32).float() for _ in range(2))
        weights = randn(*routing.expert_ids.shape, dtype=torch.float32).float() if data.draw(st.booleans()) else None
        ours = gradients(experts, x, topology, weights, grad)
        products, exact = copy.deepcopy(experts), copy.deepcopy(experts).double()
        products.execution = exact.execution = Execution("torch")
        theirs = gradients(products, x, topology, weights, grad)
        oracle = gradients(exact, x.double(), topology, None if weights is None else weights.double(), grad.double())
        for name, expected in oracle.items():
            terms = max(1.0, float(expected.abs().max()) if expected.numel() else 1.0)
            assert_within_budget(name, ours[name], expected, theirs[name], torch.float32, 24**0.5 * terms)

    agrees()


def test_second_order_gradients_say_what_to_do(stand_in):
    moe = dMoE(MoEConfig(24, 16, 4, router=RouterConfig(top_k=2)), device=DEVICE, backend="te")
    x = torch.randn(6, 24, device=DEVICE, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"second-order gradients are not implemented.*create_graph=True"):
        torch.autograd.grad(moe(x).square().sum(), x, create_graph=True)
    assert torch.autograd.grad(moe(x).square().sum(), x)[0].any()


def test_threads_share_a_layer(stand_in):
    experts, topology = layer(), Topology.from_ids(torch.randint(4, (50, 1), device=DEVICE), 4)
    x = torch.randn(50, 24, device=DEVICE)
    expected = experts(x, topology)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: experts(x, topology), range(60)))
    assert all(torch.equal(y, expected) for y in results)


class _Fused(SimpleNamespace):
    """`transformer_engine.pytorch.ops` in a few lines, which run as one op."""

    class GroupedLinear(torch.nn.Module):
        def __init__(self, number, inside, outside, *, bias, dtype, device):
            super().__init__()
            for i in range(number):
                weight = torch.nn.Parameter(torch.empty(outside, inside, dtype=dtype, device=device))
                self.register_parameter(f"weight{i}", weight)

    class ScaledSwiGLU(torch.nn.Module):
        def __init__(self, glu_interleave_size):
            super().__init__()
            self.size = glu_interleave_size

    class Sequential(torch.nn.Module):
        ran = "GroupedMLP_CuTeGEMMGLU"

        def __init__(self, *ops):
            super().__init__()
            self.ops = ops

        def forward(self, x, splits, scales, same):
            up, activation, down = self.ops
            assert torch.equal(splits, same) and not (splits % 256).any() and int(splits.sum()) == len(x) == len(scales)
            self._module_groups = [SimpleNamespace(_forward_ops=[(type(self.ran, (), {})(), [0])])]
            parts = []
            for i, (rows, weights) in enumerate(zip(x.split(splits.tolist()), scales.split(splits.tolist()), strict=True)):
                gate, linear = (rows @ getattr(up, f"weight{i}").T).unflatten(1, (-1, 2, activation.size)).unbind(2)
                hidden = (torch.nn.functional.silu(gate) * linear).flatten(1) * weights[:, None]
                parts.append(hidden @ getattr(down, f"weight{i}").T)
            return torch.cat(parts)


@pytest.fixture
def fused_stand_in(stand_in, monkeypatch):
    ops = _Fused(GroupedLinear=_Fused.GroupedLinear, ScaledSwiGLU=_Fused.ScaledSwiGLU, Sequential=_Fused.Sequential)
    monkeypatch.setattr(te_products, "import_module", lambda name: ops)
    monkeypatch.setattr(te_backend, "_failing", lambda engine, spec: [])


def test_the_fused_path(fused_stand_in):
    """Rows of 256, the first weight in the order of the fused kernel, and gradients of everything."""
    config = MoEConfig(64, 64, 4, router=RouterConfig(top_k=2), init_std=0.2)
    ours = Experts(config, device=DEVICE, backend="te", precision="mxfp8")
    theirs = copy.deepcopy(ours)
    theirs.execution = Execution("torch")
    topology = Topology.from_ids(torch.tensor([[0, 1], [1, 3], [3, -1]], device=DEVICE), 4)
    x, grad, weights = torch.randn(3, 64, device=DEVICE), torch.randn(3, 64, device=DEVICE), torch.rand(3, 2, device=DEVICE)
    found, expected = (gradients(experts, x, topology, weights, grad) for experts in (ours, theirs))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_unfused_in_place_of_fused_is_an_error(fused_stand_in, monkeypatch):
    monkeypatch.setattr(_Fused.Sequential, "ran", "ForwardGroupedLinear")
    experts = Experts(MoEConfig(64, 64, 4), device=DEVICE, backend="te", precision="mxfp8")
    with pytest.raises(RuntimeError, match="took ForwardGroupedLinear in place of the fused grouped MLP"):
        experts(torch.randn(3, 64, device=DEVICE), Topology.from_ids(torch.tensor([[0], [1], [3]], device=DEVICE), 4))


def test_dropped_slots_give_exact_zeros(stand_in):
    topology = Topology.from_ids(torch.tensor([[0, -1], [-1, 7], [3, 3]], device=DEVICE), 4)
    weights = torch.full((3, 2), 0.5, device=DEVICE)
    weights[1] = torch.nan
    found = gradients(layer(bias=True), torch.randn(3, 24, device=DEVICE), topology, weights, torch.ones(3, 24, device=DEVICE))
    assert (found["y"][1] == 0).all() and (found["x"][1] == 0).all()
    assert (found["weights"][1] == 0).all() and found["weights"][0, 1] == 0
    assert (found["gate_up_proj"][1:3] == 0).all() and found["y"].isfinite().all()


@pytest.mark.parametrize("flag", [False, True], ids=["plain", "Megatron's flag"])
def test_main_grad(stand_in, flag):
    """Two micro-batches add to main_grad what they would add to grad."""
    ours = layer()
    theirs = copy.deepcopy(ours)
    for parameter in ours.parameters():
        parameter.main_grad = torch.ones_like(parameter)
        if flag:
            parameter.grad_added_to_main_grad = False
    topology = Topology.from_ids(torch.tensor([[0, 1], [1, 3], [3, 0]], device=DEVICE), 4)
    batches = [torch.randn(3, 24, device=DEVICE) for _ in range(2)]
    for module in (ours, theirs):
        outputs = [module(x, topology) for x in batches]  # both before the first backward
        for y in outputs:
            y.square().sum().backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.main_grad - 1, other.grad, rtol=1e-4, atol=1e-5)
        assert mine.grad is None if not flag else (mine.grad == 0).all()
        assert not flag or mine.grad_added_to_main_grad


def test_main_grad_of_two_backward_passes_through_one_graph(stand_in):
    experts, topology = layer(), Topology.from_ids(torch.randint(4, (9, 1), device=DEVICE), 4)
    for parameter in experts.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
        parameter.grad_added_to_main_grad = False
    loss = experts(torch.randn(9, 24, device=DEVICE), topology).square().sum()
    loss.backward(retain_graph=True)
    once = [parameter.main_grad.clone() for parameter in experts.parameters()]
    for parameter in experts.parameters():
        parameter.grad, parameter.grad_added_to_main_grad = None, False
    loss.backward()
    for parameter, first in zip(experts.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.main_grad, 2 * first)
        assert parameter.grad_added_to_main_grad and parameter.grad is not None and not parameter.grad.any()


def test_a_main_grad_that_comes_after_the_forward_is_not_for_it(stand_in):
    ours = layer()
    y = ours(torch.randn(3, 24, device=DEVICE), Topology.from_ids(torch.tensor([[0], [1], [3]], device=DEVICE), 4))
    for parameter in ours.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    y.square().sum().backward()
    for parameter in ours.parameters():
        assert parameter.grad is not None and parameter.grad.any() and not parameter.main_grad.any()


def test_main_grad_is_overwritten_where_that_is_asked_for(stand_in):
    ours = layer()
    theirs = copy.deepcopy(ours)
    for parameter in ours.parameters():
        parameter.main_grad = torch.full_like(parameter, 3.0)
        parameter.overwrite_main_grad = True
    topology = Topology.from_ids(torch.tensor([[0, 1], [1, 3], [3, 0]], device=DEVICE), 4)
    x = torch.randn(3, 24, device=DEVICE)
    for module in (ours, theirs):
        module(x, topology).square().sum().backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.main_grad, other.grad, rtol=1e-4, atol=1e-5)


def test_frozen_weights_and_no_grad(stand_in):
    experts = layer()
    experts.requires_grad_(False)
    topology = Topology.from_ids(torch.tensor([[0, 1], [1, 3]], device=DEVICE), 4)
    x = torch.randn(2, 24, device=DEVICE, requires_grad=True)
    experts(x, topology).sum().backward()
    assert x.grad is not None and all(parameter.grad is None for parameter in experts.parameters())
    with torch.no_grad():
        assert not experts(x, topology).requires_grad


def test_weights_in_other_strides_are_refused(stand_in):
    experts = layer()
    transposed = experts.down_proj.detach().transpose(1, 2).contiguous().transpose(1, 2)
    experts.down_proj = torch.nn.Parameter(transposed)
    topology = Topology.from_ids(torch.tensor([[0, 1]], device=DEVICE), 4)
    with pytest.raises(NotImplementedError, match=r"down_proj .* has strides .*backend='triton' takes any strides"):
        experts(torch.randn(1, 24, device=DEVICE), topology)


def test_the_layer_is_the_same_module(stand_in):
    config = MoEConfig(24, 16, 4)
    ours, theirs = dMoE(config, device=DEVICE, backend="te", precision="fp8_delayed"), dMoE(config, device=DEVICE)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 24, device=DEVICE)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    assert isinstance(ours.router, Router) and "backend='te', precision='fp8_delayed'" in repr(ours)
    memory = ours.experts.execution.memory
    ((form, modules),) = memory.items()
    ours.half()(x.half())
    ours.float()(x)
    assert memory[form] is modules and len(memory) == 2, "modules, which keep the scales, are made once for each dtype"
    assert not [name for name, _ in ours.named_modules() if "te" in name.split(".")]
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert twin.experts.execution == ours.experts.execution and not twin.experts.execution.memory
        torch.testing.assert_close(twin(x), ours(x))
    assert ours.state_dict().keys() == theirs.state_dict().keys()


def test_oracle_of_the_stand_in(stand_in):
    experts = layer(bias=True)
    topology = Topology.from_ids(torch.tensor([[0, 1], [1, 3]], device=DEVICE), 4)
    x, weights = torch.randn(2, 24, device=DEVICE), torch.rand(2, 2, device=DEVICE)
    expected = reference.expert_mlp(
        x, topology, experts.gate_up_proj, experts.down_proj, weights,
        up_proj_bias=experts.gate_up_proj_bias, down_proj_bias=experts.down_proj_bias,
    )  # fmt: skip
    torch.testing.assert_close(experts(x, topology, weights), expected, rtol=1e-4, atol=1e-4)


# -------------------------------------------------------------------- models of Hugging Face


@pytest.fixture
def families():
    pytest.importorskip("transformers", minversion="5.9")
    from . import hf_families

    return hf_families


def test_a_patched_model(stand_in, families):
    from blocksparse_moe import patch_huggingface

    model = families.build("mixtral", DEVICE).eval()
    given = families.inputs(model, "mixtral")
    with torch.no_grad():
        expected = model(**given).logits
        with patch_huggingface(model, backend="te", precision="fp8_current") as handle:
            assert all("backend te (asked for), precision fp8_current, unfused" in line for line in handle.report.splitlines())
            torch.testing.assert_close(model(**given).logits, expected, rtol=1e-4, atol=1e-4)
            twin = copy.deepcopy(model)
            torch.testing.assert_close(twin(**given).logits, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(model(**given).logits, expected)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("jetmoe", "_of_linears"), ("llama4", "_transposed"), ("longcat_flash", "_of_routed"), ("step3p7", "_as_they_are")],
)
def test_adapted_models_are_judged_by_their_own_weights(families, name, sizes, monkeypatch):
    from blocksparse_moe import patch_huggingface
    from blocksparse_moe.integrations.huggingface import adapters, patch

    if (reason := families.missing(families.FAMILIES[name])) is not None:
        pytest.skip(reason)
    seen = []
    monkeypatch.setattr(patch, "select", lambda spec: seen.append(spec) or select(spec))
    model = families.build(name, DEVICE)
    handle = patch_huggingface(model, precision="mxfp8")
    assert len(seen) == len(handle.layers) > 0
    for spec, layer in zip(seen, handle.layers, strict=True):
        assert spec.activation == layer.activation != "silu"
        E, H, F = getattr(adapters, sizes)(model.get_submodule(layer.name)).down.shape
        assert (spec.columns, spec.hidden_size) == (Columns.equal(F, E), H)


def test_models_that_it_cannot_compute(stand_in, families):
    from blocksparse_moe import patch_huggingface

    model = families.build("gpt_oss", DEVICE).eval()  # its weights lie transposed
    given = families.inputs(model, "gpt_oss")
    with patch_huggingface(model, backend="te"), pytest.raises(NotImplementedError, match=r"up_proj .* has strides"):
        model(**given)
    with pytest.raises(NotImplementedError, match=r"gate is its own .* choose backend='triton'"):
        patch_huggingface(families.build("dbrx", DEVICE), backend="te")


def test_a_model_without_an_engine_is_refused_at_the_patch(families):
    from blocksparse_moe import patch_huggingface

    model = families.build("mixtral", "cpu")
    with pytest.raises(NotImplementedError, match="backend 'te' needs a CUDA device"):
        patch_huggingface(model, backend="te")
