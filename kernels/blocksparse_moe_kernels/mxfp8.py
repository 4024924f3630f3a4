"""MXFP8: numbers in E4M3, of which every 32 along one axis share a scale, a power of two (E8M0).

    value = code * 2^(scale - 127)

A code has 4 bits of exponent and 3 of mantissa; the largest is 448. The scale of a block is the least power of two with which
nothing in the block exceeds that (but for numbers one ulp above 448 * 2^-127, which are saturated). The axis is the
contraction of the product that the numbers are for, so a matrix in three products needs two copies: *rowwise* along its
columns, and *columnwise* along its rows. Each is made from the numbers in high precision, and never from the other.

Format: OCP Microscaling Formats v1.0, arXiv:2310.10537. Scales are rounded up, as Transformer Engine does (NVIDIA, recipes for
MXFP8, arXiv:2506.08027); the rule of the OCP specification rounds down, and saturates.

Runs everywhere; `triton/mxfp8_quantize.py` is the same in Triton. Oracle: reference.mxfp8_quantize.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .config import ceil_div
from .launch import check_type
from .reference import Order
from .topology import Topology

BLOCK = 32
"""Numbers that share a scale; the last block of an axis may have fewer."""

LARGEST = 448.0
"""Largest E4M3 number."""

BIAS = 127
"""Scale of the factor one."""

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""What can be quantised."""


