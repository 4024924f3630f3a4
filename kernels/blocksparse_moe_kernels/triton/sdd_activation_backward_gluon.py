"""SDD in Gluon whose result goes straight into the backward pass of a gated activation, for Hopper.

dA' = dO w_down^T stays in fp32 in the accumulators of `sdd_gluon.py`, whose main loop this is. Behind it a consumer takes the
columns of its tile a *piece* after the other, and makes of each what `activation_backward.py` would:

    pieces   gate and up of a piece come by TMA into one of the buffers of the consumer, which asks for them itself: for the
             first ones while it multiplies, for each later one when its buffer is free. The gradient takes their place, and TMA
             writes it from there
    L2       those pieces for which there is no buffer beforehand are fetched into the cache by the producer, a few steps before
             the tile ends
    scaled   p a, written from the slot of x that the last wgmma read, which nobody needs before the next tile begins
    dots     <dA', a> of each row over the columns of a tile, for `sum_dots`

Shared memory is what decides: with buffers for half a tile the ring of the weight has three slots. See `Plan`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from ..activations import Activation
from ..config import GemmConfig, ceil_div, num_programs
from ..launch import StackedWeight
from ..topology import Topology
from . import sdd_gluon
from .activation_functions import activation_value_and_derivatives, constants
from .descriptors import END, describe, describe_both_halves, describe_rows, rows_are_describable
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
    load_weight,
    weight_ring,
)
from .launcher import launch
from .sdd_gluon import LEAD, X_LAYOUT, X_SLOTS, copy_rows, looked_up, step
from .tiles import grouped_order, row_tile, split_halves


class Plan(NamedTuple):
    """How the shared memory is dealt out; each of the plans that were tried takes 224 KB.

    Attributes:
        slots: of the ring of the weight, 32 KB each.
        piece: columns of a piece, 64 or 32.
        buffers: for pieces, of each consumer. They go through a tile an even number of times, so that every tile finds their
            barriers in the same phase.
        lead: steps before the end of a tile at which the producer fetches into L2.
    """

    slots: int
    piece: int
    buffers: int
    lead: int = 8


PLAN = Plan(slots=3, piece=32, buffers=4)


def lag_of(plan: Plan) -> int:
    """Pieces after which the buffers of one are used again; `scaled` has a slot of x, room for 64 columns."""
    return min(plan.buffers // 2, TILE.block_k // plan.piece)


SECTOR = gl.constexpr(16)
"""Elements of 32 bytes, the least that L2 fetches."""

SECTORS = gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0]))

_PREFETCH = gl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")
"""Not cp.async.bulk.prefetch, of a row at once: its address must be uniform, and ptxas makes a loop over threads of it."""


@gluon.jit
def _fetch(PreRows, first_row, length, column, stride_pm, N, HELD: gl.constexpr):
    """Have gate and up of a tile brought into L2, but for the first HELD columns. What does not exist is its first sector."""
    begin = column + HELD
    if begin < N:
        offs_n = SECTOR * gl.arange(0, 2 * BLOCK_N // SECTOR, gl.SliceLayout(0, SECTORS))
        offs_n = begin + gl.where((offs_n < 2 * BLOCK_N - HELD) & (begin + offs_n < N), offs_n, 0)
        for m in range(0, gl.minimum(2 * BLOCK_M, length), 16):
            offs_m = m + gl.arange(0, 16, gl.SliceLayout(1, SECTORS))
            rows = first_row + gl.where(offs_m < length, offs_m, 0)
            for half in gl.static_range(2):
                addresses = (PreRows + (rows.to(gl.int64) * stride_pm)[:, None] + (half * N + offs_n)[None, :]).to(gl.int64)
                gl.inline_asm_elementwise(_PREFETCH, "=r,l", [addresses], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _producer(
    W, PreRows, Tiles, stride_pm, N, capacity, num_tiles, num_columns, num_steps, w_ring, full, empty,
    GROUP: gl.constexpr, DENSE_DEPTH: gl.constexpr, SLOTS: gl.constexpr, HELD: gl.constexpr, FETCH_LEAD: gl.constexpr,
):  # fmt: skip
    """Load the weight of every step of every tile, as soon as its slot is free."""
    slot = 0
    phase = 0
    for number in range(gl.program_id(0), num_tiles * num_columns, gl.num_programs(0)):
        tile, pid_n = grouped_order(number, num_tiles, num_columns, GROUP)
        expert, first_row, length = row_tile(Tiles, capacity, tile)
        column = pid_n * (2 * BLOCK_N)
        for k in range(num_steps):
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(full.index(slot), W.block_type.nbytes)
            load_weight(W, expert, column, k, full.index(slot), w_ring.index(slot), 1, DENSE_DEPTH)
            slot, phase = advanced(slot, phase, SLOTS)
            if k == gl.maximum(num_steps - FETCH_LEAD, 0):
                _fetch(PreRows, first_row, length, column, stride_pm, N, HELD)


@gluon.jit
def _corner(tile, number: gl.constexpr, ROW: gl.constexpr, PIECE: gl.constexpr):
    """Where gate and up of a piece are. A tile: (first row, length, first column)."""
    first_row, length, column = tile
    return [END, first_row + length, 0, END - length + ROW, column + number * PIECE]


@gluon.jit
def _halves(buffer, PIECE: gl.constexpr):
    """A buffer as TMA sees it: gate columns, then up columns."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * PIECE, element_bitwidth=16, rank=3)
    return buffer._reinterpret(buffer.dtype, [2, BLOCK_M, PIECE], layout)


