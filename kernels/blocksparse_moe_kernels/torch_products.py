"""The launchers of `triton/` in plain PyTorch: the same names, arguments and results, on any device and up to fp64.

One matrix product per expert that has rows; experts without rows cost nothing. The row offsets are read on the host once a
product, which is free on a CPU and synchronises on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .activations import Activation
from .block_sparse import BlockSparse, Columns, new_weight, values_shape
from .launch import (
    StackedWeight,
    check_combine,
    check_dense,
    check_device,
    check_down_bias,
    check_same,
    check_sparse,
    fold_halves,
    stack_activated,
    stack_bias,
    stack_weight,
)
from .reference import Order
from .topology import Topology

_STRIP = 256
"""Rows that elementwise work takes at once: what one operation writes is still in the cache when the next one reads it."""


def sdd(
    x: Tensor,
    w: Tensor,
    topology: Topology,
    *,
    order: Order = "tokens",
    columns: Columns | None = None,
    bias: Tensor | None = None,
) -> BlockSparse:
    """s_e = x_e w_e^T (+ bias_e); see `triton.sdd.sdd`."""
    weight = stack_weight("sdd", w, topology, columns)
    check_dense("sdd", x, topology, order, w)
    stacked_bias, _ = stack_bias("sdd", bias, weight)
    weight = fold_halves(weight)
    s = _empty(x, topology, weight.sparse_columns)
    for expert, rows, block in _blocks(s):
        _project(_rows_of(x, topology, rows, order), weight, stacked_bias, expert, block)
    return s


def sdd_activation(
    x: Tensor,
    w: Tensor,
    topology: Topology,
    activation: Activation,
    *,
    columns: Columns | None = None,
    bias: Tensor | None = None,
    save_pre: bool = True,
) -> tuple[BlockSparse | None, BlockSparse]:
    """(pre-activation or None, activation of it); see `triton.sdd.sdd_activation`."""
    weight, hidden_columns = stack_activated("sdd", w, topology, columns, activation)
    check_dense("sdd", x, topology, "tokens", w)
    stacked_bias, _ = stack_bias("sdd", bias, weight)
    weight = fold_halves(weight)
    sparse_columns = weight.sparse_columns
    act = _empty(x, topology, hidden_columns)
    pre = _empty(x, topology, sparse_columns) if save_pre else None
    pre_blocks = None if pre is None else _blocks(pre)
    for expert, rows, block in _blocks(act):
        if pre_blocks is None:
            pre_block = x.new_empty(block.shape[0], sparse_columns.widths[expert])
        else:
            _, _, pre_block = next(pre_blocks)
        _project(_rows_of(x, topology, rows, "tokens"), weight, stacked_bias, expert, pre_block)
        for strip, pre_strip in zip(block.split(_STRIP), pre_block.split(_STRIP), strict=True):
            strip.copy_(activation(pre_strip))
    return pre, act


def dsd(s: BlockSparse, w: Tensor, *, order: Order = "rows", bias: Tensor | None = None) -> Tensor:
    """y_e = s_e w_e (+ bias_e), or the transposed product; see `triton.dsd.dsd`."""
    if s.transposed:
        return dsd_transposed(s.T, w, order=order)
    weight = fold_halves(stack_weight("dsd", w, s.topology, None if w.ndim > 2 else s.columns))
    check_sparse("dsd", s, weight.sparse_columns)
    check_same("dsd", "the sparse operand", s.values, "the weight", w)
    check_device("dsd", w, s.topology)
    check_down_bias("dsd", bias, weight)
    y = w.new_empty(s.topology.num_slots, weight.hidden_size)
    for expert, (first, last), block in _blocks(s):
        out, halves = y[first:last], _expert_weight(weight, expert)
        width = halves[0].shape[0]
        torch.mm(block[:, :width], halves[0], out=out)
        for half in halves[1:]:
            out.addmm_(block[:, width:], half)
        if bias is not None:
            out += bias[expert]
    return y


def dsd_transposed(s: BlockSparse, x: Tensor, *, order: Order = "rows", like: Tensor | None = None) -> Tensor:
    """w_e = s_e^T x_e; see `triton.dsd_transposed.dsd_transposed`."""
    out = new_weight(x, s.columns, x.shape[1]) if like is None else torch.empty_like(like)
    check_dense("dsd", x, s.topology, order, out)
    weight = fold_halves(stack_weight("dsd", out, s.topology, s.columns if out.ndim == 2 else None))
    check_sparse("dsd", s, weight.sparse_columns)
    offsets = s.topology.offsets.tolist()
    for expert, (first, last) in enumerate(pairwise(offsets)):
        if first == last:
            for half in _expert_weight(weight, expert):
                half.zero_()
    for expert, rows, block in _blocks(s):
        x_e = _rows_of(x, s.topology, rows, order)
        for half, columns in zip(_expert_weight(weight, expert), block.chunk(weight.halves, dim=1), strict=True):
            torch.mm(columns.T, x_e, out=half)
    return out


def combine(y: Tensor, topology: Topology, weights: Tensor | None = None) -> Tensor:
    """out[t] = sum over the slots of token t of weights[slot] * y[row of slot]; see `triton.combine.combine`."""
    check_combine(y, topology, weights)
    return sum_slots(y, topology.rows, topology, weights)


def sum_slots(y: Tensor, rows: Tensor, topology: Topology, weights: Tensor | None = None) -> Tensor:
    """`combine` of rows that lie elsewhere; see `triton.combine.sum_slots`."""
    if topology.num_slots == 0 or y.numel() == 0:
        return y.new_zeros(topology.num_tokens, y.shape[1])
    dtype = torch.promote_types(y.dtype, torch.float32)
    offsets = topology.token_offsets
    weights = torch.ones_like(rows, dtype=dtype) if weights is None else weights.reshape(-1).to(dtype)
    if topology.token_slots is not None:
        rows, weights = rows[topology.token_slots], weights[topology.token_slots]
    if offsets is None:
        last = topology.num_slots + 1
        offsets = torch.arange(0, last, topology.slots_per_token, dtype=torch.int32, device=y.device)
    wide = y.to(dtype)
    dropped = rows < 0
    if dropped.any():  # they take a row of zeros, whatever lies in theirs or in their weights
        wide = F.pad(wide, (0, 0, 0, 1))
        rows, weights = torch.where(dropped, y.shape[0], rows), torch.where(dropped, 0, weights)
    out = F.embedding_bag(rows, wide, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True)
    return out.to(y.dtype)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x by index, zeros where it is -1; see `triton.padding.gather_rows`."""
    if x.numel() == 0:
        return x.new_zeros(index.shape[0], x.shape[1])
    return x[index.clamp(min=0)].masked_fill_((index < 0)[:, None], 0)


