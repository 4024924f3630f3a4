"""SDD: dense x dense, kept only where the topology has blocks.

    s_e = x_e w_e^T (+ bias_e)          x_e: the rows of expert e, gathered from [T, H] while they are multiplied
    a_e = activation(s_e)               in the same kernel, when asked for

x [T, H] or [M, H], w [E, N, H], s [M, N]. Forward of the up-projection; with the gradient of the output in place of x and
the down-projection in place of w it is the gradient of the hidden activation. Source: MegaBlocks, arXiv:2211.15841.
"""

from __future__ import annotations

from importlib import import_module

import triton
import triton.language as tl
from torch import Tensor

from ..activations import Activation
from ..block_sparse import BlockSparse, Columns, values_shape
from ..config import GemmConfig, ceil_div, num_programs, row_product_config
from ..launch import (
    ColumnTables,
    StackedWeight,
    check_dense,
    fold_halves,
    stack_activated,
    stack_bias,
    stack_weight,
)
from ..reference import Order
from ..topology import Topology
from ..versions import gluon_is_known
from .activation_functions import activation_value, constants
from .descriptors import describe_rows, describe_weight, load_weight_tile, rows_are_describable, store_rows, weight_form
from .launcher import launch
from .tiles import (
    INTERPRETED,
    along,
    dot,
    fp32_precision,
    grouped_order,
    row_tile,
    split_halves,
    split_pairs,
    value_rows,
    weight_block,
    wrapped,
)

_gluon = import_module(".sdd_gluon", __package__) if gluon_is_known() and not INTERPRETED else None
"""The kernel in Gluon; None where it cannot be used."""


