"""What is compiled ahead of time of MXFP8: its products with each of their tiles, and what quantises."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from blocksparse_moe.backends.products import NATIVE_MXFP8
from blocksparse_moe_kernels import Topology, get_activation
from blocksparse_moe_kernels.config import GemmConfig, ceil_div
from blocksparse_moe_kernels.mxfp8 import BLOCK, MXFP8
from blocksparse_moe_kernels.triton.mxfp8_quantize import quantize, quantize_columns
from blocksparse_moe_kernels.triton.mxfp8_rows import dsd, row_product_tile, sdd_activation
from blocksparse_moe_kernels.triton.mxfp8_transposed import column_product_tile, dsd_transposed

from .aot_cases import ARCHITECTURES, DEPTHS, GPT_OSS, HEIGHTS, Build, Layer, distinct

MXFP8_ARCHITECTURES = (*ARCHITECTURES, 121)
"""With one that takes the tiles of sm_120, and multiplies otherwise."""

WEIGHT_ONLY = {"quantized": False}
"""x in high precision."""


def known_architecture(architecture: int) -> int:
    """The one whose tiles it takes, as `config.architecture_of` has it."""
    return max(known for known in ARCHITECTURES if known <= architecture)


def empty(layer: Layer, *shape: int, axis: int = -1, topology: Topology | None = None) -> MXFP8:
    """MXFP8 without memory."""
    blocks = [*shape]
    blocks[axis] = ceil_div(shape[axis], BLOCK) if topology is None else topology.schedule(BLOCK).capacity
    codes, scales = (torch.empty(size, dtype=torch.uint8, device="meta") for size in (shape, blocks))
    return MXFP8(codes.view(torch.float8_e4m3fn), scales, axis, layer.tokens.dtype, topology)


def mxfp8_up(layer: Layer, config: GemmConfig, quantized: bool = True) -> None:
    T, H, F, E = layer.sizes
    x: Tensor | MXFP8 = empty(layer, T, H) if quantized else layer.tokens
    weight, bias = empty(layer, E, layer.halves * F, H), layer.bias(layer.halves)
    sdd_activation(x, weight, layer.topology, get_activation(layer.activation), bias=bias, save_pre=quantized, config=config)


def mxfp8_down(layer: Layer, config: GemmConfig, quantized: bool = True) -> None:
    _, H, F, E = layer.sizes
    M = layer.topology.num_slots
    s = empty(layer, M, F) if quantized else layer.tensor(M, F)
    dsd(s, empty(layer, E, H, F).mT, layer.topology, bias=layer.down_bias(), config=config)


def mxfp8_grad_down(layer: Layer, config: GemmConfig) -> None:
    _, H, F, _ = layer.sizes
    topology = layer.topology
    left, right = (empty(layer, topology.num_slots, width, axis=-2, topology=topology) for width in (F, H))
    dsd_transposed(left, right, like=layer.down(), config=config)


def quantizers(layer: Layer) -> None:
    """Copies of weights along both axes, of tokens, and of rows."""
    for tensor in (layer.weight(2), layer.weight(2).mT, layer.tokens):
        quantize(tensor)
    quantize_columns(layer.tokens, layer.topology, order="tokens")
    quantize_columns(layer.rows, layer.topology)


def mxfp8(architecture: int) -> Iterator[Build]:
    """Each tile where tiles are tuned or multiplied natively, else the largest; once the other dtypes, the activation of most
    parameters, and sizes that nothing divides."""
    layer, known = Layer("bf16"), known_architecture(architecture)
    quantized = distinct(row_product_tile(height, True, known) for height in reversed(HEIGHTS))
    plain = distinct(row_product_tile(height, False, known, narrow) for height in reversed(HEIGHTS) for narrow in (False, True))
    columns = distinct(column_product_tile(depth, known) for depth in reversed(DEPTHS))
    if architecture not in (90, *NATIVE_MXFP8):
        quantized, plain, columns = quantized[:1], plain[:1], columns[:1]
    yield from (Build(mxfp8_up, layer, architecture, config) for config in quantized)
    yield from (Build(mxfp8_up, layer, architecture, config, WEIGHT_ONLY) for config in plain)
    yield from (Build(mxfp8_grad_down, layer, architecture, config) for config in columns)
    yield Build(mxfp8_down, layer, architecture, quantized[0])
    yield Build(mxfp8_down, layer, architecture, plain[-1], WEIGHT_ONLY)
    yield Build(quantizers, layer, architecture)
    if architecture == 90:
        yield Build(mxfp8_up, Layer("fp16"), architecture, plain[0], WEIGHT_ONLY)
        yield Build(mxfp8_up, Layer("fp32"), architecture, plain[-1], WEIGHT_ONLY)
        yield Build(mxfp8_up, Layer(activation=GPT_OSS), architecture, quantized[0])
        yield Build(mxfp8_up, Layer(layout="odd"), architecture, quantized[-1])
        yield Build(mxfp8_grad_down, Layer(layout="odd"), architecture, columns[-1])
        yield Build(quantizers, Layer("fp32"), architecture)
