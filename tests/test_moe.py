"""dMoE: agreement with the fp64 oracle, and life inside PyTorch: compile, autocast, checkpoints, copies, meta device."""

from __future__ import annotations

import copy
import itertools
import shutil
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from blocksparse_moe import MoEConfig, RouterConfig, combine, dMoE, dsd, sdd
from blocksparse_moe_kernels import ACTIVATIONS, Columns, Topology, reference, torch_products

from .support import DEVICE, HAS_CUDA, each_backend_slowly, randn

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SMALL = MoEConfig(hidden_size=8, ffn_hidden_size=6, num_experts=3, router=RouterConfig(top_k=2))
UNEQUAL = replace(SMALL, ffn_hidden_size=(5, 2, 7), activation="geglu", bias=True)


def narrow_dtype(backend: str) -> torch.dtype:
    """bf16; but fp16 for Triton's interpreter, which computes bf16 wrongly."""
    return torch.float16 if backend == "triton" and not HAS_CUDA else torch.bfloat16


def build(config: MoEConfig, backend: str = "torch", dtype: torch.dtype = torch.float32) -> dMoE:
    """A layer whose activations are of size one, and whose biases are not zero."""
    layer = dMoE(config, device=DEVICE, dtype=dtype, backend=backend)
    fan_in = {layer.experts.up_name: config.hidden_size, "down_proj": config.columns.widest, "weight": config.hidden_size}
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            scale = fan_in.get(name.rpartition(".")[2], 1) ** -0.5
            parameter.copy_(randn(*parameter.shape, dtype=dtype, scale=scale))
    return layer


