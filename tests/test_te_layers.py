"""Layers and models on the backend `te`, with a stand-in for Transformer Engine; tests/test_te_engine.py has the real one."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blocksparse_moe import Experts, MoEConfig, Router, RouterConfig, Topology, dMoE
from blocksparse_moe.backends import select
from blocksparse_moe.backends import te as te_backend
from blocksparse_moe.backends.execution import Execution
from blocksparse_moe.backends.te import products as te_products
from blocksparse_moe.backends.te import run as te_run
from blocksparse_moe.backends.te.recipes import RECIPES
from blocksparse_moe_kernels import Columns, reference

from .support import DEVICE, assert_within_budget, randn, routings
from .te_stand_in import HOPPER, MODULE

CUDA = torch.device("cuda", 0)


# -------------------------------------------------------------------- the whole path


@pytest.fixture
def stand_in(monkeypatch):
    """The layer's path on this machine's device, with the stand-in's products."""
    te = te_backend.TransformerEngine
    monkeypatch.setattr(te_backend, "ask", lambda device: HOPPER)
    monkeypatch.setattr(te_run, "load", lambda: MODULE)
    monkeypatch.setattr(te_products, "recipe_of", lambda precision: RECIPES[precision].name)
    monkeypatch.setattr(te, "why_not", te.never)


def layer(activation="swiglu", bias=False, precision=None, num_experts=4, dtype=torch.float32) -> Experts:
    router = RouterConfig(top_k=1, normalize=False)
    config = MoEConfig(32, 16, num_experts, activation=activation, bias=bias, router=router, init_std=0.3)
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
        x, grad = (randn(topology.num_tokens, 32, dtype=torch.float32).float() for _ in range(2))
        weights = randn(*routing.expert_ids.shape, dtype=torch.float32).float() if data.draw(st.booleans()) else None
        ours = gradients(experts, x, topology, weights, grad)
        products, exact = copy.deepcopy(experts), copy.deepcopy(experts).double()
        products.execution = exact.execution = Execution("torch")
        theirs = gradients(products, x, topology, weights, grad)
        oracle = gradients(exact, x.double(), topology, None if weights is None else weights.double(), grad.double())
        for name, expected in oracle.items():
            terms = max(1.0, float(expected.abs().max()) if expected.numel() else 1.0)
            assert_within_budget(name, ours[name], expected, theirs[name], torch.float32, 32**0.5 * terms)

    agrees()


def test_second_order_gradients_say_what_to_do(stand_in):
    moe = dMoE(MoEConfig(32, 16, 4, router=RouterConfig(top_k=2)), device=DEVICE, backend="te")
    x = torch.randn(6, 32, device=DEVICE, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"second-order gradients are not implemented.*create_graph=True"):
        torch.autograd.grad(moe(x).square().sum(), x, create_graph=True)
    assert torch.autograd.grad(moe(x).square().sum(), x)[0].any()


def test_threads_share_a_layer(stand_in):
    experts, topology = layer(), Topology.from_ids(torch.randint(4, (50, 1), device=DEVICE), 4)
    x = torch.randn(50, 32, device=DEVICE)
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
    monkeypatch.setattr(te_backend, "is_fused", lambda engine, spec: True)


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
    found = gradients(layer(bias=True), torch.randn(3, 32, device=DEVICE), topology, weights, torch.ones(3, 32, device=DEVICE))
    assert (found["y"][1] == 0).all() and (found["x"][1] == 0).all()
    assert (found["weights"][1] == 0).all() and found["weights"][0, 1] == 0
    assert (found["gate_up_proj"][1:3] == 0).all() and found["y"].isfinite().all()


@pytest.mark.parametrize("frozen", [["gate_up_proj"], ["down_proj"], ["gate_up_proj", "down_proj"]], ids=" and ".join)
def test_main_grad_of_frozen_weights_is_left_alone(stand_in, frozen):
    experts, topology = layer(), Topology.from_ids(torch.tensor([[0, 1], [1, 3], [3, 0]], device=DEVICE), 4)
    for name, parameter in experts.named_parameters():
        parameter.main_grad = torch.ones_like(parameter)
        parameter.grad_added_to_main_grad = False
        parameter.requires_grad_(name not in frozen)
    x = torch.randn(3, 32, device=DEVICE, requires_grad=True)
    experts(x, topology).square().sum().backward()
    assert x.grad.any()
    for name, parameter in experts.named_parameters():
        assert (parameter.main_grad == 1).all() == (name in frozen), name
        assert parameter.grad_added_to_main_grad == (parameter.grad is not None) == (name not in frozen), name


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
    batches = [torch.randn(3, 32, device=DEVICE) for _ in range(2)]
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
    loss = experts(torch.randn(9, 32, device=DEVICE), topology).square().sum()
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
    y = ours(torch.randn(3, 32, device=DEVICE), Topology.from_ids(torch.tensor([[0], [1], [3]], device=DEVICE), 4))
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
    x = torch.randn(3, 32, device=DEVICE)
    for module in (ours, theirs):
        module(x, topology).square().sum().backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.main_grad, other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrong", ["x", [0.0], 0])
