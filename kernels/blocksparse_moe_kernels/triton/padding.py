"""Rows in the order of an index, with zeros where it has none, and back.

    gather_rows     out[i] = x[index[i]], 0 where index[i] is -1              x [R, H] -> [N, H]
    sum_slots       out[t] = sum over the slots of token t of y[rows[slot]]   y [P, H] -> [T, H], see combine.py

With the tables of a `PaddedRows` each is the gradient of the other.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..config import ceil_div, next_power_of_2
from .launcher import launch


@triton.jit
def _gather_rows_kernel(
    X, Index, Out,                          # [R, H], [N], [N, H]
    stride_xr, stride_xh, H,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < H
    source = tl.load(Index + row)
    x_ptrs = X + source.to(tl.int64) * stride_xr + offs_h.to(tl.int64) * stride_xh
    x = tl.load(x_ptrs, mask=mask_h & (source >= 0), other=0.0)
    tl.store(Out + row.to(tl.int64) * H + offs_h, x, mask=mask_h)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x by index.

    Args:
        x: [R, H], any strides and dtype.
        index: [N] int32; -1 gives a row of zeros.
    Returns:
        [N, H] in the dtype of x.
    """
    out = x.new_empty(index.shape[0], x.shape[1])
    if out.numel():
        block_h = min(1024, next_power_of_2(x.shape[1]))
        launch(
            _gather_rows_kernel, x.device, (index.shape[0], ceil_div(x.shape[1], block_h)),
            x, index, out, *x.stride(), x.shape[1], BLOCK_H=block_h,
        )  # fmt: skip
    return out