def oracle(layer: dMoE, x: Tensor, expert_ids: Tensor, grad: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The reference in `dtype` (its router at least in fp32): the output "y", and the gradients of x and every parameter."""
    config, wide = layer.config, torch.promote_types(dtype, torch.float32)
    leaves = {"x": x, **dict(layer.named_parameters())}
    leaves = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in leaves.items()}
    logits = leaves["x"].reshape(-1, config.hidden_size).to(wide) @ leaves["router.weight"].to(wide).T
    weights = logits.softmax(dim=-1).gather(1, expert_ids)
    if config.router.normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    up = layer.experts.up_name
    y = reference.expert_mlp(
        leaves["x"].reshape(-1, config.hidden_size),
        Topology.from_ids(expert_ids, config.num_experts),
        leaves[f"experts.{up}"],
        leaves["experts.down_proj"],
        weights,
        activation=config.activation,
        up_proj_bias=leaves.get(f"experts.{up}_bias"),
        down_proj_bias=leaves.get("experts.down_proj_bias"),
        columns=None if config.columns.are_equal else config.columns,
    ).view(x.shape)
    grads = torch.autograd.grad(y, list(leaves.values()), grad.to(dtype), allow_unused=True, materialize_grads=True)
    return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}


def run(layer: nn.Module, x: Tensor, grad: Tensor | None = None) -> dict[str, Tensor]:
    """One step: the output "y", and the gradients of x and every parameter."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(torch.ones_like(y) if grad is None else grad.to(y.dtype))
    return {"y": y.detach(), "x": x.grad, **{name: parameter.grad for name, parameter in layer.named_parameters()}}


def assert_equal(ours: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert ours.keys() == others.keys()
    for name, value in ours.items():
        assert value is not None, f"{name} has no gradient"
        assert value.dtype == others[name].dtype and torch.equal(value, others[name]), f"{name} differs"


def assert_close(ours: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    """Up to the order of fp32 sums of terms of size one."""
    for name, value in others.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


CHAIN = 4
"""Rounded intermediates between input and gradient: dA', the activation's derivative, dPre, and the sum over rows."""


def assert_agrees(
    layer: dMoE, x: Tensor, expert_ids: Tensor, grad: Tensor, ours: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """Our error is at most twice (the reference's own error in `dtype` + a rounding of each intermediate).

    A rounding is of the size of the result, or of what cancels in it.

    Activations are of size one, hence most terms. The backward of the router's softmax cancels terms <grad, y> of a token.
    The reference's relative error is its worst over the results of the step: that of a single one may be nil by chance.
    """
    exact = oracle(layer, x, expert_ids, grad, torch.float64)
    torchs = oracle(layer, x, expert_ids, grad, dtype)
    dots = torch.linalg.vecdot(grad.abs(), exact["y"].abs()).max().item() if x.numel() else 0.0
    errors, torch_errors = {}, {}
    for name, value in ours.items():
        assert value.shape == exact[name].shape, f"{name}: {tuple(value.shape)}, expected {tuple(exact[name].shape)}"
        if value.numel() == 0:
            continue
        terms = max(1.0, dots) if name in ("x", "router.weight") else 1.0
        size = max(terms, exact[name].abs().max().item())
        errors[name] = (value.double() - exact[name]).abs().max().item() / size
        torch_errors[name] = (torchs[name].double() - exact[name]).abs().max().item() / size
    budget = 2 * (max(torch_errors.values(), default=0.0) + CHAIN * torch.finfo(dtype).eps)
    for name, error in errors.items():
        assert error <= budget, f"{name}: relative error {error:.3e}, budget {budget:.3e}, torch's own {torch_errors[name]:.3e}"


# -------------------------------------------------------------------- agreement with the oracle


@dataclass(frozen=True)
class Problem:
    """A layer, and the experts [T, K] that its router is made to choose."""

    config: MoEConfig
    expert_ids: tuple[tuple[int, ...], ...]

    def inputs(self, layer: dMoE) -> Tensor:
        """x [T, H] whose logits, under orthonormal router weights that are set here, have the chosen experts in order."""
        H, E, K = self.config.hidden_size, self.config.num_experts, self.config.router.top_k
        ids = torch.tensor(self.expert_ids, dtype=torch.int64).view(-1, K)
        logits = (-1 - torch.rand(len(ids), E, dtype=torch.float64)).scatter(
            1, ids, 2 - 0.5 * torch.arange(K, dtype=torch.float64).expand(len(ids), K)
        )
        weight = torch.linalg.qr(torch.randn(H, E, dtype=torch.float64)).Q.T
        noise = torch.randn(len(ids), H, dtype=torch.float64)
        with torch.no_grad():
            layer.router.weight.copy_(weight)
        return (noise + (logits - noise @ weight.T) @ weight).float().to(DEVICE)


@st.composite
def problems(draw) -> Problem:
    """Experts come from a drawn subset, so that unused ones and those that take every token come by themselves."""
    E = draw(st.integers(1, 4))
    K = draw(st.integers(1, E))
    used = draw(st.lists(st.integers(0, E - 1), min_size=K, max_size=E, unique=True))
    ids = draw(st.lists(st.permutations(used).map(lambda experts: tuple(experts[:K])), max_size=10))
    ffn = st.integers(1, 16)
    config = MoEConfig(
        hidden_size=draw(st.integers(E, 24)),
        ffn_hidden_size=draw(st.one_of(ffn, st.lists(ffn, min_size=E, max_size=E))),
        num_experts=E,
        activation=draw(st.sampled_from(sorted(ACTIVATIONS))),
        bias=draw(st.booleans()),
        router=RouterConfig(K, normalize=K > 1 and draw(st.booleans())),
    )
    return Problem(config, tuple(ids))


def check(problem: Problem, backend: str) -> None:
    layer = build(problem.config, backend)
    x = problem.inputs(layer)
    grad = randn(*x.shape, dtype=torch.float32)
    _, routing = layer(x, return_routing=True)
    assert routing.expert_ids.tolist() == [list(ids) for ids in problem.expert_ids]
    ours = run(layer, x, grad)
    assert_agrees(layer, x, routing.expert_ids, grad, ours, torch.float32)
    unused = set(range(problem.config.num_experts)) - set(itertools.chain(*problem.expert_ids))
    for name, parameter in layer.experts.named_parameters():
        stacked = problem.config.columns.are_equal or name == "down_proj_bias"
        halves = parameter.shape[0] // problem.config.columns.total
        grads = parameter.grad if stacked else parameter.grad.split(problem.config.columns.times(halves).widths)
        for expert in unused:
            assert not grads[expert].any(), f"{name}: expert {expert} has no token, and a gradient"


@given(problem=problems())
def test_torch_agrees_with_the_oracle(problem):
    check(problem, "torch")


@pytest.mark.slow
@settings(max_examples=max(4, settings.default.max_examples // 8))
@given(problem=problems())
def test_triton_agrees_with_the_oracle(problem):
    check(problem, "triton")


@each_backend_slowly
@pytest.mark.parametrize("config", [SMALL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)], ids=str)
def test_no_tokens(shape, config, backend):
    layer = build(config, backend)
    result = run(layer, torch.empty(shape, device=DEVICE))
    assert result["y"].shape == result["x"].shape == shape
    for name, parameter in layer.named_parameters():
        assert torch.equal(result[name], torch.zeros_like(parameter)), f"{name}: {result[name]}"


@each_backend_slowly
@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 8), (1, 1, 4, 8)], ids=str)
def test_any_number_of_dimensions(shape, backend):
    layer, x = build(SMALL, backend), torch.randn(shape, device=DEVICE)
    y, routing = layer(x, return_routing=True)
    assert y.shape == shape
    assert torch.equal(y, layer(x.view(-1, 8)).view(shape))
    tokens = x.numel() // 8
    assert routing.logits.shape == (tokens, 3)
    assert routing.weights.shape == routing.expert_ids.shape == (tokens, 2)
    assert routing.tokens_per_expert.sum() == 2 * tokens


@each_backend_slowly
def test_every_expert_chosen_is_a_dense_mixture(backend):
    layer, x = build(replace(SMALL, router=RouterConfig(3)), backend), torch.randn(6, 8, device=DEVICE)
    probabilities = (x @ layer.router.weight.T).softmax(dim=-1)
    gate, up = torch.einsum("th, enh -> etn", x, layer.experts.gate_up_proj).chunk(2, dim=-1)
    experts = torch.einsum("etf, ehf -> eth", nn.functional.silu(gate) * up, layer.experts.down_proj)
    expected = torch.einsum("te, eth -> th", probabilities, experts)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


@each_backend_slowly
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.filterwarnings("ignore:RouterConfig")
def test_a_single_expert_is_a_plain_mlp(normalize, backend):
    layer = build(MoEConfig(8, 6, 1, activation="gelu", router=RouterConfig(1, normalize=normalize)), backend)
    x = torch.randn(6, 8, device=DEVICE)
    up, down = layer.experts.up_proj[0], layer.experts.down_proj[0]
    expected = nn.functional.linear(nn.functional.gelu(nn.functional.linear(x, up)), down)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


@each_backend_slowly
def test_strides_of_input_and_gradient_do_not_matter(backend):
    layer = build(SMALL, backend)
    x, grad = torch.randn(6, 8, device=DEVICE), torch.randn(1, 8, device=DEVICE).expand(6, 8)
    expected = run(layer, x, grad.contiguous())
    padded = torch.full((6, 20), torch.nan, device=DEVICE)
    padded[:, 2:18:2] = x
    for view in (x.T.contiguous().T, padded[:, 2:18:2]):
        assert not view.is_contiguous()
        assert_close(run(layer, view, grad), expected)
    one = x[:1].expand(6, 8)
    assert_close(run(layer, one, grad), run(layer, one.contiguous(), grad))


@each_backend_slowly
def test_permuting_tokens_permutes_the_result(backend):
    layer = build(UNEQUAL, backend)
    x, grad = torch.randn(9, 8, device=DEVICE), torch.randn(9, 8, device=DEVICE)
    order = torch.randperm(9, device=DEVICE)
    straight, permuted = run(layer, x, grad), run(layer, x[order], grad[order])
    assert_close(permuted, {name: value[order] if name in ("x", "y") else value for name, value in straight.items()})


@each_backend_slowly
@pytest.mark.parametrize("config", [SMALL, UNEQUAL], ids=["equal", "unequal"])
def test_two_runs_are_bitwise_equal(config, backend):
    layer, x = build(config, backend), torch.randn(11, 8, device=DEVICE)
    first = run(layer, x)
    assert all(value.any() for value in first.values())
    assert_equal(run(layer, x), first)


@each_backend_slowly
def test_gradients_accumulate(backend):
    layer = build(UNEQUAL, backend)
    a, b = torch.randn(4, 8, device=DEVICE), torch.randn(7, 8, device=DEVICE)
    parts = [run(layer, x) for x in (a, b)]
    layer.zero_grad()
    for x in (a, b):
        y = layer(x)
        y.backward(torch.ones_like(y))
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, parts[0][name] + parts[1][name]), name


# -------------------------------------------------------------------- dtypes


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("torch", torch.float16), ("torch", torch.bfloat16), ("triton", torch.float16)] + [("triton", torch.bfloat16)] * HAS_CUDA,
    ids=str,
)
@pytest.mark.parametrize("config", [SMALL, pytest.param(UNEQUAL, marks=pytest.mark.slow)], ids=["equal", "unequal"])
def test_a_narrow_module(config, backend, dtype):
    layer = build(config, backend)
    layer = layer.half() if dtype == torch.float16 else layer.bfloat16()
    x, grad = randn(9, 8, dtype=dtype).to(dtype), randn(9, 8, dtype=dtype)
    _, routing = layer(x, return_routing=True)
    ours = run(layer, x, grad)
    assert {value.dtype for value in ours.values()} == {dtype}
    assert routing.logits.dtype == routing.weights.dtype == torch.float32
    assert_agrees(layer, x, routing.expert_ids, grad, ours, dtype)


