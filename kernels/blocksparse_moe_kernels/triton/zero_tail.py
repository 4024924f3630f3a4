"""Zero what the kernels leave unwritten: the elements of a row-ordered buffer behind the last row that is kept."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..config import ceil_div, num_programs
from .launcher import launch


@triton.jit(do_not_specialize=["size", "last", "scale"])
def _zero_tail_kernel(Values, Ends, size, last, scale, BLOCK: tl.constexpr):
    start = tl.load(Ends + last).to(tl.int64) * scale
    for block in range(start // BLOCK + tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        offs = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(Values + offs, tl.zeros((BLOCK,), Values.dtype.element_ty), mask=(offs >= start) & (offs < size))


def zero_tail(values: Tensor, ends: Tensor, scale: int = 1) -> Tensor:
    """Write zeros into contiguous `values` from element `ends[-1] * scale` on, ends 1-dim on the device. Returns `values`."""
    block = 4096
    if values.numel():
        programs = min(ceil_div(values.numel(), block), num_programs(values.device))
        last = ends.numel() - 1
        launch(_zero_tail_kernel, values.device, (programs,), values, ends, values.numel(), last, scale, BLOCK=block)
    return values
