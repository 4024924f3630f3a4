"""Transposed DSD in Gluon, for Hopper: what `_dsd_transposed_tma_kernel` computes in its largest tile, bit for bit.

A tile is computed as w_e^T = x_e^T s_e, 128 of the hidden size x 256 columns; its contraction goes over the rows of an expert.

    s        the producer loads 256 columns into the ring that both consumers read
    x        each consumer gathers its own 64 of the hidden size by cp.async, 3 steps ahead, into a ring of 4 slots that only it
             uses
    places   where the rows of x of a step begin. The producer looks them up and writes them into the ring of s, those of a step
             3 slots early: a slot that is full says also where the rows to copy next are
    results  half the columns of a tile, turned over where the hidden axis of the weight is its dense one

Tiles have as many steps as their experts have rows for, one if there is none. Rows behind the last one of an expert are zeros
on both sides, whatever memory holds there: TMA clips at it, and cp.async fills with zeros. See gluon_rings.py and sdd_gluon.py
for the rest.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..block_sparse import BlockSparse
from ..config import GemmConfig, ceil_div, num_programs
from ..launch import StackedWeight
from ..reference import Order
from .descriptors import END, describe, describe_rows
from .gluon_rings import (
    ACC_LAYOUT,
    BLOCK_M,
    BLOCK_N,
    HALF_LAYOUT,
    SHARED,
    SLOTS,
    SwizzledDescriptor,
    advanced,
    barriers,
    before,
    stand_in,
)
from .launcher import launch
from .tiles import dealt_tile, grouped_order, split_halves

TILE = GemmConfig(256, 128, 64, 8, 3, tma=True)
"""The tile of Triton's kernel in whose place this one runs."""

_PART = TILE.block_n // 2
"""Of the hidden size, what a consumer has of a tile."""

DEPTH = gl.constexpr(TILE.block_k)
"""Rows of a step."""

LEAD = gl.constexpr(3)
"""Steps that copies of x are ahead. Of the rings of `SLOTS` one slot is then left, the one that was read last."""

GROUP = gl.constexpr(8)
"""Column tiles that share one sweep over the hidden size."""

