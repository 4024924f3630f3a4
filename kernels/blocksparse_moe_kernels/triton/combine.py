"""Combine: rows back to tokens.

    out[t] = sum over the slots of token t of weights[slot] * y[row of slot]        y [M, H] -> out [T, H]

Dropped slots add nothing. The sum is taken in fp32 and in the order of the slots, one program per token: no atomics. Without
weights it is the gather-sum that ends the gradient of a gathered input.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..config import ceil_div, next_power_of_2
from ..launch import check_combine
from ..topology import Topology
from .launcher import launch


@triton.jit
def _combine_kernel(
    Y, Weights, Out, Rows, TokenSlots, TokenOffsets,       # [M, H], [M], [T, H], [M], [M], [T + 1]
    stride_yr, stride_yh, stride_w, H, top_k,
    BLOCK_H: tl.constexpr, HAS_WEIGHTS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < H
    if PAIRS:
        first = tl.load(TokenOffsets + token)
        last = tl.load(TokenOffsets + token + 1)
    else:
        first = token * top_k
        last = first + top_k
    acc = tl.zeros((BLOCK_H,), tl.float32)
    for i in range(first, last):
        slot = tl.load(TokenSlots + i) if PAIRS else i
        row = tl.load(Rows + slot)
        here = row >= 0
        y_ptrs = Y + row.to(tl.int64) * stride_yr + offs_h.to(tl.int64) * stride_yh
        y = tl.load(y_ptrs, mask=mask_h & here, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            y *= tl.load(Weights + tl.cast(slot, tl.int64) * stride_w, mask=here, other=0.0).to(tl.float32)
        acc += y
    tl.store(Out + token.to(tl.int64) * H + offs_h, acc.to(Out.dtype.element_ty), mask=mask_h)


def combine(y: Tensor, topology: Topology, weights: Tensor | None = None) -> Tensor:
    """Weighted sum of each token's rows.

    Args:
        y: [M, H] in row order, any strides.
        topology: M rows of T tokens.
        weights: [T, K], or [M] by slot, any floating dtype; 1 if not given.
    Returns:
        [T, H] in the dtype of y; summed in fp32.
    Raises:
        ValueError: shapes or devices disagree.
    Oracle: reference.combine.
    """
    check_combine(y, topology, weights)
    return sum_slots(y, topology.rows, topology, weights)


def sum_slots(y: Tensor, rows: Tensor, topology: Topology, weights: Tensor | None = None) -> Tensor:
    """`combine` of rows that lie elsewhere: y [P, H], and rows [M] int32 where each slot has its own, -1 for none."""
    out = y.new_empty(topology.num_tokens, y.shape[1])
    if out.numel() == 0 or topology.num_slots == 0:
        return out.zero_()
    if weights is not None:
        weights = weights.reshape(-1)
    pairs = topology.token_offsets is not None
    block_h = min(1024, next_power_of_2(y.shape[1]))
    launch(
        _combine_kernel, y.device, (topology.num_tokens, ceil_div(y.shape[1], block_h)),
        y, weights, out, rows, topology.token_slots, topology.token_offsets,
        *y.stride(), 0 if weights is None else weights.stride(0), y.shape[1], topology.slots_per_token,
        BLOCK_H=block_h, HAS_WEIGHTS=weights is not None, PAIRS=pairs,
    )  # fmt: skip
    return out
