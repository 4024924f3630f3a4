"""dMoE agrees with the fp64 oracle: on any routing and shape, in every dtype, at real sizes on a GPU."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from blocksparse_moe import MoEConfig, RouterConfig, dMoE
from blocksparse_moe_kernels import ACTIVATIONS

from .moe_support import SMALL, UNEQUAL, assert_agrees, assert_close, assert_equal, build, narrow_dtype, run
from .support import DEVICE, HAS_CUDA, each_backend_slowly, randn

pytestmark = pytest.mark.usefixtures("poisoned_memory")


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