def scaled_activation(pre: Tensor, activation: Activation, weights: Tensor) -> Tensor:
    """`activation` of each row, times its weight; see `triton.scaled_activation.scaled_activation`."""
    dtype = torch.promote_types(pre.dtype, torch.float32)
    return (activation(pre.to(dtype)) * weights[:, None].to(dtype)).to(pre.dtype)


def activation_backward(
    grad: BlockSparse,
    pre: BlockSparse,
    activation: Activation,
    weights: Tensor | None = None,
    bias_dot: Tensor | None = None,
) -> tuple[BlockSparse, BlockSparse, Tensor | None]:
    """Gradient of `pre`, scaled hidden activation (over `grad`), gradient of the routing weights; see
    `triton.activation_backward.activation_backward`."""
    topology = grad.topology
    dtype = torch.promote_types(grad.dtype, torch.float32)
    grad_pre = BlockSparse(torch.empty_like(pre.values), topology, pre.columns)
    slots = topology.slots.long()
    scales = torch.ones_like(slots, dtype=dtype) if weights is None else weights.reshape(-1)[slots].to(dtype)
    dots = torch.zeros_like(scales)
    for rows, (strip, pre_strip, grad_pre_strip) in _strips(grad, pre, grad_pre):
        wide, scale = strip.to(dtype), scales[rows, None]  # wide may be the strip itself, which is overwritten in the end
        gate, *up = activation.split(pre_strip.to(dtype))
        grad_gate, *grad_up = activation.split(grad_pre_strip)
        value = activation.of_gate(gate)
        factor = activation.of_up(up[0]) if up else None
        hidden = value if factor is None else value * factor
        if weights is not None:
            dot = torch.linalg.vecdot(wide, hidden)
            dots[rows] = dot if bias_dot is None else dot + bias_dot[rows]
        wide *= scale
        if factor is not None:
            torch.mul(wide, value, out=grad_up[0])
            if (cut := activation.up_is_cut(up[0])) is not None:
                grad_up[0].masked_fill_(cut, 0)
            wide *= factor
        grad_gate.copy_(activation.of_gate_backward(wide, gate))
        torch.mul(hidden, scale, out=strip)
    zero_tail(grad_pre.values, *grad_pre.end())
    if weights is None:
        return grad_pre, grad, None
    grad_weights = torch.empty_like(weights, memory_format=torch.contiguous_format)
    grad_weights.view(-1)[slots] = dots.to(weights.dtype)
    return grad_pre, grad, grad_weights