@gluon.jit
def _load_piece(
    Pre, tile, wanted, loaded, buffers, number: gl.constexpr, ROW: gl.constexpr, PIECE: gl.constexpr, BUFFERS: gl.constexpr
):  # fmt: skip
    """Start to load gate and up of a piece, if `wanted`, into a buffer that was announced. What does not exist is zeros."""
    place: gl.constexpr = number % BUFFERS
    buffer = _halves(buffers[place], PIECE)
    tma.async_copy_global_to_shared(Pre, _corner(tile, number, ROW, PIECE), loaded[place], buffer, pred=wanted)


@gluon.jit
def _split(acc, LAYOUT: gl.constexpr):
    """The columns of an accumulator in pieces of that layout, which stay in their registers."""
    if acc.shape[1] == LAYOUT.instr_shape[1]:
        return (gl.convert_layout(acc, LAYOUT, assert_trivial=True),)
    else:
        left, right = split_halves(acc)
        return _split(left, LAYOUT) + _split(right, LAYOUT)


@gluon.jit
def _joined(left, right, LAYOUT: gl.constexpr):
    """Left and right columns as one tile of that layout."""
    pair = gl.join(left, right).permute((0, 2, 1))
    return gl.convert_layout(pair.reshape((left.shape[0], 2 * left.shape[1])), LAYOUT, assert_trivial=True)


