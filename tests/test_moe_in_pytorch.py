"""dMoE's life inside PyTorch: compile, autocast, checkpoints, what is kept for backward, frozen parts, second order."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from blocksparse_moe import MoEConfig, RouterConfig, combine, dMoE, dsd, sdd
from blocksparse_moe_kernels import Columns, Topology, torch_products

from .moe_support import SMALL, UNEQUAL, assert_close, assert_equal, build, run
from .support import DEVICE, each_backend_slowly, randn

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@each_backend_slowly
def test_inside_sequential(backend):
    layer = build(SMALL, backend)
    model = nn.Sequential(nn.LayerNorm(8), layer, nn.GELU(), nn.Linear(8, 4)).to(DEVICE)
    model(torch.randn(2, 5, 8, device=DEVICE)).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name
    assert [type(module).__name__ for module in layer.children()] == ["Router", "Experts"]


@pytest.mark.case("K3")
@each_backend_slowly
@pytest.mark.parametrize("compiler", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
@pytest.mark.parametrize("config", [SMALL, UNEQUAL], ids=["equal", "unequal"])
def test_compile(config, compiler, backend):
    check_compiled(build(config, backend), compiler)


@pytest.mark.case("K3")
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler; c++ is not on the path")
def test_compile_with_inductor():
    check_compiled(build(UNEQUAL, "auto"), "inductor")


def check_compiled(layer: dMoE, compiler: str) -> None:
    torch.compiler.reset()
    x = torch.randn(2, 5, 8, device=DEVICE)
    expected = run(layer, x)
    layer.compile(fullgraph=True, backend=compiler)
    assert_close(run(layer, x), expected)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected["y"], rtol=1e-5, atol=1e-5)


@pytest.mark.case("K3")
def test_compile_with_losses_and_autocast():
    torch.compiler.reset()
    layer, x = build(SMALL), torch.randn(10, 8, device=DEVICE)

    def step(x):
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            y, routing = layer(x, return_routing=True)
        return y.float().square().mean() + routing.load_balancing_loss + routing.z_loss

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        layer.zero_grad()
        loss = function(x)
        loss.backward()
        results.append((loss.detach(), *(parameter.grad for parameter in layer.parameters())))
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain)


@pytest.mark.case("K3")
@each_backend_slowly
def test_routing_and_number_of_tokens_do_not_recompile(backend):
    """Ten routings, empty experts among them, and several numbers of tokens: one static graph and one dynamic."""
    torch.compiler.reset()
    graphs = []

    def compiler(graph, _):
        graphs.append(graph)
        return graph.forward

    layer = build(MoEConfig(8, 6, 8, router=RouterConfig(2)), backend)
    compiled = torch.compile(layer, fullgraph=True, backend=compiler)
    for step, tokens in enumerate((5, 5, 9, 14, 14, 11)):
        with torch.no_grad():
            nn.init.normal_(layer.router.weight, std=0.0 if step == 1 else 1.0)
            x = torch.randn(tokens, 8, device=DEVICE)
            torch.testing.assert_close(compiled(x), layer(x))
    assert len(graphs) <= 2


@each_backend_slowly
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("config", [SMALL, UNEQUAL], ids=["equal", "unequal"])
def test_activation_checkpointing(config, use_reentrant, backend):
    layer, x = build(config, backend), torch.randn(7, 8, device=DEVICE)
    expected = run(layer, x)
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = checkpoint(layer, leaf, use_reentrant=use_reentrant)
    y.backward(torch.ones_like(y))
    ours = {"y": y.detach(), "x": leaf.grad, **{name: parameter.grad for name, parameter in layer.named_parameters()}}
    assert_equal(ours, expected)


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_recomputation_routes_as_before_at_ties(use_reentrant):
    layer = build(MoEConfig(16, 12, 16, router=RouterConfig(4)), dtype=torch.bfloat16)
    with torch.no_grad():
        layer.router.weight.copy_(layer.router.weight[:1].clone())
    x = torch.randn(32, 16, device=DEVICE, dtype=torch.bfloat16)
    assert layer(x, return_routing=True)[1].logits.diff(dim=-1).abs().max() < 1e-6
    expected = run(layer, x)
    layer.zero_grad()
    checkpoint(layer, x.requires_grad_(), use_reentrant=use_reentrant).sum().backward()
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


class Ops(TorchDispatchMode):
    """Names of the ops of this package that run, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "blocksparse_moe":
            self.names.append(op.name())
        return op(*args, **(kwargs or {}))


@each_backend_slowly
def test_inference_saves_nothing_and_computes_the_same(backend):
    never_used_before = replace(UNEQUAL, ffn_hidden_size=(5, 3, 9 if backend == "torch" else 10))
    layer, x = build(never_used_before, backend), torch.randn(7, 8, device=DEVICE)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
        with torch.inference_mode():
            inferred = layer(x)
        with torch.no_grad(), Ops() as ops:
            y = layer(x)
        layer.requires_grad_(False)
        frozen = layer(x)
    assert saved == []
    assert "blocksparse_moe::expert_mlp" in ops.names, "one op, which keeps no pre-activation"
    assert not {name for name in ops.names if "expert_up" in name or "expert_down" in name}
    assert not y.requires_grad and not frozen.requires_grad
    layer.requires_grad_(True)
    trained = run(layer, x)["y"]  # constants that inference cached are of use in training too
    for other in (inferred.clone(), y, frozen):
        assert torch.equal(other, trained)


