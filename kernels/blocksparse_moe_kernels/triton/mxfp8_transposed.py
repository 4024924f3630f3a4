"""Transposed DSD of operands in MXFP8: the weight gradients.

    w_e = s_e^T x_e                     sum over the rows of expert e; s [M, N], x [M, H], w [E, N, H]

Both operands are in row order and have their blocks along the rows of each expert. An expert without rows gets exactly zero.
One program per tile of w and no atomics, so results are bitwise repeatable.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..config import SHARED_MEMORY_KB, GemmConfig, architecture_of, ceil_div, choose_block_k
from ..mxfp8 import BLOCK as BLOCK_SIZE
from ..mxfp8 import MXFP8, block_offsets
from ..mxfp8_products import check_transposed_product
from .launcher import launch
from .mxfp8_numbers import BLOCK, NEUTRAL, dot_mxfp8, has_instructions
from .tiles import along, grouped_order, wrapped


@triton.jit
def _mxfp8_transposed_kernel(
    S, SScales, X, XScales, Out,                           # [M, N], [blocks, N], [M, H], [blocks, H], [E, N, H]
    BySize, Offsets, BlockOffsets,                         # [E], [E + 1], [E + 1]
    stride_oe, stride_on, stride_oh,
    H, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    expert = tl.load(BySize + tl.program_id(1))
    pid_m, pid_n = grouped_order(tl.program_id(0), tl.cdiv(N, BLOCK_M), tl.cdiv(H, BLOCK_N), GROUP)
    first_row = tl.load(Offsets + expert)
    num_rows = tl.load(Offsets + expert + 1) - first_row
    first_block = tl.load(BlockOffsets + expert)

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    offs_b = tl.arange(0, BLOCK_K // BLOCK)
    s_column = pid_m * BLOCK_M + wrapped(offs_m, N - pid_m * BLOCK_M)
    x_column = pid_n * BLOCK_N + wrapped(offs_n, H - pid_n * BLOCK_N)
    s_ptrs = S + first_row.to(tl.int64) * N + along(offs_k, N)[None, :] + s_column[:, None]
    x_ptrs = X + first_row.to(tl.int64) * H + along(offs_k, H)[:, None] + x_column[None, :]
    ss_ptrs = SScales + first_block.to(tl.int64) * N + along(offs_b, N)[None, :] + s_column[:, None]
    xs_ptrs = XScales + first_block.to(tl.int64) * H + along(offs_b, H)[None, :] + x_column[:, None]

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, num_rows, BLOCK_K):
        mask_k = offs_k < num_rows - k
        mask_b = offs_b < tl.cdiv(num_rows - k, BLOCK)
        s = tl.load(s_ptrs, mask=mask_k[None, :], other=0)
        x = tl.load(x_ptrs, mask=mask_k[:, None], other=0)
        s_scales = tl.load(ss_ptrs, mask=mask_b[None, :], other=NEUTRAL)
        x_scales = tl.load(xs_ptrs, mask=mask_b[None, :], other=NEUTRAL)
        acc = dot_mxfp8(s, s_scales, x, x_scales, acc, HARDWARE)
        s_ptrs += tl.cast(N, tl.int64) * BLOCK_K
        x_ptrs += tl.cast(H, tl.int64) * BLOCK_K
        ss_ptrs += tl.cast(N, tl.int64) * (BLOCK_K // BLOCK)
        xs_ptrs += tl.cast(H, tl.int64) * (BLOCK_K // BLOCK)

    offs_m += pid_m * BLOCK_M
    offs_n += pid_n * BLOCK_N
    out_ptrs = Out + expert.to(tl.int64) * stride_oe + along(offs_m, stride_on)[:, None] + along(offs_n, stride_oh)[None, :]
    tl.store(out_ptrs, acc.to(Out.dtype.element_ty), mask=(offs_m < N)[:, None] & (offs_n < H)[None, :])


def column_product_tile(block_k: int, architecture: int) -> GemmConfig:
    """Tile of the transposed product: block_m over N, block_n over H, block_k over rows."""
    stages = 2 if SHARED_MEMORY_KB[architecture] < 160 else 3
    return GemmConfig(128, 128, max(BLOCK_SIZE, block_k), 8, stages)


def dsd_transposed(s: MXFP8, x: MXFP8, *, like: Tensor | None = None, config: GemmConfig | None = None) -> Tensor:
    """Sum over each expert's rows: w_e = s_e^T x_e.

    Args:
        s: [M, N] and x: [M, H], both from `quantize_columns` with one topology.
        like: weight whose shape and strides the result takes, [E, N, H] or [E, 2, N / 2, H].
        config: tile (block_m over N, block_n over H, block_k over rows); chosen from the sizes unless given.
    Returns:
        [E, N, H] or as `like`, in the dtype that x was quantised from; fp32 accumulation.
    Raises:
        ValueError: operands of different topologies, or of other blocks.
    Oracle: reference.dsd of the dequantised operands, the first one transposed.
    """
    topology = check_transposed_product(s, x, like)
    E, N, H = topology.num_experts, s.shape[1], x.shape[1]
    out = torch.empty(E, N, H, dtype=x.dtype, device=x.device) if like is None else torch.empty_like(like)
    stacked = out if out.ndim == 3 else out.flatten(1, 2)  # a copy, if its halves lie apart
    if out.numel():
        block_k = choose_block_k(topology.num_slots, E)
        config = config or column_product_tile(block_k, architecture_of(x.device))
        launch(
            _mxfp8_transposed_kernel, x.device, (ceil_div(N, config.block_m) * ceil_div(H, config.block_n), E),
            s.codes.view(torch.uint8), s.scales, x.codes.view(torch.uint8), x.scales, stacked,
            topology.experts_by_size(), topology.offsets, block_offsets(topology), *stacked.stride(), H, N,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP=8,
            HARDWARE=has_instructions(x.device), num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return out if out.ndim == 3 or stacked.data_ptr() == out.data_ptr() else out.copy_(stacked.view(out.shape))
