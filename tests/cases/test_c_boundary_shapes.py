"""Group C: sizes that are no multiple of a tile, tiles of every size, one expert, few tokens, many choices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from blocksparse_moe import Experts, MoEConfig, Router, RouterConfig
from blocksparse_moe.products import implementation
from blocksparse_moe_kernels import BlockSparse, Columns, GemmConfig, Topology, get_activation, reference
from tests.cases.configs import COLUMN_CONFIGS, ROW_CONFIGS, each_column_config, each_row_config
from tests.cases.helpers import DTYPE, Problem, assert_close, distinct_ids, guarded, layer, relative_error
from tests.support import DEVICE, HAS_CUDA, each_backend_slowly


@pytest.mark.case("C1")
@each_backend_slowly
def test_one_expert_of_one_block(backend):
    """megablocks PR 108: ffn of one block and E = 1 make a cumulative sum lose its dimension."""
    shape = (16, 1024, 128) if HAS_CUDA or backend == "torch" else (2, 20, 128)
    moe = layer(128, 128, 1, 1, normalize=False, backend=backend)
    x = torch.randn(shape, device=DEVICE, dtype=DTYPE, requires_grad=True)
    y = moe(x)

    def plain(dtype: torch.dtype) -> torch.Tensor:
        gate, up = F.linear(x.detach().to(dtype), moe.experts.gate_up_proj[0].to(dtype)).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, moe.experts.down_proj[0].to(dtype))

    assert_close("y", y, plain(torch.float64), plain(DTYPE), DTYPE)
    y.sum().backward()
    assert x.grad.isfinite().all() and x.grad.any()


@pytest.mark.case("C2")
@pytest.mark.parametrize(
    ("backend", "ffn"),
    [
        *[("torch", ffn) for ffn in (192, 320, 1472)],
        *[("triton", ffn) for ffn in (192, 320)],
        pytest.param("triton", 1472, marks=() if HAS_CUDA else pytest.mark.slow),
    ],
)
def test_ffn_that_is_no_multiple_of_128(backend, ffn):
    """megablocks issue 114: an ffn size divisible by 64 but not by 128 is refused."""
    hidden, num_tokens, num_experts = (2048, 1000, 4) if HAS_CUDA else (16, 5, 1)
    Problem.draw(hidden, ffn, num_experts, distinct_ids(num_tokens, num_experts, 1)).check(backend)


@pytest.mark.case("C4")
@each_backend_slowly
@pytest.mark.parametrize("hidden", [100, 320, 136, 7])
def test_hidden_that_is_no_multiple_of_the_tile(backend, hidden):
    """DeepEP PR 413, vLLM PR 49087: a grid by floor division drops the last columns; hidden below a tile gives zeros."""
    num_tokens, ffn = (1000, 512) if HAS_CUDA else (6, 24)
    ours = Problem.draw(hidden, ffn, 2, distinct_ids(num_tokens, 2, 2)).check(backend)
    for result in (ours.y, ours.x):  # a single bf16 sum may come out as zero, a column may not
        assert (result[:, -1] != 0).double().mean() > 0.9
    assert ours.up_proj[..., -1].abs().min() > 0
    assert ours.down_proj[:, -1].abs().min() > 0


@pytest.mark.case("C5")
@each_backend_slowly
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_nothing_is_read_past_an_operand(backend, activation, fresh_memory):
    """scattermoe c48ffb0: a tail mask tied to the wrong loop counter reads weights past their end. All margins hold NaN."""
    ffn = 200 if HAS_CUDA or backend == "torch" else 40
    problem = Problem.draw(136, ffn, 2, distinct_ids(5, 2, 1), activation=activation)
    inside = replace(
        problem,
        x=guarded(problem.x),
        weights=guarded(problem.weights),
        up_proj=guarded(problem.up_proj),
        down_proj=guarded(problem.down_proj),
        grad=guarded(problem.grad),
    )
    ours = inside.ours(backend)
    fresh_memory.check_guards()
    for name, found, expected in zip(ours._fields, ours, problem.ours(backend), strict=True):
        torch.testing.assert_close(found, expected, msg=name)


@pytest.mark.case("C6")
@each_backend_slowly
def test_few_tokens_match_a_batch(backend):
    """aiter PR 4041, sglang-jax 1193: decode of one or a few tokens is wrong or refused, which batching hides."""
    E, K, H, ffn = (128, 8, 2048, 768) if HAS_CUDA else (16, 4, 32, 24)
    counts, num_tokens = range(1, 18), 64
    if backend == "triton" and not HAS_CUDA:
        E, K, counts, num_tokens = 3, 2, (1, 17), 20
    problem = Problem.draw(H, ffn, E, distinct_ids(num_tokens, E, K))
    batch = problem.ours(backend)
    for count in counts:
        few = replace(
            problem,
            x=problem.x[:count],
            expert_ids=problem.expert_ids[:count],
            weights=problem.weights[:count],
            grad=problem.grad[:count],
        ).ours(backend)
        for name in ("y", "x", "weights"):
            found, expected = getattr(few, name), getattr(batch, name)[:count]
            assert relative_error(found, expected) <= 8 * torch.finfo(DTYPE).eps, f"{name} of {count} tokens"


@pytest.mark.case("C7")
@pytest.mark.parametrize("num_tokens", [17, 33, 129, 1000])
def test_router_serves_every_row(num_tokens):
    """mirage PR 764: only the rows of the first thread block are routed; later ones get weights of zero."""
    router = Router(64, 128, RouterConfig(top_k=8), init_std=0.125, device=DEVICE)
    x = torch.randn(num_tokens, 64, device=DEVICE)
    routing = router(x)
    ids = routing.expert_ids.sort(dim=1).values
    assert ids.shape == (num_tokens, 8)
    assert (ids.diff(dim=1) > 0).all() and ids.min() >= 0 and ids.max() < 128
    torch.testing.assert_close(routing.weights.sum(dim=1), torch.ones(num_tokens, device=DEVICE))
    assert (routing.weights > 0).all()
    _, weights, _ = reference.router(x.double(), router.weight.double(), 8, normalize=True)
    torch.testing.assert_close(routing.weights.double(), weights, rtol=1e-4, atol=1e-6)


@pytest.mark.case("C8")
def test_router_refuses_more_choices_than_experts():
    """aiter PR 5009: K above E leaves result slots unwritten; a router says so when it is built."""
    with pytest.raises(ValueError, match=r"16.*8"):
        Router(32, 8, RouterConfig(top_k=16))
    with pytest.raises(ValueError, match=r"16.*8"):
        MoEConfig(32, 16, 8, router=RouterConfig(top_k=16))


@pytest.mark.case("C8")
@pytest.mark.usefixtures("poisoned_memory")
@each_backend_slowly
def test_given_ids_may_outnumber_experts(backend):
    """aiter PR 5009: sixteen given choices of eight experts, so experts repeat and their contributions add up."""
    Problem.draw(16, 12, 8, torch.randint(8, (2, 16))).check(backend)


@pytest.mark.case("C8")
@each_backend_slowly
def test_every_expert_chosen_is_the_dense_mixture(backend):
    """aiter PR 5009: with K = E the layer is the softmax mixture of all experts."""
    moe = layer(32, 24, 8, 8, backend=backend)
    x = torch.randn(6, 32, device=DEVICE, dtype=DTYPE)
    y, routing = moe(x, return_routing=True)

    def mixture(dtype: torch.dtype) -> torch.Tensor:
        probabilities = routing.logits.softmax(dim=-1).to(dtype)
        up, down = moe.experts.gate_up_proj.to(dtype), moe.experts.down_proj.to(dtype)
        gate, value = torch.einsum("th,enh->ten", x.to(dtype), up).chunk(2, dim=-1)
        return torch.einsum("te,tef,ehf->th", probabilities, F.silu(gate) * value, down)

    assert_close("y", y, mixture(torch.float64), mixture(DTYPE), DTYPE)


# -------------------------------------------------------------------- tiles


M, H, N, E = (3000, 1000, 700, 5) if HAS_CUDA else (40, 70, 50, 3)


def drawn(dtype: torch.dtype) -> tuple[Topology, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(topology of M rows, x [M, H], s [M, N], w [E, N, H]), activations of size one."""
    rows = Topology.from_ids(torch.randint(-1, E, (M, 1), device=DEVICE), E)
    x, s = (torch.randn(M, size, device=DEVICE, dtype=dtype) for size in (H, N))
    return rows, x, s, torch.randn(E, N, H, device=DEVICE, dtype=dtype) * H**-0.5


