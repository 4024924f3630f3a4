"""SDD in Gluon, for Hopper: what `sdd._sdd_tma_kernel` computes in its largest tile, bit for bit.

    x        each consumer gathers its own rows by cp.async, 3 steps ahead, into a ring of 4 slots that only it uses: a slot is
             free once the wgmma that read it has ended, so this ring needs no barriers
    weight   the producer does nothing but load 256 columns, of a gated weight 128 of each half, into the ring that both
             consumers read
    results  the two halves of a tile, or what a gated activation makes of them

Tensor cores read shared memory through another path (the async proxy) than threads write it; a fence orders the copies of a
step before the wgmma that reads them. At the end of a tile the copies are those of the next one, whose rows were looked up a
tile before. See gluon_rings.py for the rest.
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

from ..activations import Activation
from ..config import GemmConfig, ceil_div, num_programs
from ..launch import StackedWeight
from ..reference import Order
from ..topology import Topology
from .activation_functions import activation_value, constants
from .descriptors import describe, describe_rows
from .gluon_rings import (
    ACC_LAYOUT,
    BLOCK_K,
    BLOCK_M,
    BLOCK_N,
    SHARED,
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

_X_SLOTS = 4

X_SLOTS = gl.constexpr(_X_SLOTS)
LEAD = gl.constexpr(_X_SLOTS - 1)
"""Steps that copies of x are ahead: one slot is the one that wgmma may still read."""

X_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _producer(
    W, Tiles, num_tiles, num_columns, num_steps, w_ring, full, empty,
    GROUP: gl.constexpr, HALVES: gl.constexpr, DENSE_DEPTH: gl.constexpr,
):  # fmt: skip
    """Load the weight of every step of every tile, as soon as its slot is free."""
    slot = 0
    phase = 0
    for number in range(gl.program_id(0), num_tiles * num_columns, gl.num_programs(0)):
        tile, pid_n = grouped_order(number, num_tiles, num_columns, GROUP)
        expert = gl.load(Tiles + tile)
        column = pid_n * (2 * BLOCK_N // HALVES)
        for k in range(num_steps):
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(full.index(slot), HALVES * W.block_type.nbytes)
            load_weight(W, expert, column, k, full.index(slot), w_ring.index(slot), HALVES, DENSE_DEPTH)
            slot, phase = advanced(slot, phase)


@gluon.jit
def _looked_up(
    Tokens, Tiles, number, capacity, num_tiles, num_columns, offs_m, GROUP: gl.constexpr, GATHER: gl.constexpr
):  # fmt: skip
    """(first row, length, column tile, rows of x) of a tile; of the last one if there is none of that number. Where a tile has
    no row, row 0 of x stands in: it is read and never stored."""
    tile, pid_n = place_of(number, num_tiles, num_columns, GROUP)
    _, first_row, length = row_tile(Tiles, capacity, tile)
    if GATHER:
        rows = gl.load(Tokens + first_row + offs_m, mask=offs_m < length, other=0)
    else:
        rows = gl.where(offs_m < length, first_row + offs_m, 0)
    return first_row, length, pid_n, rows


@gluon.jit
def _copy(X, rows, stride_xt, k, slot):
    """Start to copy a step of the rows of a consumer, and close the group of these copies."""
    offs_k = k * BLOCK_K + gl.arange(0, BLOCK_K, gl.SliceLayout(0, X_LAYOUT))
    async_copy.async_copy_global_to_shared(slot, X + ((rows * stride_xt)[:, None] + offs_k[None, :]))
    async_copy.commit_group()


@gluon.jit
def _step(
    X, rows, next_rows, stride_xt, k, num_steps, acc, slot, phase, x_slot, x_ring, w_ring, full, empty,
    DENSE_DEPTH: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Start the wgmma of step k, wait for that of the step before, free its slots, refill its slot of x with step k + LEAD."""
    async_copy.wait_group(LEAD - 1)
    fence_async_shared()
    mbarrier.wait(full.index(slot), phase)
    acc = warpgroup_mma(x_ring.index(x_slot), weight_operand(w_ring.index(slot), DENSE_DEPTH), acc, is_async=True)
    acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
    if not FIRST:
        mbarrier.arrive(empty.index(before(slot)), count=1)
    over = k >= num_steps - LEAD
    coming = gl.where(over, k + LEAD - num_steps, k + LEAD)
    free = gl.where(x_slot == 0, X_SLOTS - 1, x_slot - 1)
    _copy(X, gl.where(over, next_rows, rows), stride_xt, coming, x_ring.index(free))
    slot, phase = advanced(slot, phase)
    return acc, slot, phase, gl.where(x_slot + 1 == X_SLOTS, 0, x_slot + 1)


