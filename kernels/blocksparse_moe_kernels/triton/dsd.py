"""DSD: sparse x dense -> dense.

    y_e = s_e w_e (+ bias_e)            s [M, N] block-sparse, w [E, N, H], y [M, H] rows in expert order

Forward of the down-projection, with `down_proj.transpose(1, 2)` for w; with the gradient of the pre-activation in place of s
and the up-projection in place of w it is the gradient of the gathered input. A transposed s sums over each expert's rows
instead: that product is in dsd_transposed.py. Source: MegaBlocks, arXiv:2211.15841.
"""

from __future__ import annotations

from importlib import import_module

import triton
import triton.language as tl
from torch import Tensor

from ..block_sparse import BlockSparse
from ..config import GemmConfig, ceil_div, num_programs, row_product_config
from ..launch import (
    ColumnTables,
    check_device,
    check_down_bias,
    check_same,
    check_sparse,
    fold_halves,
    stack_weight,
    value_strides,
)
from ..reference import Order
from ..versions import gluon_is_known
from .descriptors import (
    describe,
    describe_rows,
    describe_weight,
    load_weight_tile,
    rows_are_describable,
    store_rows,
    weight_form,
)
from .dsd_transposed import dsd_transposed
from .launcher import launch
from .tiles import INTERPRETED, along, dot, fp32_precision, grouped_order, row_tile, value_rows, weight_block, wrapped

_gluon = import_module(".dsd_gluon", __package__) if gluon_is_known() and not INTERPRETED else None
"""The kernel in Gluon; None where it cannot be used."""


