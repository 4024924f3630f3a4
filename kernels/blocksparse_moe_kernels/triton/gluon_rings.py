"""What the products in Gluon share: where they are used, how the warps of a program are tied, how a tile is written.

Triton's own kernels leave their main loop for the epilogue with all warps at once, and the tensor cores wait. In these a
program has two *consumers* of 4 warps, each with 64 of the 128 rows of a tile and an accumulator of its own. They run free of
each other, so the epilogue of one hides under the products of the other. A third group, the *producer*, loads by TMA.

    rings    tiles of 64 columns of the contraction, in 4 slots that producer and consumers go through in turn. `full` of a slot
             completes when its bytes are there, `empty` when both consumers are done with it. A consumer is done with a slot
             when its wgmma has ended, which it sees one step later. The programs are persistent, and the rings go on from tile
             to tile
    results  one buffer a consumer, of half the columns of a tile, from which TMA writes while the next tile is multiplied

The sums over the contraction are those of Triton's kernel in its largest tile, in the same order: the results are the same bit
for bit. Gluon is an experimental part of Triton: `versions.GLUON` says which releases are known to be right. Loaded only for
those.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..config import GemmConfig, architecture_of
from .descriptors import END, Described
from .tiles import grouped_order, split_halves

TILE = GemmConfig(128, 256, 64, 8, 3, tma=True)
"""The tile of Triton's kernels in whose place these run."""

_BLOCK_M, _BLOCK_N = TILE.block_m // 2, TILE.block_n // 2

BLOCK_M, BLOCK_N, BLOCK_K = gl.constexpr(_BLOCK_M), gl.constexpr(_BLOCK_N), gl.constexpr(TILE.block_k)
"""Rows of a consumer, columns of half a tile, depth of a step."""

SLOTS = gl.constexpr(4)
"""Of a ring that the producer fills."""

ACC_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * _BLOCK_N, 16]))
HALF_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _BLOCK_N, 16]))
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@gluon.jit
def advanced(slot, phase):
    """The slot behind this one, and the phase of its barriers."""
    slot += 1
    wraps = slot == SLOTS
    return gl.where(wraps, 0, slot), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def before(slot):
    """The slot before this one."""
    return gl.where(slot == 0, SLOTS - 1, slot - 1)


@gluon.jit
def barriers(arrivals: gl.constexpr = 1):
    """(full, empty) of a ring. `arrivals`: of the producer at a slot, besides bytes."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=arrivals)
        mbarrier.init(empty.index(slot), count=2)
    return full, empty


@gluon.jit
def weight_ring(dtype: gl.constexpr, DENSE_DEPTH: gl.constexpr):
    """Tiles [columns, depth] or, of a weight whose depth is not its dense axis, [depth, columns]."""
    if DENSE_DEPTH:
        return gl.allocate_shared_memory(dtype, [SLOTS, 2 * BLOCK_N, BLOCK_K], SHARED)
    else:
        return gl.allocate_shared_memory(dtype, [SLOTS, BLOCK_K, 2 * BLOCK_N], SHARED)


@gluon.jit
def load_weight(W, expert, column, k, full, slot, HALVES: gl.constexpr, DENSE_DEPTH: gl.constexpr):
    """Start to load a step of the weight into its slot: of two halves the columns of both. TMA fills with zeros behind them."""
    if HALVES == 2:
        for half in gl.static_range(2):
            part = slot.slice(half * BLOCK_N, BLOCK_N, 0)
            tma.async_copy_global_to_shared(W, [expert, half, column, k * BLOCK_K], full, part)
    elif DENSE_DEPTH:
        tma.async_copy_global_to_shared(W, [expert, 0, column, k * BLOCK_K], full, slot)
    else:
        tma.async_copy_global_to_shared(W, [expert, 0, k * BLOCK_K, column], full, slot)


@gluon.jit
def weight_operand(slot, DENSE_DEPTH: gl.constexpr):
    """A slot of the weight as wgmma takes it: [depth, columns]."""
    if DENSE_DEPTH:
        return slot.permute((1, 0))
    else:
        return slot


@gluon.jit
def place_of(number, num_tiles, num_columns, GROUP: gl.constexpr):
    """(row tile, column tile) of a tile of the result; of the last one if there is none of that number."""
    some = gl.maximum(num_tiles, 1)
    return grouped_order(gl.minimum(number, some * num_columns - 1), some, num_columns, GROUP)


@gluon.jit
def halves_of(acc):
    """The left and the right columns of an accumulator, which stay in their registers."""
    left, right = split_halves(acc)
    left = gl.convert_layout(left, HALF_LAYOUT, assert_trivial=True)
    right = gl.convert_layout(right, HALF_LAYOUT, assert_trivial=True)
    return left, right


@gluon.jit
def store(Result, buffer, tile, first_row, length, half, column, ROW: gl.constexpr):
    """Write the rows that a consumer has, of those of the tile that count."""
    tma.store_wait(0)
    buffer.store(tile.to(Result.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(Result, [END, first_row + length, END - length + ROW, half, column], buffer)


class SwizzledDescriptor(Described, TensorDescriptor):
    """A descriptor as Gluon takes it, which says how a tile lies in shared memory."""

    @classmethod
    def of(cls, descriptor: Described | None) -> SwizzledDescriptor | None:
        if descriptor is None:
            return None
        base, shape, strides, block_shape = descriptor.base, descriptor.shape, descriptor.strides, descriptor.block_shape
        return cls(base, shape, strides, block_shape, _layout(len(shape)))


@cache
def _layout(rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


def stand_in(config: GemmConfig, bias: Tensor | None, device: torch.device, tile: GemmConfig = TILE) -> bool:
    """Whether these kernels have the tile, on that device. They add no bias."""
    return config == tile and bias is None and architecture_of(device) == 90