@gluon.jit
def _consumer(
    NUMBER: gl.constexpr, X, Pre, Act, Tokens, Tiles, stride_xt, capacity, num_tiles, num_columns, num_steps,
    x_ring, w_ring, buffer, full, empty, GROUP: gl.constexpr, HALVES: gl.constexpr, DENSE_DEPTH: gl.constexpr,
    GATHER: gl.constexpr, SAVE_PRE: gl.constexpr, FUNCTION: gl.constexpr, ALPHA: gl.constexpr, GATE_LIMIT: gl.constexpr,
    UP_LIMIT: gl.constexpr, UP_OFFSET: gl.constexpr,
):  # fmt: skip
    """Multiply 64 rows of each tile, and write what comes out."""
    ROW: gl.constexpr = NUMBER * BLOCK_M
    offs_m = ROW + gl.arange(0, BLOCK_M, gl.SliceLayout(1, X_LAYOUT))
    first = gl.program_id(0)
    stride = gl.num_programs(0)
    first_row, length, pid_n, rows = _looked_up(
        Tokens, Tiles, first, capacity, num_tiles, num_columns, offs_m, GROUP, GATHER
    )
    first_row1, length1, pid_n1, rows1 = _looked_up(
        Tokens, Tiles, first + stride, capacity, num_tiles, num_columns, offs_m, GROUP, GATHER
    )
    for ahead in gl.static_range(LEAD):
        _copy(X, rows, stride_xt, ahead, x_ring.index(ahead))
    slot = 0
    phase = 0
    x_slot = 0
    for number in range(first, num_tiles * num_columns, stride):
        acc = gl.zeros((BLOCK_M, 2 * BLOCK_N), gl.float32, ACC_LAYOUT)
        acc, slot, phase, x_slot = _step(
            X, rows, rows1, stride_xt, 0, num_steps, acc, slot, phase, x_slot, x_ring, w_ring, full, empty, DENSE_DEPTH, True
        )
        # Under the first wgmma, what the tile after the next one needs.
        first_row2, length2, pid_n2, rows2 = _looked_up(
            Tokens, Tiles, number + 2 * stride, capacity, num_tiles, num_columns, offs_m, GROUP, GATHER
        )
        for k in range(1, num_steps):
            acc, slot, phase, x_slot = _step(
                X, rows, rows1, stride_xt, k, num_steps, acc, slot, phase, x_slot, x_ring, w_ring, full, empty,
                DENSE_DEPTH, False,
            )  # fmt: skip
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index(before(slot)), count=1)

        left, right = halves_of(acc)
        column = pid_n * (2 * BLOCK_N // HALVES)
        if SAVE_PRE:
            store(Pre, buffer, left, first_row, length, 0, column, ROW)
            if HALVES == 2:
                store(Pre, buffer, right, first_row, length, 1, column, ROW)
            else:
                store(Pre, buffer, right, first_row, length, 0, column + BLOCK_N, ROW)
        if FUNCTION is not None:
            hidden = activation_value(left, right, True, FUNCTION, ALPHA, GATE_LIMIT, UP_LIMIT, UP_OFFSET)
            store(Act, buffer, hidden, first_row, length, 0, column, ROW)
        # "+ 0": Triton 3.6 takes a variable that begins as another carried one for one that never changes.
        first_row, length, pid_n, rows = first_row1 + 0, length1 + 0, pid_n1 + 0, rows1 + 0
        first_row1, length1, pid_n1, rows1 = first_row2 + 0, length2 + 0, pid_n2 + 0, rows2 + 0
    async_copy.wait_group(0)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["x_vectors", "capacity", "num_columns", "num_steps"])