X_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
PLACES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
PLACES_SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _tile(BySize, Offsets, number, num_tiles, num_columns, num_hidden):
    """(expert, first row, number of rows, column tile, hidden tile) of a tile; of the last one if that number is too large."""
    tile = dealt_tile(gl.minimum(number, num_tiles - 1), num_tiles, gl.num_programs(0))
    per_expert = num_columns * num_hidden
    expert = gl.load(BySize + tile // per_expert)
    column, hidden = grouped_order(tile % per_expert, num_columns, num_hidden, GROUP)
    first_row = gl.load(Offsets + expert)
    return expert, first_row, gl.load(Offsets + expert + 1) - first_row, column, hidden


@gluon.jit
def _steps(num_rows):
    return gl.maximum(gl.cdiv(num_rows, DEPTH), 1)


@gluon.jit
def _look_up(
    Tokens, BySize, Offsets, number, k, first_row, num_rows, hidden, first_row1, num_rows1, hidden1,
    num_tiles, num_columns, num_hidden, GATHER: gl.constexpr,
):  # fmt: skip
    """The rows of x of a step, twice, -1 behind the last one, and its hidden tile; then where the cursor is after it: tile and
    step, rows and hidden tile of that tile and of the next one."""
    offs_k = k * DEPTH + gl.arange(0, 2 * DEPTH, PLACES) % DEPTH
    if GATHER:
        rows = gl.load(Tokens + first_row + offs_k, mask=offs_k < num_rows, other=-1)
    else:
        rows = gl.where(offs_k < num_rows, first_row + offs_k, -1)
    of_step = hidden + 0
    k += 1
    if k * DEPTH >= num_rows:
        k = 0
        number += gl.num_programs(0)
        # "+ 0": Triton 3.6 takes a variable that begins as another carried one for one that never changes.
        first_row, num_rows, hidden = first_row1 + 0, num_rows1 + 0, hidden1 + 0
        _, first_row1, num_rows1, _, hidden1 = _tile(
            BySize, Offsets, number + gl.num_programs(0), num_tiles, num_columns, num_hidden
        )
    return rows, of_step, number, k, first_row, num_rows, hidden, first_row1, num_rows1, hidden1


@gluon.jit
def _write_places(rows, hidden, x_vectors, num_parts, slot):
    """Of each row where the part of each consumer begins, in 8 elements; -1 where there is no row, or no such part."""
    part = 2 * hidden + gl.arange(0, 2 * DEPTH, PLACES) // DEPTH
    slot.store(gl.where((rows >= 0) & (part < num_parts), rows * x_vectors + part * (BLOCK_M // 8), -1))


@gluon.jit
def _producer(
    S, Tokens, BySize, Offsets, x_vectors, num_tiles, num_columns, num_hidden, num_parts, s_ring, places, full, empty, begun,
    GATHER: gl.constexpr,
):  # fmt: skip
    """Load the columns of every step of every tile, as soon as their slot is free, and say where the rows LEAD steps later are.

    They are looked up a step before they are written."""
    slot = 0
    phase = 0
    first = gl.program_id(0)
    stride = gl.num_programs(0)
    _, first_row, num_rows, column, hidden = _tile(BySize, Offsets, first, num_tiles, num_columns, num_hidden)
    coming = _tile(BySize, Offsets, first + stride, num_tiles, num_columns, num_hidden)

    number = first + 0
    step = 0
    first_row0, num_rows0, hidden0 = first_row + 0, num_rows + 0, hidden + 0
    _, first_row1, num_rows1, _, hidden1 = coming
    for ahead in gl.static_range(LEAD):
        rows, of_step, number, step, first_row0, num_rows0, hidden0, first_row1, num_rows1, hidden1 = _look_up(
            Tokens, BySize, Offsets, number, step, first_row0, num_rows0, hidden0, first_row1, num_rows1, hidden1,
            num_tiles, num_columns, num_hidden, GATHER,
        )  # fmt: skip
        _write_places(rows, of_step, x_vectors, num_parts, places.index(ahead))
    mbarrier.arrive(begun.index(0), count=1)
    rows, of_step, number, step, first_row0, num_rows0, hidden0, first_row1, num_rows1, hidden1 = _look_up(
        Tokens, BySize, Offsets, number, step, first_row0, num_rows0, hidden0, first_row1, num_rows1, hidden1,
        num_tiles, num_columns, num_hidden, GATHER,
    )  # fmt: skip

    for tile in range(first, num_tiles, stride):
        for k in range(_steps(num_rows)):
            mbarrier.wait(empty.index(slot), phase)
            _write_places(rows, of_step, x_vectors, num_parts, places.index(before(slot)))
            mbarrier.arrive(full.index(slot), count=1)  # behind a barrier of all threads, which have all written
            mbarrier.expect(full.index(slot), S.block_type.nbytes)
            corner = [END, first_row + num_rows, END - num_rows + k * DEPTH, 0, column * (2 * BLOCK_N)]
            tma.async_copy_global_to_shared(S, corner, full.index(slot), s_ring.index(slot))
            rows, of_step, number, step, first_row0, num_rows0, hidden0, first_row1, num_rows1, hidden1 = _look_up(
                Tokens, BySize, Offsets, number, step, first_row0, num_rows0, hidden0, first_row1, num_rows1, hidden1,
                num_tiles, num_columns, num_hidden, GATHER,
            )  # fmt: skip
            slot, phase = advanced(slot, phase)
        _, first_row, num_rows, column, _ = coming
        coming = _tile(BySize, Offsets, tile + 2 * stride, num_tiles, num_columns, num_hidden)


@gluon.jit
def _copy(X, places, x_slot, NUMBER: gl.constexpr):
    """Start to copy a step of the part of a consumer, zeros where there is no row, and close the group of these copies."""
    place = places.slice(NUMBER * DEPTH, DEPTH, 0).load(gl.SliceLayout(1, X_LAYOUT))
    offs_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, X_LAYOUT))
    offs = place.to(gl.int64)[:, None] * 8 + offs_m[None, :]
    async_copy.async_copy_global_to_shared(x_slot, X + offs, mask=(place >= 0)[:, None])
    async_copy.commit_group()


@gluon.jit
def _store(Out, buffer, acc, expert, column, part, DENSE_HIDDEN: gl.constexpr):
    """Write half the columns of the part of a consumer."""
    tma.store_wait(0)
    if DENSE_HIDDEN:
        buffer.permute((1, 0)).store(acc.to(Out.dtype))
        corner = [expert, 0, column, part * BLOCK_M]
    else:
        buffer.store(acc.to(Out.dtype))
        corner = [expert, 0, part * BLOCK_M, column]
    fence_async_shared()
    tma.async_copy_shared_to_global(Out, corner, buffer)


@gluon.jit
def _wait(full, slot, phase):
    """Until both operands of a step are there, and the places of the step that is LEAD later."""
    async_copy.wait_group(LEAD - 1)
    fence_async_shared()
    mbarrier.wait(full.index(slot), phase)


@gluon.jit
def _consumer(
    NUMBER: gl.constexpr, X, Out, BySize, Offsets, num_tiles, num_columns, num_hidden,
    x_ring, s_ring, places, buffer, full, empty, begun, DENSE_HIDDEN: gl.constexpr,
):  # fmt: skip
    """Multiply 64 of the hidden size of each tile, and write what comes out."""
    first = gl.program_id(0)
    stride = gl.num_programs(0)
    expert, _, num_rows, column, hidden = _tile(BySize, Offsets, first, num_tiles, num_columns, num_hidden)
    mbarrier.wait(begun.index(0), 0)
    for ahead in gl.static_range(LEAD):
        _copy(X, places.index(ahead), x_ring.index(ahead), NUMBER)
    # Slots are free only now: the places of the first steps were in them.
    for some in gl.static_range(SLOTS):
        mbarrier.arrive(empty.index(some), count=1)
    slot = 0
    phase = 0
    for number in range(first, num_tiles, stride):
        acc = gl.zeros((BLOCK_M, 2 * BLOCK_N), gl.float32, ACC_LAYOUT)
        last = _steps(num_rows) - 1
        for k in range(last):
            _wait(full, slot, phase)
            acc = warpgroup_mma(x_ring.index(slot).permute((1, 0)), s_ring.index(slot), acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            mbarrier.arrive(empty.index(before(slot)), count=1, pred=k > 0)
            _copy(X, places.index(before(slot)), x_ring.index(before(slot)), NUMBER)
            slot, phase = advanced(slot, phase)

        # Under the wgmma before the last one, where the next tile lies.
        coming = _tile(BySize, Offsets, number + stride, num_tiles, num_columns, num_hidden)
        _wait(full, slot, phase)
        acc = warpgroup_mma(x_ring.index(slot).permute((1, 0)), s_ring.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        _copy(X, places.index(before(slot)), x_ring.index(before(slot)), NUMBER)
        mbarrier.arrive(empty.index(before(slot)), count=1, pred=last > 0)
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = advanced(slot, phase)

        left, right = split_halves(acc)
        left = gl.convert_layout(left, HALF_LAYOUT, assert_trivial=True)
        _store(Out, buffer, left, expert, column * (2 * BLOCK_N), 2 * hidden + NUMBER, DENSE_HIDDEN)
        right = gl.convert_layout(right, HALF_LAYOUT, assert_trivial=True)
        _store(Out, buffer, right, expert, column * (2 * BLOCK_N) + BLOCK_N, 2 * hidden + NUMBER, DENSE_HIDDEN)
        expert, _, num_rows, column, hidden = coming
    async_copy.wait_group(0)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["x_vectors", "num_experts", "num_columns", "num_hidden", "num_parts"])
def _dsd_transposed_gluon_kernel(
    S, X, Out,                          # descriptors of [M, 1, N] and of [E, 1, N, H] or [E, 1, H, N]; [T or M, H]
    Tokens, BySize, Offsets,            # [M], [E], [E + 1]
    x_vectors, num_experts, num_columns, num_hidden, num_parts,
    GATHER: gl.constexpr, DENSE_HIDDEN: gl.constexpr,
):  # fmt: skip
    """`x_vectors`: the stride of the rows of x in 8 elements, which 16 bytes are. `num_parts`: the hidden size in what a
    consumer has of it."""
    dtype: gl.constexpr = X.dtype.element_ty
    x_ring0 = gl.allocate_shared_memory(dtype, [SLOTS, DEPTH, BLOCK_M], SHARED)
    x_ring1 = gl.allocate_shared_memory(dtype, [SLOTS, DEPTH, BLOCK_M], SHARED)
    s_ring = gl.allocate_shared_memory(dtype, [SLOTS, DEPTH, 2 * BLOCK_N], SHARED)
    places = gl.allocate_shared_memory(gl.int32, [SLOTS, 2 * DEPTH], PLACES_SHARED)
    if DENSE_HIDDEN:
        buffer0 = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], SHARED)
        buffer1 = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], SHARED)
    else:
        buffer0 = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_N], SHARED)
        buffer1 = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_N], SHARED)
    full, empty = barriers(2)
    begun = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(begun.index(0), count=1)
    num_tiles = num_experts * num_columns * num_hidden
    gl.warp_specialize([
        (_consumer, (
            0, X, Out, BySize, Offsets, num_tiles, num_columns, num_hidden,
            x_ring0, s_ring, places, buffer0, full, empty, begun, DENSE_HIDDEN,
        )),
        (_consumer, (
            1, X, Out, BySize, Offsets, num_tiles, num_columns, num_hidden,
            x_ring1, s_ring, places, buffer1, full, empty, begun, DENSE_HIDDEN,
        )),
        (_producer, (
            S, Tokens, BySize, Offsets, x_vectors, num_tiles, num_columns, num_hidden, num_parts,
            s_ring, places, full, empty, begun, GATHER,
        )),
    ], [4, 4], [232, 40])  # fmt: skip


