"""The expert MLP of weights that are kept in MXFP8, for inference, as a registered op.

In training the products quantise their operands: that is `experts`, with an implementation named "triton+mxfp8".
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse_moe_kernels import get_activation
from blocksparse_moe_kernels.mxfp8 import MXFP8

from ..products import implementation, mxfp8_launchers
from .define import NUM_TOPOLOGY, TOPOLOGY, define, unflatten


def _expert_mlp_run(x, up, up_scales, up_bias, down, down_scales, down_bias, routing_weights, *arguments) -> Tensor:
    *flat, quantize_rows, name, backend = arguments
    topology, activation, kernels = unflatten(flat), get_activation(name), mxfp8_launchers(backend)

    def rows(tensor: Tensor) -> Tensor | MXFP8:
        return kernels.quantize(tensor) if quantize_rows else tensor

    up, down = weight(up, up_scales, x.dtype), weight(down, down_scales, x.dtype)
    _, hidden = kernels.sdd_activation(rows(x), up, topology, activation, bias=up_bias, save_pre=False)
    y = kernels.dsd(rows(hidden.values), down.mT, topology, bias=down_bias)
    return implementation(backend).combine(y, topology, routing_weights)


def weight(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> MXFP8:
    """The weight [E, N, K] of an op's arguments; its codes come as bytes."""
    return MXFP8(codes.view(torch.float8_e4m3fn), scales, -1, dtype)


def _expert_mlp_fake(x, up, up_scales, up_bias, down, down_scales, down_bias, routing_weights, *arguments) -> Tensor:
    return x.new_empty(unflatten(arguments[:NUM_TOPOLOGY]).num_tokens, down.shape[1])


define(
    "mxfp8_expert_mlp",
    "Tensor x, Tensor up, Tensor up_scales, Tensor? up_bias, Tensor down, Tensor down_scales, Tensor? down_bias, "
    f"Tensor? routing_weights, {TOPOLOGY}, bool quantize_rows, str activation, str backend",
    "Tensor",
    _expert_mlp_run,
    _expert_mlp_fake,
)