def _sdd_gluon_kernel(
    X, W, Pre, Act,                 # [T or M, H], descriptors of the weight, of [M, HALVES, N] and of [M, 1, N]
    Tokens, Tiles, NumTiles,        # [M], [3, tiles], []
    x_vectors, capacity, num_columns, num_steps,
    GROUP: gl.constexpr, HALVES: gl.constexpr, DENSE_DEPTH: gl.constexpr, GATHER: gl.constexpr, SAVE_PRE: gl.constexpr,
    FUNCTION: gl.constexpr, ALPHA: gl.constexpr, GATE_LIMIT: gl.constexpr, UP_LIMIT: gl.constexpr, UP_OFFSET: gl.constexpr,
):  # fmt: skip
    """`x_vectors`: the stride of the rows of x in 8 elements, which 16 bytes are."""
    x_ring0 = gl.allocate_shared_memory(X.dtype.element_ty, [X_SLOTS, BLOCK_M, BLOCK_K], SHARED)
    x_ring1 = gl.allocate_shared_memory(X.dtype.element_ty, [X_SLOTS, BLOCK_M, BLOCK_K], SHARED)
    w_ring = weight_ring(X.dtype.element_ty, DENSE_DEPTH)
    buffers = gl.allocate_shared_memory(X.dtype.element_ty, [2, BLOCK_M, BLOCK_N], SHARED)
    full, empty = barriers()
    num_tiles = gl.load(NumTiles)
    stride_xt = x_vectors * 8
    gl.warp_specialize([
        (_consumer, (
            0, X, Pre, Act, Tokens, Tiles, stride_xt, capacity, num_tiles, num_columns, num_steps,
            x_ring0, w_ring, buffers.index(0), full, empty,
            GROUP, HALVES, DENSE_DEPTH, GATHER, SAVE_PRE, FUNCTION, ALPHA, GATE_LIMIT, UP_LIMIT, UP_OFFSET,
        )),
        (_consumer, (
            1, X, Pre, Act, Tokens, Tiles, stride_xt, capacity, num_tiles, num_columns, num_steps,
            x_ring1, w_ring, buffers.index(1), full, empty,
            GROUP, HALVES, DENSE_DEPTH, GATHER, SAVE_PRE, FUNCTION, ALPHA, GATE_LIMIT, UP_LIMIT, UP_OFFSET,
        )),
        (_producer, (W, Tiles, num_tiles, num_columns, num_steps, w_ring, full, empty, GROUP, HALVES, DENSE_DEPTH)),
    ], [4, 4], [232, 40])  # fmt: skip


def applies(
    x: Tensor,
    weight: StackedWeight,
    form: Tensor | None,
    bias: Tensor | None,
    activation: Activation | None,
    config: GemmConfig,
) -> bool:
    """Whether this kernel is the one to launch where `_sdd_tma_kernel` could be: `form` is what `weight_form` gave for it.

    It is for a gated activation of two halves with a dense hidden axis, and for no activation and one half, without a bias. The
    rows of x must be whole steps of 16-byte pieces, within reach of 32-bit offsets, and at least as many steps as their ring
    has slots, so that copies ahead reach into one more tile.
    """
    if form is None or not stand_in(config, bias, x.device) or weight.halves != (1 if activation is None else 2):
        return False
    (tokens, hidden_size), (stride_xt, stride_xh) = x.shape, x.stride()
    return (
        hidden_size % TILE.block_k == 0
        and hidden_size >= _X_SLOTS * TILE.block_k
        and stride_xh == 1
        and stride_xt % 8 == 0
        and x.data_ptr() % 16 == 0
        and 0 < tokens * max(stride_xt, hidden_size) < 2**31
    )


def launch_sdd(
    x: Tensor,
    weight: StackedWeight,
    form: Tensor,
    topology: Topology,
    order: Order,
    activation: Activation | None,
    pre: Tensor | None,
    act: Tensor | None,
) -> None:
    """Fill `pre` [M, halves * N] and `act` [M, N], those that are given, where `applies`."""
    schedule = topology.schedule(TILE.block_m)
    block_m, block_n = TILE.block_m // 2, TILE.block_n // 2
    columns = TILE.block_n // weight.halves
    num_columns = ceil_div(weight.columns.widest, columns)
    box = (columns, TILE.block_k) if form is weight.data else (TILE.block_k, columns)
    flags = constants(activation)
    del flags["INTERLEAVED"]
    launch(
        _sdd_gluon_kernel, x.device, (min(schedule.capacity * num_columns, num_programs(x.device)),),
        x, SwizzledDescriptor.of(describe(form, 1, 1, *box)),
        SwizzledDescriptor.of(describe_rows(pre, block_m, block_n, weight.halves)),
        SwizzledDescriptor.of(describe_rows(act, block_m, block_n)),
        topology.tokens, schedule.tiles, schedule.num_tiles,
        x.stride(0) // 8, schedule.capacity, num_columns, weight.hidden_size // TILE.block_k,
        GROUP=8, HALVES=weight.halves, DENSE_DEPTH=form is weight.data, GATHER=order == "tokens",
        SAVE_PRE=pre is not None, **flags, num_warps=4,
    )  # fmt: skip
