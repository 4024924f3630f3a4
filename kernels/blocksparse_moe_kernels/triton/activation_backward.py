"""Backward of the activation, the routing weight's gradient and the scaled hidden activation, in one pass over the rows.

    a = activation(pre)                     recomputed from the saved pre-activation
    dp[slot] = <dA', a>                     dA' = dO w_down^T, not yet scaled by the routing weight p
    scaled = p a                            the operand of the down-projection's gradient; written over dA'
    dpre = p dA' activation'(pre)

Memory-bound; fp32 inside. The use of <dA', a> in place of a stored down-projection output is SonicMoE's, arXiv:2512.14080.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activations import Activation
from ..block_sparse import BlockSparse
from ..config import next_power_of_2
from ..launch import ColumnTables
from .activation_functions import activation_value_and_derivatives, constants
from .launcher import launch
from .tiles import value_rows
from .zero_tail import zero_tail


@triton.jit
def _activation_backward_kernel(
    Grad, Pre, Weights, BiasDot, GradPre, GradWeights,     # [M, N], [M, HALVES * N], [M], [M], as Pre, as Weights
    Slots, Offsets, ColumnOffsets, BlockOffsets,           # [M], [E + 1] each
    stride_w, num_experts, N,
    BLOCK_N: tl.constexpr, LOG_EXPERTS: tl.constexpr, HALVES: tl.constexpr, VARIED: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, FUNCTION: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr,
    GATE_LIMIT: tl.constexpr, UP_LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(Slots + row).to(tl.int64)
    if row >= tl.load(Offsets + num_experts):
        if HAS_WEIGHTS:
            tl.store(GradWeights + slot, 0.0)
        if not VARIED:
            width = HALVES * N
            for n in range(0, width, BLOCK_N):
                offs_n = n + tl.arange(0, BLOCK_N)
                tl.store(GradPre + row.to(tl.int64) * width + offs_n, tl.zeros((BLOCK_N,), tl.float32), mask=offs_n < width)
        return
    expert = tl.zeros((), tl.int32)
    columns = N
    if VARIED:
        last = num_experts
        for _ in tl.static_range(LOG_EXPERTS):  # the last expert whose rows begin at or before this one
            middle = (expert + last) // 2
            before = tl.load(Offsets + middle) <= row
            expert = tl.where(before, middle, expert)
            last = tl.where(before, last, middle)
        columns = (tl.load(ColumnOffsets + expert + 1) - tl.load(ColumnOffsets + expert)).to(tl.int32)
    grad_offset, _ = value_rows(expert, row, columns, N, 1, Offsets, BlockOffsets, 1, VARIED)
    pre_offset, _ = value_rows(expert, row, columns, HALVES * N, 1, Offsets, BlockOffsets, HALVES, VARIED)
    Grad += grad_offset
    Pre += pre_offset
    GradPre += pre_offset
    weight = 1.0
    if HAS_WEIGHTS:
        weight = tl.load(Weights + slot * stride_w).to(tl.float32)

    dot = tl.zeros((BLOCK_N,), tl.float32)
    for n in range(0, columns, BLOCK_N):
        offs_n = n + tl.arange(0, BLOCK_N)
        mask = offs_n < columns
        grad = tl.load(Grad + offs_n, mask=mask, other=0.0).to(tl.float32)
        if INTERLEAVED:
            offs_pair = 2 * n + tl.arange(0, 2 * BLOCK_N)
            mask_pair = offs_pair < 2 * columns
            pair = tl.load(Pre + offs_pair, mask=mask_pair, other=0.0).to(tl.float32)
            gate, up = tl.split(tl.reshape(pair, (BLOCK_N, 2)))
        else:
            gate = tl.load(Pre + offs_n, mask=mask, other=0.0).to(tl.float32)
            up = gate
            if HALVES == 2:
                up = tl.load(Pre + columns + offs_n, mask=mask, other=0.0).to(tl.float32)
        hidden, by_gate, by_up = activation_value_and_derivatives(
            gate, up, HALVES == 2, FUNCTION, ALPHA, GATE_LIMIT, UP_LIMIT, UP_OFFSET
        )
        grad_gate = (weight * grad * by_gate).to(GradPre.dtype.element_ty)
        grad_up = (weight * grad * by_up).to(GradPre.dtype.element_ty)
        if INTERLEAVED:
            tl.store(GradPre + offs_pair, tl.interleave(grad_gate, grad_up), mask=mask_pair)
        else:
            tl.store(GradPre + offs_n, grad_gate, mask=mask)
            if HALVES == 2:
                tl.store(GradPre + columns + offs_n, grad_up, mask=mask)
        tl.store(Grad + offs_n, (weight * hidden).to(Grad.dtype.element_ty), mask=mask)
        dot += grad * hidden
    if HAS_WEIGHTS:
        total = tl.sum(dot, 0)
        if HAS_BIAS:
            total += tl.load(BiasDot + row)
        tl.store(GradWeights + slot, total.to(GradWeights.dtype.element_ty))


def activation_backward(
    grad: BlockSparse,
    pre: BlockSparse,
    activation: Activation,
    weights: Tensor | None = None,
    bias_dot: Tensor | None = None,
) -> tuple[BlockSparse, BlockSparse, Tensor | None]:
    """Gradients that pass through the activation.

    Args:
        grad: dA', values [M, F], contiguous; overwritten with the scaled hidden activation.
        pre: pre-activation, values [M, halves * F], contiguous.
        activation: what made the hidden activation from `pre`.
        weights: routing weights [T, K] or [M] by slot; 1 if not given.
        bias_dot: [M] fp32 in row order, <dO, down bias> of each row, added to the gradient of its weight.
    Returns:
        gradient of `pre` (zero where there are no rows), scaled hidden activation (in the memory of `grad`), gradient of
        `weights` in its shape and dtype (exactly zero for dropped slots; None without weights).
    """
    topology, columns = grad.topology, grad.columns
    grad_pre = torch.empty_like(pre.values)
    grad_weights = None if weights is None else torch.empty_like(weights, memory_format=torch.contiguous_format)
    if topology.num_slots:
        flat = None if weights is None else weights.reshape(-1)
        tables = ColumnTables.of(topology, columns)
        narrow = columns.widest < 2048  # measured on an H200: by 3 to 10 % the better tile there, equal or worse beyond
        launch(
            _activation_backward_kernel, pre.device, (topology.num_slots,),
            grad.values, pre.values, flat, bias_dot, grad_pre, grad_weights,
            topology.slots, topology.offsets, tables.column_offsets, tables.block_offsets,
            0 if flat is None else flat.stride(0), topology.num_experts, columns.widest,
            BLOCK_N=min(256 if narrow else 1024, next_power_of_2(columns.widest)), num_warps=2 if narrow else 4,
            LOG_EXPERTS=topology.num_experts.bit_length(), HALVES=activation.halves, VARIED=tables.varied,
            HAS_WEIGHTS=weights is not None, HAS_BIAS=bias_dot is not None, **constants(activation),
        )  # fmt: skip
        if tables.varied:
            zero_tail(grad_pre, tables.block_offsets, activation.halves)
    return BlockSparse(grad_pre, topology, pre.columns), grad, grad_weights
