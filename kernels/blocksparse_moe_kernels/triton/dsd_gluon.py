"""DSD in Gluon, for Hopper: what `dsd._dsd_tma_kernel` computes in its largest tile, bit for bit.

    values   128 rows of a step, of which each consumer multiplies 64; one load for both. Rows of other experts are among them
             at the end of an expert: they are read and never stored
    weight   256 columns of the hidden size, in the same slots

The producer looks up where a tile lies one tile ahead, so that its loads need not wait for that. See gluon_rings.py for the
rest.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ..block_sparse import BlockSparse
from ..config import GemmConfig, ceil_div, num_programs
from ..launch import StackedWeight
from .descriptors import describe, describe_rows, describe_weight
from .gluon_rings import (
    ACC_LAYOUT,
    BLOCK_K,
    BLOCK_M,
    BLOCK_N,
    SHARED,
    SLOTS,
    TILE,
    SwizzledDescriptor,
    advanced,
    barriers,
    before,
    halves_of,
    load_weight,
    place_of,
    stand_in,
    store,
    weight_operand,
    weight_ring,
)
from .launcher import launch
from .tiles import grouped_order, row_tile


@gluon.jit
def _looked_up(Tiles, number, capacity, num_tiles, num_columns, GROUP: gl.constexpr):
    """(expert, first row, first column) of a tile."""
    tile, pid_n = place_of(number, num_tiles, num_columns, GROUP)
    expert, first_row, _ = row_tile(Tiles, capacity, tile)
    return expert, first_row, pid_n * (2 * BLOCK_N)


@gluon.jit
def _producer(
    S, W, Tiles, capacity, num_tiles, num_columns, num_steps, s_ring, w_ring, full, empty,
    GROUP: gl.constexpr, DENSE_DEPTH: gl.constexpr,
):  # fmt: skip
    """Load both operands of every step of every tile, as soon as their slot is free."""
    slot = 0
    phase = 0
    first = gl.program_id(0)
    stride = gl.num_programs(0)
    expert, first_row, column = _looked_up(Tiles, first, capacity, num_tiles, num_columns, GROUP)
    for number in range(first, num_tiles * num_columns, stride):
        coming = _looked_up(Tiles, number + stride, capacity, num_tiles, num_columns, GROUP)
        for k in range(num_steps):
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(full.index(slot), S.block_type.nbytes + W.block_type.nbytes)
            tma.async_copy_global_to_shared(S, [first_row, k * BLOCK_K], full.index(slot), s_ring.index(slot))
            load_weight(W, expert, column, k, full.index(slot), w_ring.index(slot), 1, DENSE_DEPTH)
            slot, phase = advanced(slot, phase)
        expert, first_row, column = coming


@gluon.jit
def _step(
    acc, slot, phase, s_ring, w_ring, full, empty, ROW: gl.constexpr, DENSE_DEPTH: gl.constexpr, FIRST: gl.constexpr
):  # fmt: skip
    """Start the wgmma of a step, wait for that of the step before, free its slot."""
    mbarrier.wait(full.index(slot), phase)
    s = s_ring.index(slot).slice(ROW, BLOCK_M, 0)
    acc = warpgroup_mma(s, weight_operand(w_ring.index(slot), DENSE_DEPTH), acc, is_async=True)
    acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
    if not FIRST:
        mbarrier.arrive(empty.index(before(slot)), count=1)
    slot, phase = advanced(slot, phase)
    return acc, slot, phase


@gluon.jit
def _consumer(
    NUMBER: gl.constexpr, Y, Tiles, capacity, num_tiles, num_columns, num_steps, s_ring, w_ring, buffer, full, empty,
    GROUP: gl.constexpr, DENSE_DEPTH: gl.constexpr,
):  # fmt: skip
    """Multiply 64 rows of each tile, and write what comes out."""
    ROW: gl.constexpr = NUMBER * BLOCK_M
    slot = 0
    phase = 0
    for number in range(gl.program_id(0), num_tiles * num_columns, gl.num_programs(0)):
        acc = gl.zeros((BLOCK_M, 2 * BLOCK_N), gl.float32, ACC_LAYOUT)
        acc, slot, phase = _step(acc, slot, phase, s_ring, w_ring, full, empty, ROW, DENSE_DEPTH, True)
        # Under the first wgmma, what the epilogue needs.
        tile, pid_n = grouped_order(number, num_tiles, num_columns, GROUP)
        _, first_row, length = row_tile(Tiles, capacity, tile)
        for _k in range(1, num_steps):
            acc, slot, phase = _step(acc, slot, phase, s_ring, w_ring, full, empty, ROW, DENSE_DEPTH, False)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index(before(slot)), count=1)

        left, right = halves_of(acc)
        column = pid_n * (2 * BLOCK_N)
        store(Y, buffer, left, first_row, length, 0, column, ROW)
        store(Y, buffer, right, first_row, length, 0, column + BLOCK_N, ROW)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["capacity", "num_columns", "num_steps"])
def _dsd_gluon_kernel(
    S, W, Y,                                    # descriptors of [M, N], of [E, 1, N, H] or [E, 1, H, N], of [M, 1, H]
    Tiles, NumTiles,                            # [3, tiles], []
    capacity, num_columns, num_steps,
    GROUP: gl.constexpr, DENSE_DEPTH: gl.constexpr,
):  # fmt: skip
    s_ring = gl.allocate_shared_memory(S.dtype, [SLOTS, 2 * BLOCK_M, BLOCK_K], SHARED)
    w_ring = weight_ring(S.dtype, DENSE_DEPTH)
    buffers = gl.allocate_shared_memory(S.dtype, [2, BLOCK_M, BLOCK_N], SHARED)
    full, empty = barriers()
    num_tiles = gl.load(NumTiles)
    gl.warp_specialize([
        (_consumer, (
            0, Y, Tiles, capacity, num_tiles, num_columns, num_steps, s_ring, w_ring, buffers.index(0), full, empty,
            GROUP, DENSE_DEPTH,
        )),
        (_consumer, (
            1, Y, Tiles, capacity, num_tiles, num_columns, num_steps, s_ring, w_ring, buffers.index(1), full, empty,
            GROUP, DENSE_DEPTH,
        )),
        (_producer, (
            S, W, Tiles, capacity, num_tiles, num_columns, num_steps, s_ring, w_ring, full, empty, GROUP, DENSE_DEPTH,
        )),
    ], [4, 4], [232, 40])  # fmt: skip


def applies(weight: StackedWeight, form: Tensor | None, bias: Tensor | None, config: GemmConfig) -> bool:
    """Whether this kernel is the one to launch where `_dsd_tma_kernel` could be: `form` is what `weight_form` gave for the
    weight, None if another operand cannot go through TMA."""
    return form is not None and stand_in(config, bias, weight.data.device)


def launch_dsd(s: BlockSparse, weight: StackedWeight, form: Tensor, y: Tensor) -> None:
    """Fill `y` [M, H], where `applies`."""
    schedule = s.topology.schedule(TILE.block_m)
    num_columns = ceil_div(weight.hidden_size, TILE.block_n)
    launch(
        _dsd_gluon_kernel, y.device, (min(schedule.capacity * num_columns, num_programs(y.device)),),
        SwizzledDescriptor.of(describe(s.values, TILE.block_m, TILE.block_k)),
        SwizzledDescriptor.of(describe_weight(form, weight, TILE.block_k, TILE.block_n)),
        SwizzledDescriptor.of(describe_rows(y, TILE.block_m // 2, TILE.block_n // 2)),
        schedule.tiles, schedule.num_tiles,
        schedule.capacity, num_columns, ceil_div(weight.columns.widest, TILE.block_k),
        GROUP=8, DENSE_DEPTH=form is not weight.data, num_warps=4,
    )  # fmt: skip