@each_backend_slowly
@pytest.mark.parametrize("config", [SMALL, UNEQUAL], ids=["equal", "unequal"])
def test_autocast(config, backend):
    dtype = narrow_dtype(backend)
    layer = build(config, backend)
    x, grad = randn(9, 8, dtype=dtype).float().requires_grad_(), randn(9, 8, dtype=dtype)
    with torch.autocast(DEVICE.type, dtype=dtype):
        y, routing = layer(x, return_routing=True)
    y.backward(grad.to(y.dtype))
    assert y.dtype == dtype
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert {value.dtype for value in (x.grad, *grads.values())} == {torch.float32}
    # autocast rounds the weights, which the oracle has as they are: let it see the rounded ones.
    with torch.no_grad():
        for parameter in layer.experts.parameters():
            parameter.copy_(parameter.to(dtype))
    assert_agrees(layer, x, routing.expert_ids, grad, {"y": y, "x": x.grad, **grads}, dtype)


@each_backend_slowly
def test_the_weights_choose_the_dtype_of_the_computation(backend):
    dtype = narrow_dtype(backend)
    x = torch.randn(7, 8, device=DEVICE).to(dtype)
    wide = build(SMALL, backend)
    ours, expected = run(wide, x), run(wide, x.float())
    assert ours["y"].dtype == ours["x"].dtype == dtype
    assert torch.equal(ours["y"], expected["y"].to(dtype))
    assert ours["experts.down_proj"].dtype == torch.float32
    torch.testing.assert_close(ours["x"], expected["x"].to(dtype), rtol=0.02, atol=0.02)

    narrow = build(SMALL, backend, dtype)
    ours, expected = run(narrow, x.float()), run(narrow, x)
    assert ours["y"].dtype == ours["x"].dtype == torch.float32
    assert torch.equal(ours["y"], expected["y"].float())
    assert ours["experts.down_proj"].dtype == dtype


