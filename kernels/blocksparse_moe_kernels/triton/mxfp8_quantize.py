"""Quantisation to MXFP8: `mxfp8.quantize` and `mxfp8.quantize_columns`, each in one pass over memory.

    rowwise     blocks along an axis: x [.., R, K] -> codes [.., R, K], scales [.., R, K / 32]
    columnwise  blocks along the rows of each expert, gathered on the way: x [T or M, N] -> codes [M, N], scales [blocks, N]

The blocks of rows are the row tiles of height 32 of the topology.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..config import ceil_div, next_power_of_2
from ..mxfp8 import BLOCK as BLOCK_SIZE
from ..mxfp8 import MXFP8, check_quantizable
from ..reference import Order
from ..topology import Topology
from .launcher import launch
from .mxfp8_numbers import BLOCK, block_scale, encode, has_instructions, inverse_factor, widened
from .tiles import along, row_tile


@triton.jit
def _mxfp8_quantize_kernel(
    X, Codes, Scales,                                      # [B, R, K], [B, R, K], [B, R, K / 32]
    stride_xb, stride_xr, stride_xk, stride_cb, stride_cr, stride_ck, stride_sb, stride_sr, stride_sk,
    R, K,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    offs_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (offs_r < R)[:, None] & (offs_k < K)[None, :]
    x_ptrs = X + batch * stride_xb + along(offs_r, stride_xr)[:, None] + along(offs_k, stride_xk)[None, :]
    x = widened(tl.load(x_ptrs, mask=mask, other=0.0))
    blocks = tl.reshape(x, (BLOCK_R, BLOCK_K // BLOCK, BLOCK))
    scale = block_scale(blocks, 2)
    codes = encode(tl.reshape(blocks * inverse_factor(scale)[:, :, None], (BLOCK_R, BLOCK_K)), HARDWARE)
    code_ptrs = Codes + batch * stride_cb + along(offs_r, stride_cr)[:, None] + along(offs_k, stride_ck)[None, :]
    tl.store(code_ptrs, codes, mask=mask)
    offs_s = tl.program_id(1) * (BLOCK_K // BLOCK) + tl.arange(0, BLOCK_K // BLOCK)
    scale_ptrs = Scales + batch * stride_sb + along(offs_r, stride_sr)[:, None] + along(offs_s, stride_sk)[None, :]
    tl.store(scale_ptrs, scale.to(tl.uint8), mask=(offs_r < R)[:, None] & (offs_s < tl.cdiv(K, BLOCK))[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def _mxfp8_quantize_columns_kernel(
    X, Codes, Scales, Tokens, Tiles,                       # [T or M, N], [M, N], [tiles, N], [M], [3, tiles]
    stride_xt, stride_xn, num_tiles, N,
    BLOCK_N: tl.constexpr, GATHER: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    expert, first_row, length = row_tile(Tiles, num_tiles, tile)
    if expert < 0:
        return
    offs_m = tl.arange(0, BLOCK)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < length, offs_n < N
    rows = first_row + offs_m
    if GATHER:
        rows = tl.load(Tokens + rows, mask=mask_m, other=0)
    mask = mask_m[:, None] & mask_n[None, :]
    x_ptrs = X + along(rows, stride_xt)[:, None] + along(offs_n, stride_xn)[None, :]
    x = widened(tl.load(x_ptrs, mask=mask, other=0.0))
    scale = block_scale(x, 0)
    codes = encode(x * inverse_factor(scale)[None, :], HARDWARE)
    tl.store(Codes + first_row.to(tl.int64) * N + offs_m[:, None] * N + offs_n[None, :], codes, mask=mask)
    tl.store(Scales + tile.to(tl.int64) * N + offs_n, scale.to(tl.uint8), mask=mask_n)


def quantize(x: Tensor, axis: int = -1) -> MXFP8:
    """MXFP8 of x (fp16, bf16 or fp32, two axes or more, any strides) in blocks along `axis`; see `mxfp8.quantize`."""
    check_quantizable("quantize", x, axis)
    shape = list(x.shape)
    shape[axis] = ceil_div(x.shape[axis], BLOCK_SIZE)
    codes, scales = (torch.empty(size, dtype=torch.uint8, device=x.device) for size in (x.shape, shape))
    result = MXFP8(codes.view(torch.float8_e4m3fn), scales, axis, x.dtype)
    if codes.numel() == 0:
        return result
    tensors = [x, codes, scales]
    if axis == -2:
        tensors = [tensor.mT for tensor in tensors]
    # Codes and scales are new, so that theirs are views.
    tensors = [tensor.unsqueeze(0) if x.ndim == 2 else tensor.flatten(0, -3) for tensor in tensors]
    batch, rows, size = tensors[0].shape
    block_r, block_k = (32, 128) if axis == -1 else (128, 32)
    block_r, block_k = min(block_r, next_power_of_2(rows)), min(block_k, BLOCK_SIZE * next_power_of_2(shape[axis]))
    strides = [stride for tensor in tensors for stride in tensor.stride()]
    launch(
        _mxfp8_quantize_kernel, x.device, (ceil_div(rows, block_r), ceil_div(size, block_k), batch),
        *tensors, *strides, rows, size,
        BLOCK_R=block_r, BLOCK_K=block_k, HARDWARE=has_instructions(x.device),
    )  # fmt: skip
    return result


def quantize_columns(x: Tensor, topology: Topology, *, order: Order = "rows") -> MXFP8:
    """MXFP8 of the rows of `topology`, in blocks of rows of one expert; see `mxfp8.quantize_columns`."""
    check_quantizable("quantize_columns", x, -2, topology, order)
    schedule = topology.schedule(BLOCK_SIZE)
    width = x.shape[1]
    codes = torch.empty(topology.num_slots, width, dtype=torch.uint8, device=x.device)
    scales = torch.empty(schedule.capacity, width, dtype=torch.uint8, device=x.device)
    if scales.numel():
        block_n = min(128, next_power_of_2(width))
        launch(
            _mxfp8_quantize_columns_kernel, x.device, (schedule.capacity, ceil_div(width, block_n)),
            x, codes, scales, topology.tokens, schedule.tiles, *x.stride(), schedule.capacity, width,
            BLOCK_N=block_n, GATHER=order == "tokens", HARDWARE=has_instructions(x.device),
        )  # fmt: skip
    return MXFP8(codes.view(torch.float8_e4m3fn), scales, -2, x.dtype, topology)