@gluon.jit
def _finish(
    acc, weight, tile, coming, more, Pre, GradPre, Scaled, loaded, buffers, lent, ROW: gl.constexpr, PIECE: gl.constexpr,
    BUFFERS: gl.constexpr, LAG: gl.constexpr, LAYOUT: gl.constexpr, FUNCTION: gl.constexpr, ALPHA: gl.constexpr,
    GATE_LIMIT: gl.constexpr, UP_LIMIT: gl.constexpr, UP_OFFSET: gl.constexpr,
):  # fmt: skip
    """Write what is made of dA' of a tile, and return <dA', a> of each row. Of the `coming` tile, if there are `more`, the
    first pieces are loaded."""
    PIECES: gl.constexpr = 2 * BLOCK_N // PIECE
    BOTH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * PIECE, 16])
    first_row, length, column = tile
    parts = _split(acc, LAYOUT)
    dots = gl.zeros((BLOCK_M,), gl.float32, gl.SliceLayout(1, LAYOUT))
    for piece in gl.static_range(PIECES):
        buffer = buffers[piece % BUFFERS]
        mbarrier.wait(loaded[piece % BUFFERS], piece // BUFFERS % 2)
        gate, up = _split(buffer.load(BOTH), LAYOUT)
        hidden, by_gate, by_up = activation_value_and_derivatives(
            gate.to(gl.float32), up.to(gl.float32), True, FUNCTION, ALPHA, GATE_LIMIT, UP_LIMIT, UP_OFFSET
        )
        dots += gl.sum(parts[piece] * hidden, 1)
        grad = weight[:, None] * parts[piece]
        grad_gate = (grad * by_gate).to(GradPre.dtype)
        grad_up = (grad * by_up).to(GradPre.dtype)

        # The buffers of the piece before, or of the one before that, are free then.
        tma.store_wait(2 * (LAG - 1))
        if piece >= LAG:
            wanted = True if piece - LAG + BUFFERS < PIECES else more
            mbarrier.expect(loaded[(piece - LAG) % BUFFERS], Pre.block_type.nbytes, pred=wanted)
        scaled = lent.index(piece % (BLOCK_K // PIECE))
        buffer.store(_joined(grad_gate, grad_up, BOTH))
        scaled.store((weight[:, None] * hidden).to(Scaled.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(GradPre, _corner(tile, piece, ROW, PIECE), _halves(buffer, PIECE))
        corner = [END, first_row + length, END - length + ROW, 0, column + piece * PIECE]
        tma.async_copy_shared_to_global(Scaled, corner, scaled)
        if piece >= LAG:
            if piece - LAG + BUFFERS < PIECES:
                _load_piece(Pre, tile, True, loaded, buffers, piece - LAG + BUFFERS, ROW, PIECE, BUFFERS)
            else:
                _load_piece(Pre, coming, more, loaded, buffers, piece - LAG + BUFFERS - PIECES, ROW, PIECE, BUFFERS)
    return dots


@gluon.jit
def _consumer(
    NUMBER: gl.constexpr, X, Pre, GradPre, Scaled, Weights, Dots, Tokens, Slots, Tiles, stride_xt, stride_w, num_slots,
    capacity, num_tiles, num_columns, num_steps, x_ring, w_ring, loaded, buffers, full, empty,
    GROUP: gl.constexpr, DENSE_DEPTH: gl.constexpr, HAS_WEIGHTS: gl.constexpr, SLOTS: gl.constexpr, PIECE: gl.constexpr,
    BUFFERS: gl.constexpr, LAG: gl.constexpr, FUNCTION: gl.constexpr, ALPHA: gl.constexpr, GATE_LIMIT: gl.constexpr,
    UP_LIMIT: gl.constexpr, UP_OFFSET: gl.constexpr,
):  # fmt: skip
    """Multiply 64 rows of each tile, and take their gradient through the activation."""
    ROW: gl.constexpr = NUMBER * BLOCK_M
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    PIECE_SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * PIECE, element_bitwidth=16, rank=2)
    offs_m = ROW + gl.arange(0, BLOCK_M, gl.SliceLayout(1, X_LAYOUT))
    offs_r = ROW + gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))
    first = gl.program_id(0)
    stride = gl.num_programs(0)
    last = num_tiles * num_columns
    first_row, length, pid_n, rows = looked_up(Tokens, Tiles, first, capacity, num_tiles, num_columns, offs_m, GROUP, True)
    first_row1, length1, pid_n1, rows1 = looked_up(
        Tokens, Tiles, first + stride, capacity, num_tiles, num_columns, offs_m, GROUP, True
    )
    for ahead in gl.static_range(LEAD):
        copy_rows(X, rows, stride_xt, ahead, x_ring.index(ahead))
    for ahead in gl.static_range(BUFFERS - LAG):
        mbarrier.expect(loaded[ahead], Pre.block_type.nbytes, pred=first < last)
        _load_piece(
            Pre, (first_row, length, pid_n * (2 * BLOCK_N)), first < last, loaded, buffers, ahead, ROW, PIECE, BUFFERS
        )
    slots = gl.load(Slots + first_row + offs_r, mask=offs_r < length, other=0)
    slot = 0
    phase = 0
    x_slot = 0
    for number in range(first, last, stride):
        acc = gl.zeros((BLOCK_M, 2 * BLOCK_N), gl.float32, ACC_LAYOUT)
        acc, slot, phase, x_slot = step(
            X, rows, rows1, stride_xt, 0, num_steps, acc, slot, phase, x_slot, x_ring, w_ring, full, empty,
            DENSE_DEPTH, True, SLOTS, True,
        )  # fmt: skip
        # Under the first wgmma, the last pieces that have a buffer, and what the epilogue and the tiles to come need.
        tile = (first_row, length, pid_n * (2 * BLOCK_N))
        for place in gl.static_range(BUFFERS - LAG, BUFFERS):
            mbarrier.expect(loaded[place], Pre.block_type.nbytes)
            _load_piece(Pre, tile, True, loaded, buffers, place, ROW, PIECE, BUFFERS)
        if HAS_WEIGHTS:
            weight = gl.load(Weights + slots.to(gl.int64) * stride_w, mask=offs_r < length, other=0.0).to(gl.float32)
        else:
            weight = gl.full((BLOCK_M,), 1.0, gl.float32, gl.SliceLayout(1, LAYOUT))
        slots1 = gl.load(Slots + first_row1 + offs_r, mask=offs_r < length1, other=0)
        first_row2, length2, pid_n2, rows2 = looked_up(
            Tokens, Tiles, number + 2 * stride, capacity, num_tiles, num_columns, offs_m, GROUP, True
        )
        for k in range(1, num_steps):
            acc, slot, phase, x_slot = step(
                X, rows, rows1, stride_xt, k, num_steps, acc, slot, phase, x_slot, x_ring, w_ring, full, empty,
                DENSE_DEPTH, False, SLOTS, False,
            )  # fmt: skip
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index(before(slot, SLOTS)), count=1)

        lent = x_ring.index(before(x_slot, X_SLOTS))
        dots = _finish(
            acc, weight, tile, (first_row1, length1, pid_n1 * (2 * BLOCK_N)), number + stride < last, Pre, GradPre, Scaled,
            loaded, buffers, lent._reinterpret(x_ring.dtype, [BLOCK_K // PIECE, BLOCK_M, PIECE], PIECE_SHARED),
            ROW, PIECE, BUFFERS, LAG, LAYOUT, FUNCTION, ALPHA, GATE_LIMIT, UP_LIMIT, UP_OFFSET,
        )  # fmt: skip
        if HAS_WEIGHTS:
            gl.store(Dots + pid_n.to(gl.int64) * num_slots + first_row + offs_r, dots, mask=offs_r < length)
        # "+ 0": Triton 3.6 takes a variable that begins as another carried one for one that never changes.
        first_row, length, pid_n, rows, slots = first_row1 + 0, length1 + 0, pid_n1 + 0, rows1 + 0, slots1 + 0
        first_row1, length1, pid_n1, rows1 = first_row2 + 0, length2 + 0, pid_n2 + 0, rows2 + 0
    async_copy.wait_group(0)
    tma.store_wait(0)


@gluon.jit
def _piece_buffers(dtype: gl.constexpr, PIECE: gl.constexpr, BUFFERS: gl.constexpr):
    """(loaded, buffers) of a consumer: barriers, and room for gate and up of a piece, side by side; allocated one by one, so
    that the compiler sees that they are different ones."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * PIECE, element_bitwidth=16, rank=2)
    loaded = ()
    buffers = ()
    for place in gl.static_range(BUFFERS):
        loaded += (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)  # type: ignore[assignment]
        buffers += (gl.allocate_shared_memory(dtype, [BLOCK_M, 2 * PIECE], layout),)  # type: ignore[assignment]
        mbarrier.init(loaded[place], count=1)
    return loaded, buffers


@gluon.jit(do_not_specialize=["x_vectors", "pre_vectors", "N", "num_slots", "capacity", "num_columns", "num_steps"])
def _sdd_activation_backward_gluon_kernel(
    X, W, Pre, GradPre, Scaled, PreRows,        # [T, H], descriptors of the weight, of [M, 2, N] twice, of [M, 1, N]; [M, 2N]
    Weights, Dots,                              # [M], [column tiles, M]
    Tokens, Slots, Tiles, NumTiles,             # [M], [M], [3, tiles], []
    x_vectors, pre_vectors, stride_w, N, num_slots, capacity, num_columns, num_steps,
    GROUP: gl.constexpr, DENSE_DEPTH: gl.constexpr, HAS_WEIGHTS: gl.constexpr, SLOTS: gl.constexpr, PIECE: gl.constexpr,
    BUFFERS: gl.constexpr, LAG: gl.constexpr, FETCH_LEAD: gl.constexpr, FUNCTION: gl.constexpr, ALPHA: gl.constexpr,
    GATE_LIMIT: gl.constexpr, UP_LIMIT: gl.constexpr, UP_OFFSET: gl.constexpr,
):  # fmt: skip
    """`x_vectors`, `pre_vectors`: the strides of their rows in 8 elements, which 16 bytes are."""
    gl.static_assert(2 * BLOCK_N // PIECE % (2 * BUFFERS) == 0, "tiles must find the barriers of pieces in one phase")
    dtype: gl.constexpr = X.dtype.element_ty
    x_ring0 = gl.allocate_shared_memory(dtype, [X_SLOTS, BLOCK_M, BLOCK_K], SHARED)
    x_ring1 = gl.allocate_shared_memory(dtype, [X_SLOTS, BLOCK_M, BLOCK_K], SHARED)
    w_ring = weight_ring(dtype, DENSE_DEPTH, SLOTS)
    loaded0, buffers0 = _piece_buffers(dtype, PIECE, BUFFERS)
    loaded1, buffers1 = _piece_buffers(dtype, PIECE, BUFFERS)
    full, empty = barriers(1, SLOTS)
    num_tiles = gl.load(NumTiles)
    stride_xt = x_vectors * 8
    gl.warp_specialize([
        (_consumer, (
            0, X, Pre, GradPre, Scaled, Weights, Dots, Tokens, Slots, Tiles, stride_xt, stride_w, num_slots,
            capacity, num_tiles, num_columns, num_steps, x_ring0, w_ring, loaded0, buffers0, full, empty,
            GROUP, DENSE_DEPTH, HAS_WEIGHTS, SLOTS, PIECE, BUFFERS, LAG, FUNCTION, ALPHA, GATE_LIMIT, UP_LIMIT, UP_OFFSET,
        )),
        (_consumer, (
            1, X, Pre, GradPre, Scaled, Weights, Dots, Tokens, Slots, Tiles, stride_xt, stride_w, num_slots,
            capacity, num_tiles, num_columns, num_steps, x_ring1, w_ring, loaded1, buffers1, full, empty,
            GROUP, DENSE_DEPTH, HAS_WEIGHTS, SLOTS, PIECE, BUFFERS, LAG, FUNCTION, ALPHA, GATE_LIMIT, UP_LIMIT, UP_OFFSET,
        )),
        (_producer, (
            W, PreRows, Tiles, pre_vectors * 8, N, capacity, num_tiles, num_columns, num_steps, w_ring, full, empty,
            GROUP, DENSE_DEPTH, SLOTS, BUFFERS * PIECE, FETCH_LEAD,
        )),
    ], [4, 4], [232, 40])  # fmt: skip


def num_column_tiles(weight: StackedWeight) -> int:
    return ceil_div(weight.columns.widest, TILE.block_n)


def applies(
    x: Tensor, weight: StackedWeight, form: Tensor | None, pre: Tensor, activation: Activation, config: GemmConfig
) -> bool:
    """Whether this kernel does at once what `sdd` and `activation_backward` would: where the kernel of `sdd` in Gluon applies,
    and the activation is a gated one of two halves. `form` is what `weight_form` gave for the weight."""
    return (
        activation.weight_halves == 2
        and rows_are_describable(pre, 2)
        and sdd_gluon.applies(x, weight, form, None, None, config)
    )


def launch_sdd_activation_backward(
    x: Tensor,
    weight: StackedWeight,
    form: Tensor,
    topology: Topology,
    pre: Tensor,
    activation: Activation,
    weights: Tensor | None,
    grad_pre: Tensor,
    scaled: Tensor,
    dots: Tensor | None,
    plan: Plan = PLAN,
) -> None:
    """Fill `grad_pre` [M, 2N], `scaled` [M, N] and, with `weights`, `dots` [column tiles, M], but for rows that were dropped,
    where `applies`."""
    schedule = topology.schedule(TILE.block_m)
    num_columns = num_column_tiles(weight)
    flat = None if weights is None else weights.reshape(-1)
    box = (TILE.block_n, TILE.block_k) if form is weight.data else (TILE.block_k, TILE.block_n)
    block_m, swizzle = TILE.block_m // 2, 2 * plan.piece
    flags = constants(activation)
    del flags["INTERLEAVED"]
    launch(
        _sdd_activation_backward_gluon_kernel, x.device, (min(schedule.capacity * num_columns, num_programs(x.device)),),
        x, SwizzledDescriptor.of(describe(form, 1, 1, *box)),
        SwizzledDescriptor.of(describe_both_halves(pre, block_m, plan.piece), swizzle),
        SwizzledDescriptor.of(describe_both_halves(grad_pre, block_m, plan.piece), swizzle),
        SwizzledDescriptor.of(describe_rows(scaled, block_m, plan.piece), swizzle), pre,
        flat, dots, topology.tokens, topology.slots, schedule.tiles, schedule.num_tiles,
        x.stride(0) // 8, pre.stride(0) // 8, 0 if flat is None else flat.stride(0), weight.columns.widest,
        topology.num_slots, schedule.capacity, num_columns, weight.hidden_size // TILE.block_k,
        GROUP=8, DENSE_DEPTH=form is weight.data, HAS_WEIGHTS=flat is not None, SLOTS=plan.slots, PIECE=plan.piece,
        BUFFERS=plan.buffers, LAG=lag_of(plan), FETCH_LEAD=plan.lead, **flags, num_warps=4,
    )  # fmt: skip