@triton.jit
def gate_and_up(acc, HALVES: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The parts of a tile of gated columns; of others the tile itself, twice."""
    if HALVES == 2:
        return split_halves(acc)
    elif INTERLEAVED:
        return split_pairs(acc)
    else:
        return acc, acc


@triton.jit(do_not_specialize=["num_tiles"])
def _sdd_kernel(
    X, W, Bias, Pre, Act,                       # [T or M, H], [E, HALVES, N, H], [E, HALVES, N], [M, HALVES * N], [M, N]
    Tokens, Tiles, Offsets, ColumnOffsets, BlockOffsets,   # [M], [3, tiles], [E + 1] each
    stride_xt, stride_xh, stride_we, stride_wg, stride_wn, stride_wh, stride_be, stride_bg, stride_bn,
    num_tiles, H, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    HALVES: tl.constexpr, VARIED: tl.constexpr, GATHER: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    SAVE_PRE: tl.constexpr, FUNCTION: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr, GATE_LIMIT: tl.constexpr,
    UP_LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, pid_n = grouped_order(tl.program_id(0), num_tiles, tl.cdiv(N, BLOCK_N), GROUP)
    expert, first_row, length = row_tile(Tiles, num_tiles, tile)
    if expert < 0:
        return
    columns, w_offset, w_half = weight_block(expert, N, stride_we, stride_wg, stride_wn, ColumnOffsets, HALVES, VARIED)
    first_column = pid_n * BLOCK_N
    if first_column >= columns:
        return

    offs_m = tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    wide = tl.arange(0, HALVES * BLOCK_N)
    half = wide // BLOCK_N
    column = wrapped(wide % BLOCK_N, columns - first_column)
    mask_m = offs_m < length
    rows = first_row + tl.where(mask_m, offs_m, 0)
    if GATHER:
        rows = tl.load(Tokens + rows)
    x_ptrs = X + along(rows, stride_xt)[:, None] + along(offs_k, stride_xh)[None, :]
    W += w_offset + along(first_column, stride_wn)
    w_ptrs = W + (half * w_half + along(column, stride_wn))[None, :] + along(offs_k, stride_wh)[:, None]

    zero = tl.load(Offsets).to(tl.float32)
    acc = tl.zeros((BLOCK_M, HALVES * BLOCK_N), tl.float32)
    for k in range(0, H, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs)
            w = tl.load(w_ptrs)
        else:
            mask_k = offs_k < H - k
            x = tl.load(x_ptrs, mask=mask_k[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=mask_k[:, None], other=0.0)
        acc = dot(x, w, acc, zero, PRECISION)
        x_ptrs += tl.cast(stride_xh, tl.int64) * BLOCK_K
        w_ptrs += tl.cast(stride_wh, tl.int64) * BLOCK_K

    if HAS_BIAS:
        if VARIED:
            Bias += tl.load(ColumnOffsets + expert) * HALVES * stride_bn
            b_half = columns * stride_bn
        else:
            Bias += expert.to(tl.int64) * stride_be
            b_half = stride_bg
        acc += tl.load(Bias + half * b_half + along(first_column + column, stride_bn)).to(tl.float32)[None, :]

    gate, up = gate_and_up(acc, HALVES, INTERLEAVED)
    offset, stride = value_rows(expert, first_row, columns, HALVES * N, 1, Offsets, BlockOffsets, HALVES, VARIED)
    if SAVE_PRE:
        offs_n = first_column + tl.arange(0, BLOCK_N)
        mask = mask_m[:, None] & (offs_n < columns)[None, :]
        pre_ptrs = Pre + offset + offs_m[:, None] * stride + offs_n[None, :]
        if HALVES == 2:
            tl.store(pre_ptrs, gate.to(Pre.dtype.element_ty), mask=mask)
            tl.store(pre_ptrs + columns, up.to(Pre.dtype.element_ty), mask=mask)
        else:
            tl.store(pre_ptrs, acc.to(Pre.dtype.element_ty), mask=mask)
    if FUNCTION is not None:
        GATED: tl.constexpr = HALVES == 2 or INTERLEAVED
        PAIRED: tl.constexpr = 2 if INTERLEAVED else 1
        hidden = activation_value(gate, up, GATED, FUNCTION, ALPHA, GATE_LIMIT, UP_LIMIT, UP_OFFSET)
        if GATED:
            offset //= 2
            stride //= 2
        offs_n = first_column // PAIRED + tl.arange(0, BLOCK_N // PAIRED)
        mask = mask_m[:, None] & (offs_n < columns // PAIRED)[None, :]
        act_ptrs = Act + offset + offs_m[:, None] * stride + offs_n[None, :]
        tl.store(act_ptrs, hidden.to(Act.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["capacity"])
def _sdd_tma_kernel(
    X, W, Bias, Pre, Act,                       # [T or M, H], descriptors of the weight, of [M, HALVES, N] and of [M, 1, N]
    Tokens, Tiles, NumTiles,                    # [M], [3, tiles], []
    stride_xt, stride_xh, stride_be, stride_bg, stride_bn,
    capacity, H, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    HALVES: tl.constexpr, DENSE_HIDDEN: tl.constexpr, GATHER: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    SAVE_PRE: tl.constexpr, FUNCTION: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr, GATE_LIMIT: tl.constexpr,
    UP_LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
):  # fmt: skip
    """Persistent: one loop over tiles and steps, so that the loads of the next tile run beside the stores of this one."""
    num_tiles = tl.load(NumTiles)
    num_columns = tl.cdiv(N, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    for number in tl.range(tl.program_id(0), num_tiles * num_columns, tl.num_programs(0), flatten=True):
        tile, pid_n = grouped_order(number, num_tiles, num_columns, GROUP)
        expert, first_row, length = row_tile(Tiles, capacity, tile)
        column = pid_n * BLOCK_N
        rows = first_row + tl.where(offs_m < length, offs_m, 0)
        if GATHER:
            rows = tl.load(Tokens + rows)
        x_rows = X + along(rows, stride_xt)[:, None]

        acc = tl.zeros((BLOCK_M, HALVES * BLOCK_N), tl.float32)
        for k in range(0, H, BLOCK_K):
            x_ptrs = x_rows + along(k + offs_k, stride_xh)[None, :]
            if EVEN_K:
                x = tl.load(x_ptrs)
            else:
                x = tl.load(x_ptrs, mask=(offs_k < H - k)[None, :], other=0.0)
            acc = dot(x, load_weight_tile(W, expert, column, k, DENSE_HIDDEN).T, acc, 0.0, "ieee")

        if HAS_BIAS:
            wide = tl.arange(0, HALVES * BLOCK_N)
            within = column + wide % BLOCK_N
            bias_ptrs = Bias + expert.to(tl.int64) * stride_be + along(wide // BLOCK_N, stride_bg) + along(within, stride_bn)
            acc += tl.load(bias_ptrs, mask=within < N, other=0.0).to(tl.float32)[None, :]
        gate, up = gate_and_up(acc, HALVES, INTERLEAVED)
        if SAVE_PRE:
            if HALVES == 2:
                store_rows(Pre, first_row, length, 0, column, gate)
                store_rows(Pre, first_row, length, 1, column, up)
            elif INTERLEAVED:  # in two parts, from a buffer as large as that of the hidden activation
                left, right = split_halves(acc)
                store_rows(Pre, first_row, length, 0, column, left)
                store_rows(Pre, first_row, length, 0, column + BLOCK_N // 2, right)
            else:
                store_rows(Pre, first_row, length, 0, column, acc)
        if FUNCTION is not None:
            GATED: tl.constexpr = HALVES == 2 or INTERLEAVED
            PAIRED: tl.constexpr = 2 if INTERLEAVED else 1
            hidden = activation_value(gate, up, GATED, FUNCTION, ALPHA, GATE_LIMIT, UP_LIMIT, UP_OFFSET)
            store_rows(Act, first_row, length, 0, column // PAIRED, hidden)


def sdd(
    x: Tensor,
    w: Tensor,
    topology: Topology,
    *,
    order: Order = "tokens",
    columns: Columns | None = None,
    bias: Tensor | None = None,
    config: GemmConfig | None = None,
) -> BlockSparse:
    """Dense x dense, kept only where `topology` has blocks.

    Args:
        x: [T, H], fp16 / bf16 / fp32, any strides; rows are gathered through topology.tokens.
        w: [E, N, H], [E, 2, N / 2, H] (two halves that lie apart), or flat [sum N_e, H] with `columns`; dtype of x, any
            strides.
        topology: M rows over E experts.
        order: "tokens" reads x through topology.tokens; "rows" says that x is [M, H], sorted already.
        columns: columns of each expert; required when w is flat.
        bias: [E, N] or flat [sum N_e], added to every row of its expert.
        config: tile; chosen from the sizes unless given.
    Returns:
        BlockSparse with values [M, N] (flat if columns differ) in the dtype of x; fp32 accumulation. Rows from
        topology.num_rows on are not written.
    Raises:
        ValueError: shapes or devices disagree; TypeError: dtypes.
    Oracle: reference.sdd. Source: MegaBlocks, arXiv:2211.15841.
    """
    weight = fold_halves(stack_weight("sdd", w, topology, columns))
    check_dense("sdd", x, topology, order, w)
    pre = x.new_empty(values_shape(topology.num_slots, weight.sparse_columns))
    _launch(x, weight, topology, order, bias, None, pre, None, config)
    return BlockSparse(pre, topology, weight.sparse_columns)


def sdd_activation(
    x: Tensor,
    w: Tensor,
    topology: Topology,
    activation: Activation,
    *,
    columns: Columns | None = None,
    bias: Tensor | None = None,
    save_pre: bool = True,
    config: GemmConfig | None = None,
) -> tuple[BlockSparse | None, BlockSparse]:
    """`activation` of `sdd(x, w)`, fused: (pre-activation or None, hidden activation).

    Args:
        x: [T, H], read through topology.tokens.
        w: [E, halves * F, H], or [E, halves, F, H] for halves that lie apart; flat [sum halves * F_e, H] with `columns`. Any
            strides.
        columns: columns F_e of the hidden activation; required when w is flat.
        bias: [E, halves * F], [E, halves, F] or flat [sum halves * F_e].
        save_pre: whether the pre-activation, values [M, halves * F], is written for the backward pass.
    Otherwise as `sdd`. Oracle: reference.expert_mlp.
    """
    weight, hidden_columns = stack_activated("sdd", w, topology, columns, activation)
    check_dense("sdd", x, topology, "tokens", w)
    act = x.new_empty(values_shape(topology.num_slots, hidden_columns))
    pre = x.new_empty(values_shape(topology.num_slots, weight.sparse_columns)) if save_pre else None
    _launch(x, weight, topology, "tokens", bias, activation, pre, act, config)
    saved = None if pre is None else BlockSparse(pre, topology, weight.sparse_columns)
    return saved, BlockSparse(act, topology, hidden_columns)


def _launch(
    x: Tensor,
    weight: StackedWeight,
    topology: Topology,
    order: Order,
    bias: Tensor | None,
    activation: Activation | None,
    pre: Tensor | None,
    act: Tensor | None,
    config: GemmConfig | None,
) -> None:
    bias, bias_strides = stack_bias("sdd", bias, weight)
    if topology.num_slots == 0:
        return
    width = weight.sparse_columns.widest
    results_are_describable = rows_are_describable(pre, weight.halves) and rows_are_describable(act)
    form = weight_form(weight) if results_are_describable else None
    config = config or row_product_config(
        topology.num_slots, topology.num_experts, width, x.dtype, x.device, tma=form is not None
    )
    if _gluon is not None and _gluon.applies(x, weight, form, bias, activation, config):
        _gluon.launch_sdd(x, weight, form, topology, order, activation, pre, act)
        return
    block_n = max(16, config.block_n // weight.halves)
    stored_n = block_n // 2 if activation is not None and activation.interleaved else block_n
    schedule = topology.schedule(config.block_m)
    columns = weight.columns.widest
    tiles = schedule.capacity * ceil_div(columns, block_n)
    flags = {
        "BLOCK_M": config.block_m, "BLOCK_N": block_n, "BLOCK_K": config.block_k, "GROUP": 8, "HALVES": weight.halves,
        "GATHER": order == "tokens", "EVEN_K": weight.hidden_size % config.block_k == 0, "HAS_BIAS": bias is not None,
        "SAVE_PRE": pre is not None, **constants(activation), "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip
    if form is not None and config.tma:
        launch(
            _sdd_tma_kernel, x.device, (min(tiles, num_programs(x.device)),),
            x, describe_weight(form, weight, block_n, config.block_k), bias,
            describe_rows(pre, config.block_m, stored_n, weight.halves), describe_rows(act, config.block_m, stored_n),
            topology.tokens, schedule.tiles, schedule.num_tiles,
            *x.stride(), *bias_strides, schedule.capacity, weight.hidden_size, columns,
            DENSE_HIDDEN=form is weight.data, **flags,
        )  # fmt: skip
        return
    tables = ColumnTables.of(topology, weight.columns)
    launch(
        _sdd_kernel, x.device, (tiles,),
        x, weight.data, bias, pre, act,
        topology.tokens, schedule.tiles, topology.offsets, tables.column_offsets, tables.block_offsets,
        *x.stride(), *weight.strides, *bias_strides, schedule.capacity, weight.hidden_size, columns,
        VARIED=tables.varied, PRECISION=fp32_precision(), **flags,
    )  # fmt: skip