def used(tensor: torch.Tensor, rows: Topology) -> torch.Tensor:
    return tensor[: int(rows.num_rows)]


@pytest.mark.case("C3", "G6")
@each_row_config
def test_every_tile_of_sdd(config, dtype):
    """stk issue 16, pytorch_block_sparse 20: block sizes other than the tuned one run and give wrong numbers."""
    kernels, (rows, x, _, w) = implementation("triton"), drawn(dtype)
    found = kernels.sdd(x, w, rows, config=config).values
    expected = reference.sdd(x.double(), w.double(), rows).values
    assert_close("s", used(found, rows), used(expected, rows), used(reference.sdd(x, w, rows).values, rows), dtype)
    swiglu = get_activation("swiglu")
    pre, hidden = kernels.sdd_activation(x, w, rows, swiglu, config=config)
    in_dtype = used(reference.sdd(x, w, rows).values, rows)
    assert_close("pre", used(pre.values, rows), used(expected, rows), in_dtype, dtype)
    assert_close("hidden", used(hidden.values, rows), swiglu(used(expected, rows)), swiglu(in_dtype), dtype)


@pytest.mark.case("C3", "G6")
@each_row_config
def test_every_tile_of_dsd(config, dtype):
    """stk issue 16, pytorch_block_sparse 20: the same for sparse x dense."""
    rows, _, values, w = drawn(dtype)
    s = BlockSparse(values, rows, Columns.equal(N, E))
    found = implementation("triton").dsd(s, w, config=config)
    expected = reference.dsd(BlockSparse(values.double(), rows, s.columns), w.double())
    assert_close("y", used(found, rows), used(expected, rows), used(reference.dsd(s, w), rows), dtype)


