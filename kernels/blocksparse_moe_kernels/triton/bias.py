"""Gradients that biases bring: sums over each expert's rows, and the bias's part of the routing weight's gradient.

    expert_sum    db_e = sum over rows r of expert e of p_r x_r         x [T or M, N] -> [E, N]
    bias_dot      d_r = <x[token of r], b_e>                            x [T, H], b [E, H] -> [M] fp32

Fixed order of summation, no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..block_sparse import BlockSparse
from ..config import ceil_div, choose_block_m, next_power_of_2
from ..launch import ColumnTables, value_strides
from ..topology import Topology
from .launcher import launch
from .tiles import row_tile, value_rows, weight_block


@triton.jit
def _expert_sum_kernel(
    X, Weights, Out, Tokens, Slots, Offsets, ColumnOffsets, BlockOffsets,
    stride_xr, stride_xn, stride_w, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, VARIED: tl.constexpr, GATHER: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    columns, out_offset, _ = weight_block(expert, N, N, 0, 1, ColumnOffsets, 1, VARIED)
    first_row = tl.load(Offsets + expert)
    last_row = tl.load(Offsets + expert + 1)
    x_offset, x_stride = value_rows(expert, first_row, columns, stride_xr, stride_xn, Offsets, BlockOffsets, 1, VARIED)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < columns
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for m in range(first_row, last_row, BLOCK_M):
        row = m + tl.arange(0, BLOCK_M)
        mask = (row < last_row)[:, None] & mask_n[None, :]
        if GATHER:
            source = tl.load(Tokens + row, mask=row < last_row, other=0).to(tl.int64)
            x_ptrs = X + source[:, None] * stride_xr + offs_n.to(tl.int64)[None, :] * stride_xn
        else:
            within = (row - first_row).to(tl.int64)
            x_ptrs = X + x_offset + within[:, None] * x_stride + offs_n.to(tl.int64)[None, :] * stride_xn
        x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            slot = tl.load(Slots + row, mask=row < last_row, other=0).to(tl.int64)
            x *= tl.load(Weights + slot * stride_w, mask=row < last_row, other=0.0).to(tl.float32)[:, None]
        acc += x
    tl.store(Out + out_offset + offs_n, tl.sum(acc, 0).to(Out.dtype.element_ty), mask=mask_n)


@triton.jit(do_not_specialize=["num_tiles"])
def _bias_dot_kernel(
    X, Bias, Out, Tokens, Tiles,                           # [T, H], [E, H], [M], [M], [3, tiles]
    stride_xt, stride_xh, stride_be, stride_bh, num_tiles, H,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    expert, first_row, length = row_tile(Tiles, num_tiles, tile)
    if expert < 0:
        return
    offs_m = tl.arange(0, BLOCK_M)
    mask_m = offs_m < length
    token = tl.load(Tokens + first_row + offs_m, mask=mask_m, other=0).to(tl.int64)
    Bias += expert.to(tl.int64) * stride_be
    acc = tl.zeros((BLOCK_M,), tl.float32)
    for h in range(0, H, BLOCK_H):
        offs_h = h + tl.arange(0, BLOCK_H)
        mask = mask_m[:, None] & (offs_h < H)[None, :]
        x_ptrs = X + token[:, None] * stride_xt + offs_h.to(tl.int64)[None, :] * stride_xh
        x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
        bias = tl.load(Bias + offs_h.to(tl.int64) * stride_bh, mask=offs_h < H, other=0.0).to(tl.float32)
        acc += tl.sum(x * bias[None, :], 1)
    tl.store(Out + first_row + offs_m, acc, mask=mask_m)


def expert_sum(s: BlockSparse) -> Tensor:
    """Sum of each expert's rows of s: values [M, N] -> [E, N] (flat [sum N_e] if columns differ), in its dtype."""
    topology, columns = s.topology, s.columns
    shape = (topology.num_experts, columns.widest) if columns.are_equal else (columns.total,)
    return _expert_sum(s.values, value_strides(s), topology, ColumnTables.of(topology, columns), columns.widest, shape, None)


def expert_sum_tokens(x: Tensor, topology: Topology, weights: Tensor | None = None) -> Tensor:
    """Sum over each expert's rows of weights[slot] * x[token]: x [T, N] -> [E, N], in the dtype of x."""
    tables = ColumnTables(False, topology.offsets, topology.offsets)
    shape = (topology.num_experts, x.shape[1])
    return _expert_sum(x, x.stride(), topology, tables, x.shape[1], shape, weights, gather=True)


def _expert_sum(x, strides, topology, tables, widest, shape, weights, gather=False) -> Tensor:
    out = x.new_empty(shape)
    if weights is not None:
        weights = weights.reshape(-1)
    block_n = min(128, next_power_of_2(widest))
    launch(
        _expert_sum_kernel, x.device, (ceil_div(widest, block_n), topology.num_experts),
        x, weights, out, topology.tokens, topology.slots, topology.offsets, tables.column_offsets, tables.block_offsets,
        *strides, 0 if weights is None else weights.stride(0), widest,
        BLOCK_M=32, BLOCK_N=block_n, VARIED=tables.varied, GATHER=gather, HAS_WEIGHTS=weights is not None,
    )  # fmt: skip
    return out


def bias_dot(x: Tensor, bias: Tensor, topology: Topology) -> Tensor:
    """<x[token of row], bias[expert of row]> for every row: x [T, H], bias [E, H] -> [M] fp32."""
    out = torch.empty(topology.num_slots, dtype=torch.float32, device=x.device)
    if topology.num_slots == 0:
        return out
    schedule = topology.schedule(choose_block_m(topology.num_slots, topology.num_experts))
    launch(
        _bias_dot_kernel, x.device, (schedule.capacity,),
        x, bias, out, topology.tokens, schedule.tiles,
        *x.stride(), *bias.stride(), schedule.capacity, x.shape[1],
        BLOCK_M=schedule.block_m, BLOCK_H=128,
    )  # fmt: skip
    return out