# -------------------------------------------------------------------- inside PyTorch


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


# -------------------------------------------------------------------- the module


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        (SMALL, {"gate_up_proj": (3, 12, 8), "down_proj": (3, 8, 6)}),
        (
            replace(SMALL, bias=True),
            {
                "gate_up_proj": (3, 12, 8),
                "down_proj": (3, 8, 6),
                "gate_up_proj_bias": (3, 12),
                "down_proj_bias": (3, 8),
            },
        ),
        (
            replace(SMALL, activation="relu2", bias=True),
            {"up_proj": (3, 6, 8), "down_proj": (3, 8, 6), "up_proj_bias": (3, 6), "down_proj_bias": (3, 8)},
        ),
        (
            UNEQUAL,
            {"gate_up_proj": (28, 8), "down_proj": (14, 8), "gate_up_proj_bias": (28,), "down_proj_bias": (3, 8)},
        ),
        (replace(SMALL, ffn_hidden_size=[6, 6, 6]), {"gate_up_proj": (3, 12, 8), "down_proj": (3, 8, 6)}),
    ],
    ids=["gated", "bias", "not gated", "unequal", "equal, given as a list"],
)
def test_state_dict(config, shapes):
    layer, other = build(config), build(config)
    state = layer.state_dict()
    expected = {"router.weight": (3, 8), **{f"experts.{name}": shape for name, shape in shapes.items()}}
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == expected
    x = torch.randn(5, 8, device=DEVICE)
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(copy.deepcopy(state))
    assert torch.equal(other(x), layer(x))


