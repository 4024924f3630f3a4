"""Products of MXFP8 operands, within the error of an fp32 sum of what they stand for; and the layer made of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from blocksparse_moe import expert_mlp
from blocksparse_moe.mxfp8 import mxfp8_expert_mlp, quantize_experts
from blocksparse_moe.products import mxfp8_launchers
from blocksparse_moe_kernels import BlockSparse, Columns, Topology, get_activation, reference
from blocksparse_moe_kernels.config import GemmConfig, architecture_of, ceil_div
from blocksparse_moe_kernels.mxfp8 import MXFP8, quantize, quantize_columns
from blocksparse_moe_kernels.triton.mxfp8_rows import as_words, row_product_tile

from .support import (
    DEVICE,
    HAS_CUDA,
    assert_within_budget,
    each_backend,
    each_backend_and_dtype_slowly,
    each_backend_slowly,
    layouts,
    leaf,
    randn,
    routings,
    sizes,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SMALL_TILE = GemmConfig(16, 32, 32, 4, 2)
ACTIVATIONS = ["swiglu", "geglu", "gelu", "relu2", "swiglu(alpha=1.702, gate_limit=7, up_limit=7, up_offset=1, interleaved)"]


def operand(x: Tensor, dtype: torch.dtype, quantized: bool) -> tuple[MXFP8 | Tensor, Tensor]:
    """x in `dtype`, and in MXFP8 if asked for; and what it then stands for, in fp64."""
    x = x.to(dtype)
    if not quantized:
        return x, x.double()
    q = quantize(x)
    return q, q.dequantize(torch.float64)


def options(data, backend: str) -> dict:
    config = data.draw(st.sampled_from([None, SMALL_TILE, SMALL_TILE_OF_WORDS])) if backend == "triton" else None
    return {} if config is None else {"config": config}


@each_backend_and_dtype_slowly
@given(data=st.data())
def test_sdd(backend, dtype, data):
    routing, kernels = data.draw(routings()), mxfp8_launchers(backend)
    topology, order = routing.topology, data.draw(st.sampled_from(["tokens", "rows"]))
    rows, hidden, width = topology.num_tokens if order == "tokens" else topology.num_slots, data.draw(sizes), data.draw(sizes)
    kept = int(topology.num_rows)
    x, weight = randn(rows, hidden), quantize(randn(routing.num_experts, width, hidden).to(dtype))
    if order == "rows":
        x[kept:] = torch.nan
    bias = randn(routing.num_experts, width, dtype=dtype).to(dtype) if data.draw(st.booleans()) else None
    x, numbers = operand(x, dtype, data.draw(st.booleans()))
    ours = kernels.sdd(x, weight, topology, order=order, bias=bias, **options(data, backend)).values

    def expected(precision):
        added = None if bias is None else bias.to(precision)
        s = reference.sdd(numbers.to(precision), weight.dequantize(precision), topology, order=order, bias=added)
        return s.values[:kept]

    assert ours.dtype == dtype
    wide = torch.promote_types(dtype, torch.float32)
    assert_within_budget("s", ours[:kept], expected(torch.float64), expected(wide).to(dtype), dtype, hidden**0.5)


@each_backend_and_dtype_slowly
@given(data=st.data())
def test_sdd_with_an_activation(backend, dtype, data):
    routing, kernels = data.draw(routings()), mxfp8_launchers(backend)
    topology, activation = routing.topology, get_activation(data.draw(st.sampled_from(ACTIVATIONS)))
    hidden, width, kept = data.draw(sizes), data.draw(sizes), int(topology.num_rows)
    shape = (routing.num_experts, activation.halves * width)
    weight = quantize(randn(*shape, hidden, scale=hidden**-0.5).to(dtype))
    bias = randn(*shape, dtype=dtype).to(dtype) if data.draw(st.booleans()) else None
    x, numbers = operand(randn(topology.num_tokens, hidden), dtype, data.draw(st.booleans()))
    save_pre = data.draw(st.booleans())
    pre, act = kernels.sdd_activation(x, weight, topology, activation, bias=bias, save_pre=save_pre, **options(data, backend))

    def expected(precision):
        added = None if bias is None else bias.to(precision)
        s = reference.sdd(numbers.to(precision), weight.dequantize(precision), topology, bias=added).values[:kept]
        return s, activation(s)

    wide = torch.promote_types(dtype, torch.float32)
    for name, found, oracle, torchs in zip(("pre", "act"), (pre, act), expected(torch.float64), expected(wide), strict=True):
        if found is not None:
            assert_within_budget(name, found.values[:kept], oracle, torchs.to(dtype), dtype)
    assert (pre is not None) == save_pre


@each_backend_and_dtype_slowly
@given(data=st.data())
def test_dsd(backend, dtype, data):
    routing, kernels = data.draw(routings()), mxfp8_launchers(backend)
    topology, width, hidden = routing.topology, data.draw(sizes), data.draw(sizes)
    kept, E = int(topology.num_rows), routing.num_experts
    values = randn(topology.num_slots, width)
    values[kept:] = torch.nan
    # Blocks lie along the sparse side, whichever of the two memory has together.
    weight = data.draw(st.sampled_from([quantize(randn(E, hidden, width)).mT, quantize(randn(E, width, hidden), -2)]))
    bias = randn(E, hidden, dtype=dtype).to(dtype) if data.draw(st.booleans()) else None
    s, numbers = operand(values, dtype, data.draw(st.booleans()))
    ours = kernels.dsd(s, weight, topology, bias=bias, **options(data, backend))

    def expected(precision):
        added = None if bias is None else bias.to(precision)
        sparse = BlockSparse(numbers.to(precision), topology, Columns.equal(width, E))
        return reference.dsd(sparse, weight.dequantize(precision), bias=added)[:kept]

    wide = torch.promote_types(dtype, torch.float32)
    assert_within_budget("y", ours[:kept], expected(torch.float64), expected(wide).to(dtype), dtype, width**0.5)


SMALL_TILE_OF_WORDS = GemmConfig(16, 32, 64, 4, 2)


def weight_only_tiles() -> list[GemmConfig]:
    """Those that this GPU selects, and small ones."""
    small = [SMALL_TILE_OF_WORDS, GemmConfig(32, 64, 64, 4, 2), SMALL_TILE]
    if not HAS_CUDA:
        return small
    heights, architecture = (16, 32, 64, 128), architecture_of(DEVICE)
    tiles = [row_product_tile(height, False, architecture, narrow) for height in heights for narrow in (False, True)]
    return list(dict.fromkeys(tiles + small))


@pytest.mark.parametrize("offset", [0, 4, 1], ids=lambda offset: f"{offset} bytes off")
@pytest.mark.parametrize("config", weight_only_tiles(), ids=repr)
def test_every_code_and_scale_in_a_product(config, offset):
    """One number to a row, so that a sum is exact. Four codes are loaded together where memory allows: at offsets 0 and 4."""
    each, H = torch.arange(256, device=DEVICE), 108
    memory = torch.zeros(256 * H + 4, dtype=torch.uint8, device=DEVICE)
    codes = memory[offset:][: 256 * H].view(1, 256, H)
    codes[0, each, each % H] = each.to(torch.uint8)
    assert (as_words(codes) is None) == (offset == 1)
    topology = Topology.from_ids(torch.zeros(3, 1, dtype=torch.long, device=DEVICE), 1)
    x = torch.randint(1, 9, (3, H), device=DEVICE).bfloat16()
    for scale in (20, 126, 127, 134, 135, 200, 243, 255):
        scales = torch.full((1, 256, ceil_div(H, 32)), scale, dtype=torch.uint8, device=DEVICE)
        weight = MXFP8(codes.view(torch.float8_e4m3fn), scales, -1, torch.bfloat16)
        ours = mxfp8_launchers("triton").sdd(x, weight, topology, config=config).values
        exact = x[:, each % H].double() * weight.dequantize(torch.float64)[0, each, each % H]
        assert torch.equal(ours.nan_to_num(7), exact.to(torch.bfloat16).nan_to_num(7)), scale
        assert torch.equal(ours.isnan(), exact.isnan()), scale


@each_backend_and_dtype_slowly
@given(data=st.data())
def test_transposed_dsd(backend, dtype, data):
    routing, kernels = data.draw(routings(max_tokens=40)), mxfp8_launchers(backend)
    topology, width, hidden = routing.topology, data.draw(sizes), data.draw(sizes)
    values = randn(topology.num_slots, width).to(dtype)
    values[int(topology.num_rows) :] = torch.nan
    x = randn(topology.num_tokens, hidden).to(dtype)
    left, right = quantize_columns(values, topology), quantize_columns(x, topology, order="tokens")
    columns = Columns.equal(width, routing.num_experts)
    like = data.draw(st.sampled_from([None, torch.empty(columns.num_experts, hidden, width, dtype=dtype, device=DEVICE).mT]))
    ours = kernels.dsd_transposed(left, right, like=like)
    if like is not None:
        assert ours.stride() == like.stride()

    def expected(precision):
        return reference.dsd(BlockSparse(left.dequantize(precision), topology, columns).T, right.dequantize(precision))

    wide, longest = torch.promote_types(dtype, torch.float32), max(1, int(topology.counts.max()))
    assert_within_budget("w", ours, expected(torch.float64), expected(wide).to(dtype), dtype, longest**0.5)
    assert not ours[topology.counts == 0].any(), "an expert without rows has exactly zero"


# ---------------------------------------------------------------- the layer


def plain_layer(x, ids, up, down, weights, up_bias, down_bias, grad, activation) -> dict[str, Tensor]:
    """y and every gradient, expert by expert in fp64; each operand of a product is rounded by the oracle. What is rounded must
    be exact in fp32, or an implementation may rightly round it to the other side."""

    def rounded(tensor: Tensor) -> Tensor:
        assume(torch.equal(tensor, tensor.float().double()))
        return reference.mxfp8(tensor)

    results = {
        name: torch.zeros_like(tensor)
        for name, tensor in {
            "y": x, "x": x, "up_proj": up, "down_proj": down, "routing_weights": weights, "up_proj_bias": up_bias,
            "down_proj_bias": down_bias,
        }.items()
    }  # fmt: skip
    for expert in range(len(up)):
        slots = (ids.reshape(-1) == expert).nonzero()[:, 0]
        if len(slots) == 0:
            continue
        tokens, p = slots // ids.shape[1], weights.reshape(-1)[slots, None]
        rows, dy = x[tokens], grad[tokens]
        pre = (rounded(rows) @ rounded(up[expert]).T + up_bias[expert]).requires_grad_()
        hidden = activation(pre)
        y = rounded(hidden.detach()) @ rounded(down[expert]).T + down_bias[expert]
        results["y"].index_add_(0, tokens, p * y)

        dhidden = rounded(dy) @ rounded(down[expert].T).T
        (dpre,) = torch.autograd.grad(hidden, pre, p * dhidden)
        scaled = p * hidden.detach()
        results["routing_weights"].view(-1)[slots] = (dhidden * hidden.detach()).sum(1) + dy @ down_bias[expert]
        results["down_proj"][expert] = rounded(dy.T) @ rounded(scaled.T).T
        results["down_proj_bias"][expert] = (p * dy).sum(0)
        results["x"].index_add_(0, tokens, rounded(dpre) @ rounded(up[expert].T).T)
        results["up_proj"][expert] = rounded(dpre.T) @ rounded(rows.T).T
        results["up_proj_bias"][expert] = dpre.sum(0)
    return results


def integers(*shape: int, share: float = 1.0) -> Tensor:
    """fp64 integers of six bits, of which codes keep four; the `share` of them that isn't zero."""
    return torch.randint(-40, 41, shape).double().mul(torch.rand(shape) < share).to(DEVICE)