@dataclass(frozen=True, eq=False, repr=False)
class MXFP8:
    """A tensor in MXFP8; made by `quantize` and `quantize_columns`.

    Attributes:
        codes: float8_e4m3fn, in the shape of what was quantised.
        scales: uint8, in that shape but for `axis`, where there is one for each block.
        axis: along which blocks lie, counted from the end: -1 or -2.
        dtype: of what was quantised, and of the results of products.
        topology: blocks along rows (columns of `mT`) begin anew at the first row of each expert. Block b is then row tile b of
            `topology.schedule(BLOCK)`. None: they begin at the first row only.
    """

    codes: Tensor
    scales: Tensor
    axis: int
    dtype: torch.dtype
    topology: Topology | None = None

    def __repr__(self) -> str:
        return f"MXFP8({list(self.shape)}, blocks along axis {self.axis}, {self.dtype}, {self.device})"

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    @property
    def mT(self) -> MXFP8:
        """A view with the last two axes exchanged."""
        return MXFP8(self.codes.mT, self.scales.mT, -3 - self.axis, self.dtype, self.topology)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The numbers, exactly wherever `dtype` (that of what was quantised, unless given) can hold them: fp32 can, but for
        some below 2^-126 and, above 3.4e38, what large numbers and infinities are rounded to, which becomes infinite. Rows that
        a topology has dropped are zero."""
        if self.topology is not None and self.axis == -1:
            return self.mT.dequantize(dtype).mT
        dtype = self.dtype if dtype is None else dtype
        wide = torch.promote_types(dtype, torch.float32)
        factors = scale_values(self.scales).to(wide)
        if self.topology is None:
            spread = factors.repeat_interleave(BLOCK, self.axis).narrow(self.axis, 0, self.shape[self.axis])
            return (self.codes.to(wide) * spread).to(dtype)
        row = torch.arange(self.shape[0], device=self.device)
        kept = (row < self.topology.num_rows)[:, None]
        block = row_blocks(self.topology).clamp(max=max(0, factors.shape[0] - 1))
        return torch.where(kept, self.codes.to(wide) * factors[block], 0).to(dtype)


def quantize(x: Tensor, axis: int = -1) -> MXFP8:
    """MXFP8 of `x`, in blocks along `axis`.

    Args:
        x: fp64, fp32, fp16 or bf16, at least two axes, any strides.
        axis: -1 or -2.
    Raises:
        TypeError: x is no tensor, or of another dtype; ValueError: fewer axes, or another axis.
    A NaN makes its whole block NaN; an infinity becomes the largest number that there is, and leaves little of its block.
    """
    check_quantizable("quantize", x, axis)
    size = x.shape[axis]
    count = ceil_div(size, BLOCK)
    wide = torch.nn.functional.pad(x.movedim(axis, -1).float(), (0, count * BLOCK - size)).unflatten(-1, (count, BLOCK))
    codes, scales = _quantize_blocks(wide, -1)
    codes = codes.flatten(-2).narrow(-1, 0, size).movedim(-1, axis)
    return MXFP8(codes.contiguous(), scales.movedim(-1, axis).contiguous(), axis, x.dtype)


def quantize_columns(x: Tensor, topology: Topology, *, order: Order = "rows") -> MXFP8:
    """MXFP8 of the rows of `topology`, in blocks of rows of one expert: what a product that sums over rows takes.

    Args:
        x: [M, N] with order="rows"; [T, N] with order="tokens", of which the rows are gathered.
        topology: M rows over E experts; where its blocks lie is found out on the device.
    Returns:
        codes [M, N] in row order, scales [blocks, N]; those of dropped rows and of unused blocks mean nothing.
    """
    check_quantizable("quantize_columns", x, -2, topology, order)
    schedule = topology.schedule(BLOCK)
    within = torch.arange(BLOCK, device=x.device)
    used = within < schedule.lengths[:, None]
    row = torch.where(used, schedule.first_rows[:, None] + within, 0)
    source = topology.tokens[row] if order == "tokens" else row
    blocks = torch.where(used[:, :, None], x[source.long()].float(), 0)
    codes, scales = _quantize_blocks(blocks, 1)
    rows = codes.new_zeros(topology.num_slots + 1, x.shape[1]).view(torch.uint8)  # the last one is of no use
    rows[torch.where(used, row, topology.num_slots)] = codes.view(torch.uint8)
    return MXFP8(rows[:-1].view(codes.dtype), scales, -2, x.dtype, topology)


def check_quantizable(operation: str, x: Tensor, axis: int, topology: Topology | None = None, order: Order = "rows") -> None:
    """ValueError or TypeError unless `x` can be quantised along `axis`, or by the rows of `topology`."""
    check_type(operation, "x", x, Tensor, "Make one with torch.as_tensor.")
    if x.dtype not in DTYPES:
        raise TypeError(
            f"{operation}: x must be fp64, fp32, fp16 or bf16; got {x.dtype}. Convert it, as by .float(); numbers that have "
            "scales already must be multiplied by them first."
        )
    if x.ndim < 2 or axis not in (-1, -2):
        raise ValueError(f"{operation}: x must have two axes or more and axis be -1 or -2; got {list(x.shape)} and {axis}.")
    if topology is None:
        return
    if order not in ("tokens", "rows"):
        raise ValueError(f'{operation}: order must be "tokens" or "rows"; got {order!r}.')
    rows = topology.num_tokens if order == "tokens" else topology.num_slots
    if x.ndim != 2 or x.shape[0] != rows:
        raise ValueError(
            f'{operation}: with order="{order}" x must be [{rows}, N]; got {list(x.shape)}. '
            "Was the topology built for other tokens?"
        )


def block_offsets(topology: Topology) -> Tensor:
    """[E + 1] int32 on the device: first block of each expert's rows."""
    ends = ((topology.counts + (BLOCK - 1)) // BLOCK).cumsum(0, dtype=torch.int32)
    return torch.cat((ends.new_zeros(1), ends))


def row_blocks(topology: Topology) -> Tensor:
    """[M] int64, the block of each row; of no meaning for dropped rows."""
    expert = topology.row_experts().clamp(max=topology.num_experts - 1)
    row = torch.arange(topology.num_slots, device=topology.device)
    return block_offsets(topology)[expert] + (row - topology.offsets[expert]) // BLOCK


def scale_values(scales: Tensor) -> Tensor:
    """2^(scale - 127) in fp32; NaN of 255. Zero is 2^-127, which fp32 has among its subnormal numbers."""
    bits = scales.int() << 23
    bits = torch.where(scales == 0, 1 << 22, bits)
    return torch.where(scales == 255, 0x7FC00000, bits).int().view(torch.float32)


def _quantize_blocks(blocks: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Codes in the shape of fp32 `blocks`, and the scales without `axis`, along which each block lies."""
    largest = blocks.abs().amax(axis)
    bits = (largest * (1 / LARGEST)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    least = torch.where(exponent == 0, 1 << 22, 0)  # among subnormal numbers 2^-127 is the power of two of scale 0
    scales = (exponent + (mantissa > least)).clamp(max=254)
    scales = torch.where(largest.isnan(), 255, scales)
    # 2^(127 - scale); the smallest two are subnormal.
    bits = torch.where(scales < 254, (254 - scales) << 23, torch.where(scales == 254, 1 << 22, 1 << 21))
    inverse = bits.int().view(torch.float32)
    scaled = (blocks * inverse.unsqueeze(axis)).clamp(-LARGEST, LARGEST)
    codes = torch.where(scaled.isnan(), torch.nan, scaled).to(torch.float8_e4m3fn)
    return codes, scales.to(torch.uint8)