@pytest.mark.case("C3", "G6")
@each_column_config
@pytest.mark.parametrize("order", ["tokens", "rows"])
def test_every_tile_of_the_transposed_dsd(config, dtype, order):
    """stk issue 16, pytorch_block_sparse 20: the same for the weight gradient."""
    rows, x, values, _ = drawn(dtype)
    s = BlockSparse(values, rows, Columns.equal(N, E))
    found = implementation("triton").dsd(s.T, x, order=order, config=config)
    expected = reference.dsd(BlockSparse(values.double(), rows, s.columns).T, x.double(), order=order)
    assert_close("grad", found, expected, reference.dsd(s.T, x, order=order), dtype)


@pytest.mark.case("C3")
def test_every_tile_is_tried():
    """stk issue 16: a tile that a configuration can choose and no test tries is a gap."""
    assert {config.block_m for config, _ in ROW_CONFIGS} == {16, 32, 64, 128}
    assert {config.block_k for config, _ in COLUMN_CONFIGS} == {16, 32, 64}


@pytest.mark.case("C3")
@pytest.mark.parametrize("block", [48, 8, 0])
@pytest.mark.parametrize("name", ["block_m", "block_n", "block_k"])
def test_other_tiles_are_refused(name, block):
    """stk issue 16, pytorch_block_sparse 20: a tile that the tensor cores cannot multiply is refused by name."""
    with pytest.raises(ValueError, match=name):
        replace(GemmConfig(16, 64, 32, 4, 2), **{name: block})


@pytest.mark.case("C2", "C4")
@each_backend_slowly
def test_layer_of_odd_sizes(backend):
    """megablocks issue 114, vLLM PR 49087: the module accepts what the products accept, trained and under no_grad."""
    config = MoEConfig(37, 53, 3, bias=True, router=RouterConfig(top_k=2), init_std=0.2)
    experts = Experts(config, device=DEVICE, backend=backend)
    x, ids = torch.randn(7, 37, device=DEVICE), distinct_ids(7, 3, 2).to(DEVICE)
    rows, weights = Topology.from_ids(ids, 3), torch.rand(7, 2, device=DEVICE)
    parameters = dict(experts.named_parameters())
    expected = reference.expert_mlp(
        x, rows, parameters["gate_up_proj"], parameters["down_proj"], weights,
        up_proj_bias=parameters["gate_up_proj_bias"], down_proj_bias=parameters["down_proj_bias"],
    )  # fmt: skip
    torch.testing.assert_close(experts(x, rows, weights), expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(experts(x, rows, weights), expected, rtol=1e-4, atol=1e-4)