@each_backend_slowly
@settings(max_examples=max(4, settings.default.max_examples // 4))
@given(data=st.data())
def test_expert_mlp_and_its_gradients(backend, data):
    """Of integers and activations that keep them, so that everything which is rounded to MXFP8 is known exactly before."""
    routing = data.draw(routings(max_tokens=24, max_experts=3, max_top_k=2))
    topology, H, F, E = routing.topology, data.draw(sizes), data.draw(sizes), routing.num_experts
    name = data.draw(st.sampled_from(["relu", "reglu", "reglu(interleaved)"]))
    activation = get_activation(name)
    tensors = {
        "x": integers(topology.num_tokens, H),
        "up_proj": integers(E, activation.halves * F, H, share=0.2),
        "down_proj": integers(E, H, F, share=0.2),
        "routing_weights": 2.0 ** torch.randint(-2, 3, routing.expert_ids.shape).double().to(DEVICE),
        "up_proj_bias": integers(E, activation.halves * F),
        "down_proj_bias": integers(E, H),
    }
    grad = integers(topology.num_tokens, H)
    oracle = plain_layer(
        tensors["x"], routing.expert_ids, tensors["up_proj"], tensors["down_proj"], tensors["routing_weights"],
        tensors["up_proj_bias"], tensors["down_proj_bias"], grad, activation,
    )  # fmt: skip
    recompute = data.draw(st.booleans())
    leaves = {key: leaf(tensor, torch.float32, data.draw(layouts)) for key, tensor in tensors.items()}
    options = {"activation": name, "precision": "mxfp8", "backend": backend}
    y = expert_mlp(topology=topology, recompute=recompute, **leaves, **options)
    grads = torch.autograd.grad(y, list(leaves.values()), grad.float())
    with torch.no_grad():
        assert torch.equal(expert_mlp(topology=topology, **leaves, **options), y)
    for key, found in zip(("y", *leaves), (y, *grads), strict=True):
        expected = oracle[key]
        terms = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        assert_within_budget(key, found, expected, expected.float(), torch.float32, terms)
    dropped = (routing.expert_ids < 0) | (routing.expert_ids >= E)
    assert not grads[3][dropped].any(), "a dropped slot has exactly zero gradient"
    for key, gradient in zip(leaves, grads, strict=True):
        if gradient.shape[:1] == (E,) and key not in ("x", "routing_weights"):
            assert not gradient[topology.counts == 0].any(), f"an expert without rows has exactly zero gradient of {key}"


@each_backend_slowly
@pytest.mark.parametrize("quantize_activations", [False, True])
@settings(max_examples=max(4, settings.default.max_examples // 4))
@given(data=st.data())
def test_weights_kept_in_mxfp8(backend, quantize_activations, data):
    routing = data.draw(routings())
    topology, H, F, E = routing.topology, data.draw(sizes), data.draw(sizes), routing.num_experts
    name = data.draw(st.sampled_from(["swiglu", "gelu", "swiglu(interleaved)"]))
    halves = get_activation(name).halves
    x, p = randn(topology.num_tokens, H).float(), randn(*routing.expert_ids.shape).float()
    up, down = randn(E, halves * F, H, scale=H**-0.5).float(), randn(E, H, F, scale=F**-0.5).float()
    biases = {"up_proj_bias": randn(E, halves * F).float(), "down_proj_bias": randn(E, H).float()}
    biases = biases if data.draw(st.booleans()) else {}
    experts = quantize_experts(up, down, backend=backend)
    options = {"activation": name, "quantize_activations": quantize_activations, "backend": backend}
    ours = mxfp8_expert_mlp(x, topology, experts, p, **biases, **options)
    if quantize_activations:
        trained = expert_mlp(x, topology, up, down, p, activation=name, precision="mxfp8", backend=backend, **biases)
        assert torch.equal(ours, trained)
        return

    def expected(precision):
        numbers = (experts.up_proj.dequantize(precision), experts.down_proj.dequantize(precision))
        added = {key: bias.to(precision) for key, bias in biases.items()}
        return reference.expert_mlp(x.to(precision), topology, *numbers, p.to(precision), activation=name, **added)

    assert_within_budget("y", ours, expected(torch.float64), expected(torch.float32), torch.float32)


@each_backend
@pytest.mark.parametrize(("H", "F"), [(64, 96), (100, 36), (33, 7)])
def test_weights_kept_in_mxfp8_and_bf16(backend, H, F):
    """Sizes of which four codes are loaded together, and others."""
    topology = Topology.from_ids(torch.tensor([[0, 2], [2, -1], [0, 0], [3, 2], [2, 0]], device=DEVICE), 4)
    x, p = randn(5, H).bfloat16(), randn(5, 2).float()
    up, down = randn(4, 2 * F, H, scale=H**-0.5).bfloat16(), randn(4, H, F, scale=F**-0.5).bfloat16()
    experts = quantize_experts(up, down, backend=backend)

    def expected(precision):
        numbers = (experts.up_proj.dequantize(precision), experts.down_proj.dequantize(precision))
        return reference.expert_mlp(x.to(precision), topology, *numbers, p.to(precision))

    ours = mxfp8_expert_mlp(x, topology, experts, p, backend=backend)
    assert_within_budget("y", ours, expected(torch.float64), expected(torch.float32).bfloat16(), torch.bfloat16)


@each_backend_slowly
def test_halves_that_lie_apart(backend):
    topology = Topology.from_ids(torch.tensor([[0, 2], [2, -1], [0, 0]], device=DEVICE), 3)
    x, together, down = randn(3, 40).float(), randn(3, 2, 9, 40).float(), randn(3, 40, 9).float()
    apart = torch.stack(together.unbind(1), dim=0).transpose(0, 1)
    assert not apart.is_contiguous() and torch.equal(apart, together)
    results = []
    for up in (together, apart):
        up = up.detach().requires_grad_()
        y = expert_mlp(x, topology, up, down, precision="mxfp8", backend=backend)
        (grad,) = torch.autograd.grad(y.square().sum(), up)
        assert torch.equal(
            mxfp8_expert_mlp(x, topology, quantize_experts(up, down), backend=backend, quantize_activations=True), y
        )
        results.append((y, grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def example(dtype=torch.float32) -> tuple[Tensor, Topology, Tensor, Tensor, Tensor]:
    topology = Topology.from_ids(torch.tensor([[0, 2], [2, -1], [0, 0], [3, 2], [2, 0]], device=DEVICE), 4)
    x, up, down, p = randn(5, 40).to(dtype), randn(4, 20, 40).to(dtype), randn(4, 40, 10).to(dtype), randn(5, 2).to(dtype)
    return x, topology, up, down, p


@each_backend_slowly
def test_two_runs_are_bitwise_equal(backend):
    x, topology, up, down, p = example()
    leaves = [tensor.requires_grad_() for tensor in (x, up, down, p)]

    def run():
        y = expert_mlp(x, topology, up, down, p, precision="mxfp8", backend=backend)
        return y, *torch.autograd.grad(y.square().sum(), leaves)

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.slow
def test_ops_and_compiled_layers():
    """opcheck of the ops and torch.compile of the layer, in training and in inference."""
    x, _, up, down, p = example()
    topology = Topology.from_ids(torch.tensor([[0, 2], [2, 1], [0, 0], [0, 2], [2, 0]], device=DEVICE), 4)
    experts = quantize_experts(up, down)
    leaves = [tensor.requires_grad_() for tensor in (x, up, down, p)]

    def train(x, up, down, p):
        return expert_mlp(x, topology, up, down, p, precision="mxfp8")

    def infer(x, p):
        return mxfp8_expert_mlp(x, topology, experts, p)

    eager = train(*leaves)
    compiled = torch.compile(train, fullgraph=True)(*leaves)
    for found, expected in zip(
        torch.autograd.grad(compiled.sum(), leaves), torch.autograd.grad(eager.sum(), leaves), strict=True
    ):
        assert torch.equal(found, expected)
    with torch.no_grad():
        assert torch.equal(torch.compile(infer, fullgraph=True)(x, p), infer(x, p))

    from blocksparse_moe.custom_ops.define import flatten

    weights = (up.view(4, 2, 10, 40), None)
    arguments = (*flatten(topology, "torch+mxfp8"), None, "swiglu", "torch+mxfp8")
    torch.library.opcheck(torch.ops.blocksparse_moe.expert_up.default, (x, *weights, *arguments))
    codes = [tensor for q in (experts.up_proj, experts.down_proj) for tensor in (q.codes.view(torch.uint8), q.scales, None)]
    arguments = (*flatten(topology, "torch"), True, "swiglu", "torch")
    torch.library.opcheck(torch.ops.blocksparse_moe.mxfp8_expert_mlp.default, (x.detach(), *codes, p.detach(), *arguments))


@each_backend
def test_products_of_what_is_not_in_mxfp8(backend):
    x, topology, up, down, _ = example()
    kernels, rows = mxfp8_launchers(backend), quantize_columns(randn(10, 8).float(), topology)
    with pytest.raises(TypeError, match=r"sdd: the weight must be of type MXFP8; got Tensor\. Make one with quantize\(w\)"):
        kernels.sdd(quantize(x), up, topology)
    with pytest.raises(TypeError, match=r"dsd: the weight must be of type MXFP8; got Tensor"):
        kernels.dsd(randn(10, 10).float(), down.mT, topology)
    with pytest.raises(TypeError, match=r"sdd: x must be of type Tensor; got str\. .* or an MXFP8 with quantize"):
        kernels.sdd("x", quantize(up), topology)
    with pytest.raises(TypeError, match=r"dsd: x must be of type MXFP8; got Tensor\. Make one with quantize_columns"):
        kernels.dsd_transposed(rows, randn(10, 8).float())
    with pytest.raises(ValueError, match="sums over rows, so both operands must come from quantize_columns"):
        kernels.dsd_transposed(rows.mT, rows)


def test_second_order_gradients_are_refused_with_a_cure():
    x, topology, up, down, p = example()
    leaves = [tensor.requires_grad_() for tensor in (x, up, down)]
    for recompute in (False, True):
        y = expert_mlp(x, topology, up, down, p, precision="mxfp8", recompute=recompute)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(
            NotImplementedError, match=r"second-order gradients.*, which have gradients of any order and no precision"
        ):
            torch.autograd.grad(grad.sum(), leaves)


def test_errors_say_what_to_do():
    x, topology, up, down, _ = example()
    with pytest.raises(ValueError, match="precision must be \"mxfp8\" or None; got 'fp8'"):
        expert_mlp(x, topology, up, down, precision="fp8")
    columns = Columns.of([1, 2, 3, 4])
    with pytest.raises(NotImplementedError, match="in MXFP8 experts must have one size"):
        flat = torch.zeros(20, 40, device=DEVICE), torch.zeros(10, 40, device=DEVICE)
        expert_mlp(x, topology, *flat, columns=columns, precision="mxfp8")
    experts = quantize_experts(up, down)
    for biases in (
        {"up_proj_bias": torch.zeros(20, 4)},
        {"up_proj_bias": torch.zeros(4, 10, 2)},
        {"down_proj_bias": torch.zeros(40)},
    ):
        moved = {name: bias.to(DEVICE) for name, bias in biases.items()}
        with pytest.raises(ValueError, match=f"{next(iter(biases))} must be"):
            mxfp8_expert_mlp(x, topology, experts, **moved)
    with pytest.raises(TypeError, match="Make them by quantize_experts"):
        mxfp8_expert_mlp(x, topology, (up, down))
    with pytest.raises(TypeError, match="up_proj"):
        quantize_experts([up], down)
    with pytest.raises(ValueError, match="scales of the weight must be"):
        weight = quantize(up)
        mxfp8_launchers("torch").sdd(x, replace(weight, scales=weight.scales[..., :1]), topology)
    with pytest.raises(NotImplementedError, match="are for inference"):
        mxfp8_expert_mlp(x.requires_grad_(), topology, experts)
    with pytest.raises(ValueError, match=r"up_proj must be \[E, 2F, H\] or \[E, F, H\]"):
        quantize_experts(down, up)
    kernels = mxfp8_launchers("torch")
    with pytest.raises(ValueError, match="quantised along the contraction"):
        kernels.sdd(x.detach(), quantize(up, -2), topology)
    with pytest.raises(ValueError, match="quantize_columns with one topology"):
        kernels.dsd_transposed(quantize(x.detach()), quantize(x.detach()))


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="real sizes need a GPU")
@pytest.mark.parametrize("tokens", [1, 64, 2048])
def test_real_sizes(tokens):
    """Wherever the tiles are large: the kernels against the torch implementation, which sums in fp32 as well."""
    E, H, F, K = 32, 2048, 768, 8
    ids = torch.rand(tokens, E, device=DEVICE).topk(K, dim=1).indices
    topology = Topology.from_ids(ids, E)
    x, p = randn(tokens, H).bfloat16(), randn(tokens, K).float()
    up, down = randn(E, 2 * F, H, scale=H**-0.5).bfloat16(), randn(E, H, F, scale=F**-0.5).bfloat16()
    triton, plain = mxfp8_launchers("triton"), mxfp8_launchers("torch")
    weight, swiglu = triton.quantize(up), get_activation("swiglu")
    assert torch.equal(weight.codes.view(torch.uint8), plain.quantize(up).codes.view(torch.uint8))
    for rows in (x, triton.quantize(x)):
        found, expected = (kernels.sdd_activation(rows, weight, topology, swiglu)[1].values for kernels in (triton, plain))
        rounding = torch.finfo(torch.bfloat16).eps * float(expected.abs().max())
        assert (found - expected).abs().max() <= rounding
    experts = quantize_experts(up, down)
    y, expected = (mxfp8_expert_mlp(x, topology, experts, p, backend=backend) for backend in ("triton", "torch"))
    assert (y.float() - expected.float()).norm() <= 2**-7 * expected.float().norm()