def test_deepcopy():
    layer, x = build(SMALL), torch.randn(5, 8, device=DEVICE)
    y = layer(x)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), y)
    twin(x).sum().backward()
    assert all(parameter.grad is None for parameter in layer.parameters())
    with torch.no_grad():
        twin.experts.down_proj.zero_()
    assert torch.equal(layer(x), y)
    assert not twin(x).any()


@pytest.mark.case("J2")
@pytest.mark.parametrize("config", [replace(SMALL, hidden_size=64, bias=True), UNEQUAL], ids=["equal", "unequal"])
def test_meta_device(config):
    config = replace(config, init_std=0.05)
    layer = dMoE(config, device="meta", dtype=torch.float32)
    assert {parameter.device.type for parameter in layer.parameters()} == {"meta"}
    assert "backend torch (the default on meta)" in layer.backend_report()
    layer = layer.to_empty(device=DEVICE)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(torch.nan)
    layer.reset_parameters()
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        else:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.5), name
            assert parameter.mean().abs() < 0.02, name
    assert all(value.isfinite().all() for value in run(layer, torch.randn(5, config.hidden_size, device=DEVICE)).values())


def test_forward_on_the_meta_device():
    layer = dMoE(SMALL, device="meta")
    y, routing = layer(torch.empty(5, 8, device="meta"), return_routing=True)
    assert y.shape == (5, 8) and y.device.type == "meta"
    assert routing.weights.shape == (5, 2)


def test_two_layers_start_differently():
    """Experts of one layer, and layers, are drawn independently; the same seed gives the same layer."""
    torch.manual_seed(3)
    first, second = dMoE(SMALL, device=DEVICE), dMoE(SMALL, device=DEVICE)
    torch.manual_seed(3)
    again = dMoE(SMALL, device=DEVICE)
    assert torch.equal(first.experts.down_proj, again.experts.down_proj)
    assert not torch.equal(first.experts.down_proj, second.experts.down_proj)
    assert not torch.equal(first.experts.down_proj[0], first.experts.down_proj[1])


def test_extra_repr():
    text = repr(dMoE(SMALL, device="meta"))
    assert "(router): Router(8 -> top 2 of 3, normalize=True)" in text
    assert "(experts): Experts(3 experts, H=8, F=6 x 3, swiglu, bias=False, backend='auto')" in text
    assert "F=[5, 2, 7], geglu, bias=True, backend='torch'" in repr(dMoE(UNEQUAL, device="meta", backend="torch"))


def test_backend_report():
    first, other, te = build(SMALL, "torch").backend_report().splitlines()
    assert first.startswith("backend torch (asked for)")
    assert f"torch {torch.__version__}" in first
    assert other == "  triton: possible, not chosen"
    assert te.startswith("  te: needs ") or te == "  te: possible, not chosen"
    first, other, _ = build(SMALL, "torch", torch.float64).backend_report().splitlines()
    assert other == "  triton: computes in fp32, fp16 and bf16; got torch.float64"
    chosen = "triton (the default on CUDA)" if HAS_CUDA else "torch (the default on cpu)"
    assert build(SMALL, "auto").backend_report().startswith(f"backend {chosen}")