def expert_sum(s: BlockSparse) -> Tensor:
    """Sum of each expert's rows of s; see `triton.bias.expert_sum`."""
    columns = s.columns
    sums = s.values.new_zeros(columns.total)
    per_expert = sums.split(columns.widths)
    for expert, _, block in _blocks(s):
        per_expert[expert].copy_(_sum_rows(block))
    return sums.view(columns.num_experts, columns.widest) if columns.are_equal else sums


def expert_sum_tokens(x: Tensor, topology: Topology, weights: Tensor | None = None) -> Tensor:
    """Sum over each expert's rows of weights[slot] * x[token]; see `triton.bias.expert_sum_tokens`."""
    out = x.new_zeros(topology.num_experts, x.shape[1])
    for expert, first, last in _row_ranges(topology):
        rows = _rows_of(x, topology, (first, last), "tokens")
        if weights is not None:
            scale = weights.reshape(-1)[topology.slots[first:last].long(), None]
            rows = rows * scale.to(torch.promote_types(x.dtype, torch.float32))
        out[expert] = _sum_rows(rows)
    return out


def bias_dot(x: Tensor, bias: Tensor, topology: Topology) -> Tensor:
    """<x[token of row], bias[expert of row]>; see `triton.bias.bias_dot`."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros(topology.num_slots, dtype=dtype, device=x.device)
    for expert, first, last in _row_ranges(topology):
        out[first:last] = _rows_of(x, topology, (first, last), "tokens").to(dtype) @ bias[expert].to(dtype)
    return out


def zero_tail(values: Tensor, ends: Tensor, scale: int = 1) -> Tensor:
    """Write zeros into contiguous `values` from element `ends[-1] * scale` on; see `triton.zero_tail.zero_tail`."""
    if values.numel():
        values.view(-1)[int(ends[-1]) * scale :] = 0
    return values


def _row_ranges(topology: Topology) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, last row + 1) of every expert that has rows."""
    offsets = topology.offsets.tolist()
    for expert, (first, last) in enumerate(pairwise(offsets)):
        if first < last:
            yield expert, first, last


def _blocks(s: BlockSparse) -> Iterator[tuple[int, tuple[int, int], Tensor]]:
    """(expert, its range of rows, its values as a view [n_e, N_e]) of every expert that has rows."""
    start = 0
    for expert, first, last in _row_ranges(s.topology):
        width = s.columns.widths[expert]
        if s.values.ndim == 2:
            block = s.values[first:last]
        else:
            block = s.values[start : start + (last - first) * width].unflatten(0, (last - first, width))
            start += (last - first) * width
        yield expert, (first, last), block


def _strips(*matrices: BlockSparse) -> Iterator[tuple[slice, list[Tensor]]]:
    """(rows, values of every matrix in them) by at most `_STRIP` rows of one expert; the matrices share a topology."""
    for blocks in zip(*map(_blocks, matrices), strict=True):
        _, (first, last), _ = blocks[0]
        for start in range(first, last, _STRIP):
            stop = min(start + _STRIP, last)
            yield slice(start, stop), [block[start - first : stop - first] for _, _, block in blocks]


def _empty(x: Tensor, topology: Topology, columns: Columns) -> BlockSparse:
    return BlockSparse(x.new_empty(values_shape(topology.num_slots, columns)), topology, columns)


def replay(function: Callable, *args: Any) -> Any:
    """`function(*args)`: what runs here depends on values, so there is nothing to keep."""
    return function(*args)


def _rows_of(x: Tensor, topology: Topology, rows: tuple[int, int], order: Order) -> Tensor:
    first, last = rows
    return x.index_select(0, topology.tokens[first:last]) if order == "tokens" else x[first:last]


def _expert_weight(weight: StackedWeight, expert: int) -> list[Tensor]:
    """The halves [N_e, H] of an expert's weight."""
    if weight.data.ndim == 4:
        return list(weight.data[expert].unbind())
    first, last = (weight.halves * column for column in weight.columns.offsets()[expert : expert + 2])
    return list(weight.data[first:last].chunk(weight.halves))


def _project(x: Tensor, weight: StackedWeight, bias: Tensor | None, expert: int, out: Tensor) -> None:
    """out [n_e, halves * N_e] = x [n_e, H] times the expert's weight transposed, plus its bias."""
    halves = _expert_weight(weight, expert)
    for half, columns in zip(halves, out.chunk(len(halves), dim=1), strict=True):
        torch.mm(x, half.T, out=columns)
    if bias is not None:
        if bias.ndim == 1:
            first, last = (weight.halves * column for column in weight.columns.offsets()[expert : expert + 2])
            out += bias[first:last]
        else:
            out += bias[expert].reshape(-1)


def _sum_rows(x: Tensor) -> Tensor:
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))