def test_a_main_grad_is_a_tensor(stand_in, wrong):
    experts = layer()
    experts.down_proj.main_grad = wrong
    with pytest.raises(TypeError, match=r"main_grad of down_proj must be of type Tensor; got \w+\. Give a buffer"):
        experts(torch.randn(1, 32, device=DEVICE), Topology.from_ids(torch.tensor([[0]], device=DEVICE), 4))


def test_main_grad_of_a_part_of_a_parameter_is_refused(stand_in, families):
    """LongCat-Flash: a half that gets its gradient in grad, and one in main_grad, would go unnoticed."""
    from blocksparse_moe import patch_huggingface

    if (reason := families.missing(families.FAMILIES["longcat_flash"])) is not None:
        pytest.skip(reason)
    model = families.build("longcat_flash", DEVICE)
    given = families.inputs(model, "longcat_flash")
    (patched, *_) = patch_huggingface(model, backend="te").layers
    parameter = model.get_submodule(patched.name).gate_up_proj
    parameter.main_grad = torch.zeros_like(parameter)
    with pytest.raises(
        NotImplementedError, match=r"up_proj is a part of a parameter, whose main_grad would get nothing\. Take"
    ):
        model(**given)
    with torch.no_grad():
        model(**given)
    del parameter.main_grad
    model(**given).logits.sum().backward()
    assert parameter.grad.any()


def test_frozen_weights_and_no_grad(stand_in):
    experts = layer()
    experts.requires_grad_(False)
    topology = Topology.from_ids(torch.tensor([[0, 1], [1, 3]], device=DEVICE), 4)
    x = torch.randn(2, 32, device=DEVICE, requires_grad=True)
    experts(x, topology).sum().backward()
    assert x.grad is not None and all(parameter.grad is None for parameter in experts.parameters())
    with torch.no_grad():
        assert not experts(x, topology).requires_grad


def test_weights_in_other_strides_are_refused(stand_in):
    experts = layer()
    transposed = experts.down_proj.detach().transpose(1, 2).contiguous().transpose(1, 2)
    experts.down_proj = torch.nn.Parameter(transposed)
    topology = Topology.from_ids(torch.tensor([[0, 1]], device=DEVICE), 4)
    refused = r"takes each expert's matrices contiguous, .*other strides\. The nearest that runs here is "
    with pytest.raises(NotImplementedError, match=rf"{refused}backend='auto' \((torch|triton): float32\)\.$"):
        experts(torch.randn(1, 32, device=DEVICE), topology)
    experts.execution = Execution("te", "fp8_block")
    with pytest.raises(NotImplementedError, match=rf"{refused}.*precision='mxfp8', backend='auto'"):
        experts(torch.randn(1, 32, device=DEVICE), topology)
    experts.execution = Execution("auto")
    assert experts(torch.randn(1, 32, device=DEVICE), topology).isfinite().all()


def test_the_layer_is_the_same_module(stand_in):
    config = MoEConfig(32, 16, 4)
    ours, theirs = dMoE(config, device=DEVICE, backend="te", precision="fp8_delayed"), dMoE(config, device=DEVICE)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 32, device=DEVICE)
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
    x, weights = torch.randn(2, 32, device=DEVICE), torch.rand(2, 2, device=DEVICE)
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


def test_a_patched_model(stand_in, families, monkeypatch):
    from blocksparse_moe import patch_huggingface

    monkeypatch.setitem(families.SHARED, "intermediate_size", 48)
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
    for one in (model, copy.deepcopy(model).to("meta")):
        with pytest.raises(NotImplementedError, match=r"other strides\. The nearest that runs here is backend='auto'"):
            patch_huggingface(one, backend="te")
        with pytest.raises(NotImplementedError, match=r"other strides\. .*, or precision='mxfp8', backend='auto'"):
            patch_huggingface(one, backend="te", precision="fp8_block")
        for precision in (None, "mxfp8"):
            patch_huggingface(one, precision=precision).restore()
    with pytest.raises(NotImplementedError, match=r"gate is its own .* choose backend='auto', and neither precision nor"):
        patch_huggingface(families.build("dbrx", DEVICE), backend="te")
    assert patch_huggingface(families.build("dbrx", DEVICE)).layers


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_precision_that_the_backend_lacks_is_refused_at_the_patch(families, device):
    from blocksparse_moe import patch_huggingface

    model = families.build("mixtral", "cpu").to(device)
    with pytest.raises(NotImplementedError, match=r"backend 'torch' has no fp8_block\. The nearest that runs here is prec"):
        patch_huggingface(model, backend="torch", precision="fp8_block")
    with pytest.raises(ValueError, match="precision: 'fp7' is not known"):
        patch_huggingface(model, precision="fp7")


def test_a_model_without_an_engine_is_refused_at_the_patch(families):
    from blocksparse_moe import patch_huggingface

    model = families.build("mixtral", "cpu")
    with pytest.raises(NotImplementedError, match="backend 'te' needs a CUDA device"):
        patch_huggingface(model, backend="te")