# -------------------------------------------------------------------- errors


@pytest.mark.parametrize("shape", [(3, 7), (7,), (2, 8, 1)], ids=str)
def test_the_last_dimension_must_be_the_hidden_size(shape):
    with pytest.raises(ValueError, match=r"dMoE: the input must be \[\.\.\., 8\]; got \[" + str(shape[0])):
        build(SMALL)(torch.randn(shape, device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_the_input_must_be_floating(dtype):
    with pytest.raises(TypeError, match=f"must have a floating dtype; got {dtype}"):
        build(SMALL)(torch.ones(3, 8, dtype=dtype, device=DEVICE))


def test_a_scalar_is_no_hidden_state():
    with pytest.raises(ValueError, match=r"dMoE: the input must be \[\.\.\., 8\]; got \[\]"):
        build(SMALL)(torch.tensor(1.0, device=DEVICE))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(router=RouterConfig(4)), "MoEConfig: top_k=4 experts per token, but there are only 3 experts"),
        (dict(activation="swish"), "activation: 'swish' is not known; choose one of swiglu, geglu"),
        (dict(ffn_hidden_size=(5, 2)), "ffn_hidden_size names 2 experts; num_experts is 3"),
        (dict(ffn_hidden_size=()), "ffn_hidden_size names 0 experts; num_experts is 3"),
        (dict(ffn_hidden_size=(5, 2, 0)), "MoEConfig: ffn_hidden_size must be at least 1; got 0"),
        (dict(ffn_hidden_size=0), "MoEConfig: ffn_hidden_size must be at least 1; got 0"),
        (dict(ffn_hidden_size=-3), "MoEConfig: ffn_hidden_size must be at least 1; got -3"),
        (dict(hidden_size=0), "MoEConfig: hidden_size must be at least 1; got 0"),
        (dict(num_experts=0), "MoEConfig: num_experts must be at least 1; got 0"),
    ],
    ids=str,
)
def test_a_config_says_what_is_wrong(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in ("hidden_size", "ffn_hidden_size", "num_experts") for value in ("64", 6.0, None, True)]
    + [("ffn_hidden_size", [2.9, 3.9, 4.9])],
    ids=str,
)
def test_sizes_of_a_config_are_integers(name, value):
    """A string is a sequence too, and a number with a fraction would be cut off."""
    with pytest.raises(TypeError, match=f"MoEConfig: {name} must be an integer; got"):
        replace(SMALL, **{name: value})


def test_the_router_of_a_config_is_a_config():
    with pytest.raises(TypeError, match=r"MoEConfig: router must be of type RouterConfig; got int\. Give RouterConfig"):
        replace(SMALL, router=2)


def test_experts_on_another_device_are_refused():
    layer = build(SMALL)
    layer.experts.to("meta")
    with pytest.raises(ValueError, match=r"expert_mlp: the topology is on .* and up_proj on meta"):
        layer(torch.randn(3, 8, device=DEVICE))


def test_an_unknown_backend_is_refused_at_construction():
    with pytest.raises(ValueError, match="backend: 'cuda' is not known; choose one of auto, triton, torch"):
        dMoE(SMALL, backend="cuda")


def test_a_backend_that_was_asked_for_never_falls_back():
    layer = build(SMALL, "triton", torch.float64)
    with pytest.raises(NotImplementedError, match="backend 'triton' computes in fp32, fp16 and bf16; got torch"):
        layer(torch.randn(3, 8, device=DEVICE, dtype=torch.float64))
    first, _, other, _ = layer.backend_report().splitlines()
    assert first.startswith("nothing runs here: backend 'triton' computes in fp32, fp16 and bf16; got torch.float64")
    assert other == "  torch: possible, not chosen"
    layer = dMoE(SMALL, device="meta", backend="triton")
    with pytest.raises(NotImplementedError, match="backend 'triton' needs a CUDA device; the tensors are on meta"):
        layer(torch.empty(3, 8, device="meta"))


