"""Transposed DSD: the weight gradients.

    w_e = s_e^T x_e                     sum over the rows of expert e; s [M, N] block-sparse, x [T, H] or [M, H], w [E, N, H]

x in token order is gathered while it is multiplied. An expert without rows gets exactly zero. One program per tile of w and
no atomics, so results are bitwise repeatable. Called through `dsd(s.T, x)`. Source: MegaBlocks, arXiv:2211.15841.
"""

from __future__ import annotations

from importlib import import_module

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..block_sparse import BlockSparse, new_weight
from ..config import GemmConfig, ceil_div, column_product_config, num_programs
from ..launch import (
    ColumnTables,
    check_dense,
    check_sparse,
    fold_halves,
    stack_weight,
    value_strides,
)
from ..reference import Order
from ..versions import gluon_is_known
from .descriptors import describe_rows, describe_weight, load_rows, rows_are_describable, store_weight_tile, weight_form
from .launcher import launch
from .tiles import INTERPRETED, along, dealt_tile, dot, fp32_precision, grouped_order, value_rows, weight_block, wrapped

_gluon = import_module(".dsd_transposed_gluon", __package__) if gluon_is_known() and not INTERPRETED else None
"""The kernel in Gluon; None where it cannot be used."""


@triton.jit
def _dsd_transposed_kernel(
    S, X, Out,                                             # [M, HALVES * N], [T or M, H], [E, HALVES, N, H]
    Tokens, BySize, Offsets, ColumnOffsets, BlockOffsets,  # [M], [E], [E + 1] each
    stride_sm, stride_sn, stride_xt, stride_xh, stride_oe, stride_og, stride_on, stride_oh,
    H, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    HALVES: tl.constexpr, VARIED: tl.constexpr, GATHER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    expert = tl.load(BySize + tl.program_id(1))
    num_column_tiles = tl.cdiv(N, BLOCK_M)
    pid_m, pid_n = grouped_order(tl.program_id(0), HALVES * num_column_tiles, tl.cdiv(H, BLOCK_N), GROUP)
    half = pid_m // num_column_tiles
    first_column = (pid_m % num_column_tiles) * BLOCK_M
    columns, out_offset, out_half = weight_block(expert, N, stride_oe, stride_og, stride_on, ColumnOffsets, HALVES, VARIED)
    if first_column >= columns:
        return
    first_row = tl.load(Offsets + expert)
    num_rows = tl.load(Offsets + expert + 1) - first_row
    s_offset, s_stride = value_rows(
        expert, first_row, columns, stride_sm, stride_sn, Offsets, BlockOffsets, HALVES, VARIED
    )

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    first_hidden = pid_n * BLOCK_N
    s_column = half * columns + first_column + wrapped(offs_m, columns - first_column)
    x_column = wrapped(offs_n, H - first_hidden)
    S += s_offset
    X += along(first_hidden, stride_xh)
    Tokens += first_row
    s_ptrs = S + along(s_column, stride_sn)[:, None] + along(offs_k, s_stride)[None, :]

    # The rows of the next step are looked up while this one is multiplied: looked up in its own step, an index costs a stage
    # of the pipeline.
    row = first_row + offs_k
    if GATHER:
        row = tl.load(Tokens + offs_k, mask=offs_k < num_rows, other=0)
    zero = tl.load(Offsets).to(tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, num_rows, BLOCK_K):
        mask_k = offs_k < num_rows - k
        x_ptrs = X + along(row, stride_xt)[:, None] + along(x_column, stride_xh)[None, :]
        s = tl.load(s_ptrs, mask=mask_k[None, :], other=0.0)
        x = tl.load(x_ptrs, mask=mask_k[:, None], other=0.0)
        if GATHER:
            following = k + BLOCK_K + offs_k
            row = tl.load(Tokens + following, mask=following < num_rows, other=0)
        else:
            row += BLOCK_K
        acc = dot(s, x, acc, zero, PRECISION)
        s_ptrs += tl.cast(s_stride, tl.int64) * BLOCK_K

    Out += out_offset + half * out_half + along(first_column, stride_on) + along(first_hidden, stride_oh)
    mask = (offs_m < columns - first_column)[:, None] & (offs_n < H - first_hidden)[None, :]
    out_ptrs = Out + along(offs_m, stride_on)[:, None] + along(offs_n, stride_oh)[None, :]
    tl.store(out_ptrs, acc.to(Out.dtype.element_ty), mask=mask)


@triton.jit
def _dsd_transposed_tma_kernel(
    S, X, Out,                                             # descriptors of [M, 1, N] and of the result; [T or M, H]
    Tokens, BySize, Offsets,                               # [M], [E], [E + 1]
    stride_xt, stride_xh,
    num_experts, H, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    DENSE_HIDDEN: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Persistent, and computed as w_e^T = x_e^T s_e: the narrow side of a tile is the one to gather.

    Rows behind those of the expert are zeros on both sides, whatever memory holds there.

    Tiles cost what their experts have of rows. They are dealt out by falling cost, forth and back, so that all programs end
    at about one time.

    Rows are looked up two steps ahead. The compiler puts the addresses of the next copy before the product of this step, where
    they would wait for an index that was looked up in the step before. Nor does it pipeline a loop that only renames
    `following` to `row`: adding a zero that it cannot know makes it more than a renaming.
    """
    num_columns, num_hidden = tl.cdiv(N, BLOCK_M), tl.cdiv(H, BLOCK_N)
    per_expert = num_columns * num_hidden
    zero = tl.load(Offsets)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    num_tiles, num_programs = num_experts * per_expert, tl.num_programs(0)
    for number in tl.range(tl.program_id(0), num_tiles, num_programs):
        tile = dealt_tile(number, num_tiles, num_programs)
        expert = tl.load(BySize + tile // per_expert)
        pid_m, pid_n = grouped_order(tile % per_expert, num_columns, num_hidden, GROUP)
        column, hidden = pid_m * BLOCK_M, pid_n * BLOCK_N
        first_row = tl.load(Offsets + expert)
        num_rows = tl.load(Offsets + expert + 1) - first_row
        tokens = Tokens + first_row
        x_columns = X + along(hidden, stride_xh) + along(wrapped(offs_n, H - hidden), stride_xh)[None, :]
        if GATHER:
            row = tl.load(tokens + offs_k, mask=offs_k < num_rows, other=0)
            following = tl.load(tokens + BLOCK_K + offs_k, mask=BLOCK_K + offs_k < num_rows, other=0)
        else:
            row = first_row + offs_k
            following = row + BLOCK_K
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in range(0, num_rows, BLOCK_K):
            x = tl.load(x_columns + along(row, stride_xt)[:, None], mask=(offs_k < num_rows - k)[:, None], other=0.0)
            row = following + zero
            if GATHER:
                coming = k + 2 * BLOCK_K + offs_k
                following = tl.load(tokens + coming, mask=coming < num_rows, other=0)
            else:
                following += BLOCK_K
            acc = dot(x.T, load_rows(S, first_row + k, num_rows - k, 0, column), acc, 0.0, "ieee")
        store_weight_tile(Out, expert, column, hidden, acc.T, DENSE_HIDDEN)


def dsd_transposed(
    s: BlockSparse,
    x: Tensor,
    *,
    order: Order = "rows",
    like: Tensor | None = None,
    config: GemmConfig | None = None,
) -> Tensor:
    """Sum over each expert's rows: w_e = s_e^T x_e.

    Args:
        s: values [M, N], not transposed, any strides.
        x: [T, H] with order="tokens", [M, H] with order="rows"; dtype of s, any strides.
        like: weight whose shape and strides the result takes, [E, N, H], [E, 2, N / 2, H] or flat [sum N_e, H].
        config: tile (block_m over N, block_n over H, block_k over rows); chosen from the sizes unless given.
    Returns:
        [E, N, H], flat [sum N_e, H] if columns differ, or as `like`; dtype of s, fp32 accumulation.
    Raises:
        ValueError: shapes or devices disagree; TypeError: dtypes.
    Oracle: reference.dsd with a transposed operand.
    """
    topology = s.topology
    out = new_weight(x, s.columns, x.shape[1]) if like is None else torch.empty_like(like)
    check_dense("dsd", x, topology, order, out)
    weight = fold_halves(stack_weight("dsd", out, topology, s.columns if out.ndim == 2 else None))
    check_sparse("dsd", s, weight.sparse_columns)
    if out.numel() == 0:
        return out
    hidden_size, columns = weight.hidden_size, weight.columns.widest
    form = weight_form(weight) if weight.halves == 1 and rows_are_describable(s.values) else None
    config = config or column_product_config(
        topology.num_slots, topology.num_experts, x.dtype, x.device, tma=form is not None
    )
    if form is not None and _gluon is not None and _gluon.applies(x, config):
        _gluon.launch_dsd_transposed(s, x, order, weight, form)
        return out
    tiles = weight.halves * ceil_div(columns, config.block_m) * ceil_div(hidden_size, config.block_n)
    flags = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP": 8,
        "GATHER": order == "tokens", "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip
    by_size = topology.experts_by_size()
    if form is not None and config.tma:
        launch(
            _dsd_transposed_tma_kernel, x.device, (min(tiles * topology.num_experts, num_programs(x.device)),),
            describe_rows(s.values, config.block_k, config.block_m), x,
            describe_weight(form, weight, config.block_m, config.block_n),
            topology.tokens, by_size, topology.offsets, *x.stride(), topology.num_experts, hidden_size, columns,
            DENSE_HIDDEN=form is weight.data, **flags,
        )  # fmt: skip
        return out
    tables = ColumnTables.of(topology, weight.columns)
    launch(
        _dsd_transposed_kernel, x.device, (tiles, topology.num_experts),
        s.values, x, weight.data,
        topology.tokens, by_size, topology.offsets, tables.column_offsets, tables.block_offsets,
        *value_strides(s), *x.stride(), *weight.strides, hidden_size, columns,
        HALVES=weight.halves, VARIED=tables.varied, PRECISION=fp32_precision(), **flags,
    )  # fmt: skip
    return out