@each_backend_slowly
@pytest.mark.parametrize("config", [SMALL, UNEQUAL], ids=["equal", "unequal"])
def test_training_saves_the_input_and_the_pre_activation(config, backend):
    layer, x = build(config, backend), torch.randn(20, 8, device=DEVICE, requires_grad=True)
    routing = layer.router(x)
    topology = Topology.from_ids(routing.expert_ids, 3)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = layer.experts(x, topology, routing.weights)
    y.sum().backward()
    given = {tensor.untyped_storage().data_ptr() for tensor in (x, routing.weights, *layer.parameters())}
    floating = [tensor for tensor in saved if tensor.is_floating_point()]
    made = {tensor.untyped_storage().data_ptr(): tensor.numel() for tensor in floating} | dict.fromkeys(given, 0)
    rows = 40
    assert sum(made.values()) == rows * 2 * config.columns.widest, "the pre-activation [M, 2F], and nothing else, is made"
    assert x.data_ptr() in {tensor.data_ptr() for tensor in floating}
    integers = {tensor.untyped_storage().data_ptr(): tensor.numel() for tensor in saved if not tensor.is_floating_point()}
    assert sum(integers.values()) <= 4 * rows + 4 * rows, "a few numbers a row describe the routing"


@each_backend_slowly
def test_a_second_backward_through_a_kept_graph(backend):
    layer, x = build(UNEQUAL, backend), torch.randn(6, 8, device=DEVICE, requires_grad=True)
    leaves = [x, *layer.parameters()]
    y = layer(x)
    first = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    second = torch.autograd.grad(y.sum(), leaves)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y.sum(), leaves)


PARTS = {
    "experts": ["experts.gate_up_proj", "experts.gate_up_proj_bias", "experts.down_proj", "experts.down_proj_bias"],
    "router": ["router.weight"],
    "weights": ["experts.gate_up_proj", "experts.down_proj"],
    "biases": ["experts.gate_up_proj_bias", "experts.down_proj_bias"],
    "up": ["experts.gate_up_proj", "experts.gate_up_proj_bias"],
    "down": ["experts.down_proj", "experts.down_proj_bias"],
    "all but down": ["router.weight", "experts.gate_up_proj", "experts.gate_up_proj_bias", "experts.down_proj_bias"],
    "input": ["x"],
    "input and router": ["x", "router.weight"],
}


@pytest.mark.parametrize(
    ("part", "backend"),
    [
        *((part, "torch") for part in PARTS),
        pytest.param("weights", "triton", marks=pytest.mark.slow),
        pytest.param("input and router", "triton", marks=pytest.mark.slow),
    ],
)
def test_frozen_parts_have_no_gradient_and_change_no_other(part, backend):
    layer, x = build(UNEQUAL, backend), torch.randn(7, 8, device=DEVICE)
    expected = run(layer, x)
    layer.zero_grad()
    tensors = {"x": x.clone().requires_grad_(), **dict(layer.named_parameters())}
    for name in PARTS[part]:
        tensors[name].requires_grad_(False)
    y = layer(tensors["x"])
    y.backward(torch.ones_like(y))
    for name, tensor in tensors.items():
        if name in PARTS[part]:
            assert tensor.grad is None, name
        else:
            assert torch.equal(tensor.grad, expected[name]), name


def test_frozen_experts_cost_no_weight_gradient(monkeypatch):
    layer, x = build(SMALL), torch.randn(7, 8, device=DEVICE, requires_grad=True)
    calls = []
    product = torch_products.dsd_transposed
    monkeypatch.setattr(torch_products, "dsd_transposed", lambda *args, **named: calls.append(1) or product(*args, **named))
    for frozen, expected in ((), 2), (("down_proj",), 1), (("down_proj", "gate_up_proj"), 0):
        for name in frozen:
            getattr(layer.experts, name).requires_grad_(False)
        calls.clear()
        layer(x).sum().backward()
        assert len(calls) == expected, frozen
    assert x.grad is not None


@each_backend_slowly
def test_second_order_gradients_of_the_layer_say_what_to_do(backend):
    layer, x = build(SMALL, backend), torch.randn(5, 8, device=DEVICE, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second-order gradients are not implemented"):
        grad.square().sum().backward()


@pytest.mark.parametrize("columns", [Columns.equal(3, 3), Columns.of([1, 3, 2])], ids=str)
def test_the_products_have_gradients_of_second_order(columns):
    topology = Topology.from_ids(torch.tensor([[0, 1], [2, 2], [-1, 0]], device=DEVICE), 3)
    shape = (3, 3, 4) if columns.are_equal else (columns.total, 4)
    leaves = [tensor.requires_grad_() for tensor in (randn(3, 4), randn(*shape), randn(*shape), randn(3, 2))]

    def layer(x, up, down, weights):
        s = sdd(x, up, topology, columns=columns, backend="torch")
        return combine(dsd(s, down, backend="torch"), topology, weights, backend="torch")

    assert torch.autograd.gradcheck(layer, leaves)
    assert torch.autograd.gradgradcheck(layer, leaves, fast_mode=True)