# -------------------------------------------------------------------- on a GPU, at real sizes

REAL = MoEConfig(hidden_size=2048, ffn_hidden_size=768, num_experts=64, router=RouterConfig(top_k=8))
REAL_UNEQUAL = replace(REAL, ffn_hidden_size=tuple(704 + 2 * expert for expert in range(64)), activation="geglu", bias=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("config", [REAL, REAL_UNEQUAL], ids=["equal", "unequal"])
def test_real_sizes(config, dtype):
    layer = build(config, "triton", dtype)
    x, grad = randn(4096, 2048, dtype=dtype).to(dtype), randn(4096, 2048, dtype=dtype)
    _, routing = layer(x, return_routing=True)
    ours = run(layer, x, grad)
    assert_agrees(layer, x, routing.expert_ids, grad, ours, dtype)


@pytest.mark.gpu
@pytest.mark.case("I1", "I2")
def test_many_runs_are_bitwise_equal_at_real_sizes():
    layer, x = build(REAL, "triton", torch.bfloat16), torch.randn(1024, 2048, device=DEVICE, dtype=torch.bfloat16)
    first = run(layer, x)
    for _ in range(20):
        assert_equal(run(layer, x), first)


@pytest.mark.gpu
@pytest.mark.case("K2")
@pytest.mark.parametrize("config", [REAL, REAL_UNEQUAL], ids=["equal", "unequal"])
def test_no_host_synchronisation(config):
    layer = build(config, "triton", torch.bfloat16)
    x = torch.randn(1024, 2048, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)

    def step():
        y, routing = layer(x, return_routing=True)
        (y.float().square().mean() + routing.load_balancing_loss + routing.z_loss).backward()
        with torch.no_grad():
            layer(x)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each_backend_slowly
@pytest.mark.parametrize("config", [SMALL, UNEQUAL], ids=["equal", "unequal"])
def test_recomputation(config, backend):
    layer = build(config, backend)
    again = build(replace(config, recompute=True), backend)
    again.load_state_dict(layer.state_dict())
    x = torch.randn(7, 8, device=DEVICE)
    assert_equal(run(again, x), run(layer, x))
    compiled = torch.compile(again, fullgraph=True, backend="aot_eager")
    expected = {name if name in "xy" else f"_orig_mod.{name}": value for name, value in run(layer, x).items()}
    assert_close(run(compiled, x), expected)


@pytest.mark.gpu
@pytest.mark.case("K1")
def test_cuda_graph():
    """Captured once at a fixed number of tokens, replayed with other routings."""
    layer = build(REAL, "triton", torch.bfloat16)
    x = torch.randn(256, 2048, device=DEVICE, dtype=torch.bfloat16)
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(layer), (x.clone().requires_grad_(),))
    for _ in range(3):
        with torch.no_grad():
            nn.init.normal_(layer.router.weight)
            graphed.load_state_dict(layer.state_dict())
        inputs = torch.randn_like(x)
        assert_equal(run(graphed, inputs), run(layer, inputs))


@pytest.mark.gpu
@pytest.mark.case("J1")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_last_gpu_while_another_is_current():
    layer = build(replace(REAL, num_experts=16), "triton", torch.bfloat16)
    x = torch.randn(256, 2048, device="cuda:0", dtype=torch.bfloat16)
    expected = run(layer, x)
    last = f"cuda:{torch.cuda.device_count() - 1}"
    assert torch.cuda.current_device() == 0
    moved = run(copy.deepcopy(layer).to(last), x.to(last))
    assert_equal({name: value.to("cuda:0") for name, value in moved.items()}, expected)


@pytest.mark.gpu
def test_dropped_graphs_keep_no_memory():
    layer, x = build(REAL, "triton", torch.bfloat16), torch.randn(1024, 2048, device=DEVICE, dtype=torch.bfloat16)
    layer(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        layer(x, return_routing=True)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