@triton.jit(do_not_specialize=["num_tiles"])
def _dsd_kernel(
    S, W, Bias, Y,                                         # [M, HALVES * N], [E, HALVES, N, H], [E, H], [M, H]
    Tiles, Offsets, ColumnOffsets, BlockOffsets,           # [3, tiles], [E + 1] each
    stride_sm, stride_sn, stride_we, stride_wg, stride_wn, stride_wh, stride_be, stride_bh,
    num_tiles, H, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    HALVES: tl.constexpr, VARIED: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, pid_n = grouped_order(tl.program_id(0), num_tiles, tl.cdiv(H, BLOCK_N), GROUP)
    expert, first_row, length = row_tile(Tiles, num_tiles, tile)
    if expert < 0:
        return
    columns, w_offset, w_half = weight_block(expert, N, stride_we, stride_wg, stride_wn, ColumnOffsets, HALVES, VARIED)
    s_offset, s_stride = value_rows(
        expert, first_row, columns, stride_sm, stride_sn, Offsets, BlockOffsets, HALVES, VARIED
    )

    offs_m = tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    first_column = pid_n * BLOCK_N
    offs_n = tl.arange(0, BLOCK_N)
    column = wrapped(offs_n, H - first_column)
    mask_m = offs_m < length
    s_rows = S + s_offset + along(tl.where(mask_m, offs_m, 0), s_stride)[:, None]
    W += w_offset + along(first_column, stride_wh)

    zero = tl.load(Offsets).to(tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for half in tl.static_range(HALVES):
        s_ptrs = s_rows + along(half * columns + offs_k, stride_sn)[None, :]
        w_ptrs = W + half * w_half + along(offs_k, stride_wn)[:, None] + along(column, stride_wh)[None, :]
        for k in range(0, columns, BLOCK_K):
            if EVEN_K:
                s = tl.load(s_ptrs)
                w = tl.load(w_ptrs)
            else:
                mask_k = offs_k < columns - k
                s = tl.load(s_ptrs, mask=mask_k[None, :], other=0.0)
                w = tl.load(w_ptrs, mask=mask_k[:, None], other=0.0)
            acc = dot(s, w, acc, zero, PRECISION)
            s_ptrs += tl.cast(stride_sn, tl.int64) * BLOCK_K
            w_ptrs += tl.cast(stride_wn, tl.int64) * BLOCK_K

    if HAS_BIAS:
        bias_ptrs = Bias + expert.to(tl.int64) * stride_be + along(first_column + column, stride_bh)
        acc += tl.load(bias_ptrs).to(tl.float32)[None, :]
    y_ptrs = Y + first_row.to(tl.int64) * H + first_column + offs_m[:, None] * H + offs_n[None, :]
    tl.store(y_ptrs, acc.to(Y.dtype.element_ty), mask=mask_m[:, None] & (offs_n < H - first_column)[None, :])


@triton.jit(do_not_specialize=["capacity"])
def _dsd_tma_kernel(
    S, W, Bias, Y,                                         # descriptors of [M, 1, N], of the weight and of [M, 1, H]; [E, H]
    Tiles, NumTiles,                                       # [3, tiles], []
    stride_be, stride_bh,
    capacity, H, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    DENSE_HIDDEN: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Persistent, as in sdd.py. Rows of S behind those of the tile are read and never stored."""
    num_tiles = tl.load(NumTiles)
    num_columns = tl.cdiv(H, BLOCK_N)
    for number in tl.range(tl.program_id(0), num_tiles * num_columns, tl.num_programs(0), flatten=True):
        tile, pid_n = grouped_order(number, num_tiles, num_columns, GROUP)
        expert, first_row, length = row_tile(Tiles, capacity, tile)
        column = pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, N, BLOCK_K):
            w = load_weight_tile(W, expert, k, column, DENSE_HIDDEN)
            acc = dot(S.load([first_row, k]), w, acc, 0.0, "ieee")
        if HAS_BIAS:
            offs_n = column + tl.arange(0, BLOCK_N)
            bias_ptrs = Bias + expert.to(tl.int64) * stride_be + along(offs_n, stride_bh)
            acc += tl.load(bias_ptrs, mask=offs_n < H, other=0.0).to(tl.float32)[None, :]
        store_rows(Y, first_row, length, 0, column, acc)


def dsd(
    s: BlockSparse,
    w: Tensor,
    *,
    order: Order = "rows",
    bias: Tensor | None = None,
    config: GemmConfig | None = None,
) -> Tensor:
    """Sparse x dense; rows stay in expert order.

    Args:
        s: values [M, N] (flat if columns differ), any strides; or transposed (`s.T`).
        w: [E, N, H], [E, 2, N / 2, H] (two halves that lie apart) or flat [sum N_e, H]; dtype of s, any strides. For a
            transposed s the dense operand: [T, H] with order="tokens", [M, H] with order="rows".
        order: of the dense operand of a transposed s; the result of a plain product is in row order.
        bias: [E, H], added to every row of its expert.
        config: tile; chosen from the sizes unless given.
    Returns:
        [M, H], rows in expert order; those from topology.num_rows on are not written. For a transposed s [E, N, H], or flat
        [sum N_e, H] if columns differ: zero for an expert without rows. dtype of s; fp32 accumulation.
    Raises:
        ValueError: shapes or devices disagree; TypeError: dtypes.
    Oracle: reference.dsd. Source: MegaBlocks, arXiv:2211.15841.
    """
    if s.transposed:
        return dsd_transposed(s.T, w, order=order, config=config)
    topology = s.topology
    columns = None if w.ndim > 2 else s.columns
    weight = fold_halves(stack_weight("dsd", w, topology, columns))
    check_sparse("dsd", s, weight.sparse_columns)
    check_same("dsd", "the sparse operand", s.values, "the weight", w)
    check_device("dsd", w, topology)
    check_down_bias("dsd", bias, weight)
    hidden_size = weight.hidden_size
    y = s.values.new_empty(topology.num_slots, hidden_size)
    if y.numel() == 0:
        return y
    others_are_describable = rows_are_describable(s.values) and rows_are_describable(y)
    form = weight_form(weight) if weight.halves == 1 and others_are_describable else None
    config = config or row_product_config(
        topology.num_slots, topology.num_experts, hidden_size, w.dtype, w.device, tma=form is not None
    )
    if _gluon is not None and _gluon.applies(weight, form, bias, config):
        _gluon.launch_dsd(s, weight, form, y)
        return y
    schedule = topology.schedule(config.block_m)
    tiles = schedule.capacity * ceil_div(hidden_size, config.block_n)
    bias_strides = (0, 0) if bias is None else bias.stride()
    flags = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP": 8,
        "HAS_BIAS": bias is not None, "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip
    if form is not None and config.tma:
        launch(
            _dsd_tma_kernel, w.device, (min(tiles, num_programs(w.device)),),
            describe(s.values, config.block_m, config.block_k),
            describe_weight(form, weight, config.block_k, config.block_n),
            bias, describe_rows(y, config.block_m, config.block_n),
            schedule.tiles, schedule.num_tiles,
            *bias_strides, schedule.capacity, hidden_size, weight.columns.widest,
            DENSE_HIDDEN=form is weight.data, **flags,
        )  # fmt: skip
        return y
    tables = ColumnTables.of(topology, weight.columns)
    columns_even = all(width % config.block_k == 0 for width in weight.columns.unequal or [weight.columns.widest])
    launch(
        _dsd_kernel, w.device, (tiles,),
        s.values, weight.data, bias, y,
        schedule.tiles, topology.offsets, tables.column_offsets, tables.block_offsets,
        *value_strides(s), *weight.strides, *bias_strides, schedule.capacity, hidden_size, weight.columns.widest,
        HALVES=weight.halves, VARIED=tables.varied, EVEN_K=columns_even, PRECISION=fp32_precision(), **flags,
    )  # fmt: skip
    return y