def applies(x: Tensor, config: GemmConfig) -> bool:
    """Whether this kernel is the one to launch where `_dsd_transposed_tma_kernel` is.

    The rows of x must be whole parts of a consumer, begin at multiples of 16 bytes and lie within reach of 32-bit offsets in 16
    bytes.
    """
    (rows, hidden_size), (stride_xr, stride_xh) = x.shape, x.stride()
    return (
        stand_in(config, None, x.device, TILE)
        and hidden_size % _PART == 0
        and stride_xh == 1
        and stride_xr % 8 == 0
        and x.data_ptr() % 16 == 0
        and 0 < rows * max(stride_xr, hidden_size) < 2**34
    )


def launch_dsd_transposed(s: BlockSparse, x: Tensor, order: Order, weight: StackedWeight, form: Tensor) -> None:
    """Fill `weight`, where `applies`; `form` is what `weight_form` gave for it."""
    topology, columns, hidden_size = s.topology, weight.columns.widest, weight.hidden_size
    num_columns, num_hidden = ceil_div(columns, TILE.block_m), ceil_div(hidden_size, TILE.block_n)
    half = TILE.block_m // 2
    box = (half, _PART) if form is weight.data else (_PART, half)
    launch(
        _dsd_transposed_gluon_kernel, x.device,
        (min(topology.num_experts * num_columns * num_hidden, num_programs(x.device)),),
        SwizzledDescriptor.of(describe_rows(s.values, TILE.block_k, TILE.block_m)), x,
        SwizzledDescriptor.of(describe(form, 1, 1, *box)),
        topology.tokens, topology.experts_by_size(), topology.offsets,
        x.stride(0) // 8, topology.num_experts, num_columns, num_hidden, hidden_size // _PART,
        GATHER=order == "tokens", DENSE_HIDDEN=form is weight.data, num_warps=4,
    )  # fmt: skip
