"""Paragraphs that the kernels share: where a tile lies, and how two tiles are multiplied.

The stacked weight of a product is seen as [E, HALVES, N, H]: HALVES is 2 for the [gate | up] pair of a gated MLP (so that
gate and up may lie anywhere, interleaved too) and 1 otherwise. Offsets that can pass 2**31 are 64-bit scalars.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, acc, zero, PRECISION: tl.constexpr):
    """acc + a @ b. The interpreter multiplies the bits of bf16 as integers, so there the operands are widened first.

    fp32 is summed block by block: one chain of additions over the whole reduction is several times less exact than cuBLAS.
    `zero` is a 0.0 whose value the compiler cannot know, or it would join the two sums into that chain.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    if PRECISION == "ieee" and a.dtype == tl.float32:
        return acc + tl.dot(a, b, tl.zeros_like(acc) + zero, input_precision=PRECISION)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def grouped_order(pid, num_tiles, num_columns, GROUP: tl.constexpr):
    """Program number -> (row tile, column tile): GROUP row tiles share one sweep over the columns, so both stay in L2."""
    per_group = GROUP * num_columns
    group = pid // per_group
    rows = min(num_tiles - group * GROUP, GROUP)
    within = pid - group * per_group
    return group * GROUP + within % rows, within // rows


@triton.jit
def dealt_tile(number, num_tiles, num_programs):
    """The tile of a number: programs that take every num_programs-th number go forth and back through the tiles."""
    turn = number // num_programs
    back = (turn % 2 == 1) & ((turn + 1) * num_programs <= num_tiles)
    return tl.where(back, (2 * turn + 1) * num_programs - 1 - number, number)


@triton.jit
def row_tile(Tiles, capacity, tile):
    """(expert, first row, length) of an entry of `Schedule.tiles` [3, capacity]; all -1 where it is unused."""
    return tl.load(Tiles + tile), tl.load(Tiles + capacity + tile), tl.load(Tiles + 2 * capacity + tile)


@triton.jit
def weight_block(expert, N, stride_we, stride_wg, stride_wn, ColumnOffsets, HALVES: tl.constexpr, VARIED: tl.constexpr):
    """(columns of the expert, offset of its weight, offset from its first to its second half), offsets in elements."""
    if VARIED:
        first = tl.load(ColumnOffsets + expert)
        columns = tl.load(ColumnOffsets + expert + 1) - first
        return columns.to(tl.int32), first * HALVES * stride_wn, columns * stride_wn
    else:
        return N, expert.to(tl.int64) * stride_we, tl.cast(stride_wg, tl.int64)


@triton.jit
def value_rows(
    expert, first_row, columns, stride_row, stride_column, Offsets, BlockOffsets, HALVES: tl.constexpr, VARIED: tl.constexpr
):
    """(offset of a row tile of `BlockSparse.values`, stride of its rows), in elements."""
    if VARIED:
        within = (first_row - tl.load(Offsets + expert)).to(tl.int64)
        block = tl.load(BlockOffsets + expert)
        return (block + within * columns) * HALVES * stride_column, columns * HALVES * stride_column
    else:
        return first_row.to(tl.int64) * stride_row, stride_row


@triton.jit
def wrapped(offs, size):
    """Offsets of a tile that hangs over the end, brought back into `[0, size)`: what the extra lanes read is never stored.

    A remainder, because a minimum or a mask hides from the compiler that neighbouring lanes read neighbouring elements, and
    the loads then leave the asynchronous pipeline.
    """
    return offs % size


@triton.jit
def along(offs, stride):
    """Offsets in elements, in 64 bits: the stride of a view may be as long as the tensor that it is a view of."""
    return offs.to(tl.int64) * stride


@triton.jit
def split_halves(tile):
    """[M, 2 * N] -> its left and right [M, N]; stays in the registers of a wgmma accumulator."""
    pair = tl.permute(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), (0, 2, 1))
    return tl.split(pair)


@triton.jit
def split_pairs(tile):
    """[M, 2 * N] -> its even and odd columns, [M, N] each; these too stay in their registers."""
    return tl.split(tl.reshape(tile, (tile.shape[0], tile.shape[1] // 2, 2)))


def fp32_precision() -> str:
    """How fp32 operands are multiplied: as torch was told to for its own matrix products on CUDA."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
