"""Topology: a stable counting sort of the slots by expert, and the row tiles.

    count      slots of each expert in each block of slots              ids [M] -> counts [blocks, E]
    scan       slots of each expert before each block                   counts, in place; their totals [E]
    place      slot -> row and back, and this block's share of tiles    rows, slots, tokens [M]; tiles [3, capacity]; the rest

Within its block a slot counts those before it that go to the same expert. Few slots are sorted in one launch: there it counts
all that come before it. Every integer has one place whatever the order of programs, so results are bitwise repeatable; no
atomics. A counting sort instead of a general one since there are few experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..config import ceil_div, next_power_of_2
from ..sort_op import tile_capacity
from .launcher import launch
from .replay import replay


@triton.jit
def _load_keys(Ids, slot, num_slots, num_experts):
    """Experts of slots in int32; num_experts for those that have none, as those behind the last slot."""
    expert = tl.load(Ids + slot, mask=slot < num_slots, other=-1)
    return tl.where((expert >= 0) & (expert < num_experts), expert, num_experts).to(tl.int32)


@triton.jit
def _count(key, num_experts, EXPERTS: tl.constexpr):
    here = key < num_experts
    return tl.histogram(tl.where(here, key, 0), EXPERTS, mask=here)


@triton.jit
def _store_places(Rows, Slots, Tokens, slot, key, place, num_slots, num_experts, top_k):
    mask = slot < num_slots
    tl.store(Rows + slot, tl.where(key < num_experts, place, -1), mask=mask)
    tl.store(Slots + place, slot, mask=mask)
    tl.store(Tokens + place, slot // top_k, mask=mask)


@triton.jit
def _write_tiles(
    Tiles, first_tile, capacity, starts, counts, num_experts, block_m, EXPERTS: tl.constexpr, TILES: tl.constexpr
):
    """Entries first_tile to first_tile + TILES of the schedule; `starts` and `counts` [EXPERTS] are the rows of the experts."""
    offs_e = tl.arange(0, EXPERTS)
    num_tiles = (counts + block_m - 1) // block_m
    ends = tl.cumsum(num_tiles, 0)
    tile = first_tile + tl.arange(0, TILES)
    expert = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1)
    mine = expert[:, None] == offs_e[None, :]
    row = (tile - tl.sum(tl.where(mine, (ends - num_tiles)[None, :], 0), 1)) * block_m
    first_row = row + tl.sum(tl.where(mine, starts[None, :], 0), 1)
    length = tl.minimum(tl.sum(tl.where(mine, counts[None, :], 0), 1) - row, block_m)
    used, mask = expert < num_experts, tile < capacity
    tl.store(Tiles + tile, tl.where(used, expert, -1), mask=mask)
    tl.store(Tiles + capacity + tile, tl.where(used, first_row, -1), mask=mask)
    tl.store(Tiles + 2 * capacity + tile, tl.where(used, length, -1), mask=mask)


@triton.jit
def _write_totals(Offsets, NumTiles, counts, num_experts, block_m, EXPERTS: tl.constexpr):
    offs_e = tl.arange(0, EXPERTS)
    tl.store(Offsets, 0)
    tl.store(Offsets + 1 + offs_e, tl.cumsum(counts, 0), mask=offs_e < num_experts)
    tl.store(NumTiles, tl.sum((counts + block_m - 1) // block_m, 0))


@triton.jit
def _write_by_size(BySize, counts, num_experts, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """Experts by falling number of rows, those of one number in their own order."""
    offs_e = tl.arange(0, EXPERTS)
    for first in range(0, num_experts, CHUNK):
        expert = first + tl.arange(0, CHUNK)
        count = tl.sum(tl.where(expert[:, None] == offs_e[None, :], counts[None, :], 0), 1)
        earlier = (counts[None, :] == count[:, None]) & (offs_e[None, :] < expert[:, None])
        place = tl.sum((earlier | (counts[None, :] > count[:, None])).to(tl.int32), 1)
        tl.store(BySize + place, expert, mask=expert < num_experts)


@triton.jit(do_not_specialize=["num_slots", "num_experts", "top_k", "capacity", "block_m"])
def _sort_few_kernel(
    Ids, Tokens, Slots, Rows, Offsets, BySize, Tiles, NumTiles,
    num_slots, num_experts, top_k, capacity, block_m,
    BLOCK: tl.constexpr, STEP: tl.constexpr, EXPERTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The first programs place BLOCK slots each, the others count all slots and write TILES tiles each."""
    block = tl.program_id(0) - tl.cdiv(num_slots, BLOCK)
    others = tl.arange(0, STEP)
    if block < 0:
        slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        key = _load_keys(Ids, slot, num_slots, num_experts)
        before = tl.zeros((BLOCK, STEP), tl.int32)
        for first in range(0, num_slots, STEP):
            other = first + others
            other_key = _load_keys(Ids, other, num_slots, num_experts)
            earlier = (other_key[None, :] == key[:, None]) & (other[None, :] < slot[:, None])
            before += (earlier | (other_key[None, :] < key[:, None])).to(tl.int32)
        _store_places(Rows, Slots, Tokens, slot, key, tl.sum(before, 1), num_slots, num_experts, top_k)
    else:
        counts = tl.zeros((EXPERTS,), tl.int32)
        for first in range(0, num_slots, STEP):
            counts += _count(_load_keys(Ids, first + others, num_slots, num_experts), num_experts, EXPERTS)
        ends = tl.cumsum(counts, 0)
        if block == 0:
            _write_totals(Offsets, NumTiles, counts, num_experts, block_m, EXPERTS)
            _write_by_size(BySize, counts, num_experts, EXPERTS, TILES)
        _write_tiles(Tiles, block * TILES, capacity, ends - counts, counts, num_experts, block_m, EXPERTS, TILES)


@triton.jit(do_not_specialize=["num_slots", "num_experts"])
def _count_kernel(Ids, Counts, num_slots, num_experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    block = tl.program_id(0)
    counts = _count(_load_keys(Ids, block * BLOCK + tl.arange(0, BLOCK), num_slots, num_experts), num_experts, EXPERTS)
    offs_e = tl.arange(0, EXPERTS)
    tl.store(Counts + block * num_experts + offs_e, counts, mask=offs_e < num_experts)


@triton.jit(do_not_specialize=["num_blocks", "num_experts"])
def _scan_kernel(Counts, Totals, num_blocks, num_experts, CHUNK: tl.constexpr, SHARE: tl.constexpr):
    """For SHARE experts: `Counts` becomes the number of their slots before the block."""
    expert = tl.program_id(0) * SHARE + tl.arange(0, SHARE)
    known = expert < num_experts
    total = tl.zeros((SHARE,), tl.int32)
    for first in range(0, num_blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        mask = (block < num_blocks)[:, None] & known[None, :]
        ptrs = Counts + block[:, None] * num_experts + expert[None, :]
        counts = tl.load(ptrs, mask=mask, other=0)
        tl.store(ptrs, tl.cumsum(counts, 0) - counts + total[None, :], mask=mask)
        total += tl.sum(counts, 0)
    tl.store(Totals + expert, total, mask=known)


@triton.jit(do_not_specialize=["num_slots", "num_experts", "top_k", "capacity", "block_m"])
def _place_kernel(
    Ids, Before, Totals, Tokens, Slots, Rows, Offsets, BySize, Tiles, NumTiles,
    num_slots, num_experts, top_k, capacity, block_m,
    BLOCK: tl.constexpr, STEP: tl.constexpr, EXPERTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    offs_e = tl.arange(0, EXPERTS)
    known = offs_e < num_experts
    before = tl.load(Before + block * num_experts + offs_e, mask=known, other=0)
    counts = tl.load(Totals + offs_e, mask=known, other=0)
    starts = tl.cumsum(counts, 0) - counts
    slot = block * BLOCK + tl.arange(0, BLOCK)
    key = _load_keys(Ids, slot, num_slots, num_experts)
    here = key < num_experts
    earlier = tl.zeros((BLOCK, STEP), tl.int32)
    for step in range(0, BLOCK, STEP):
        other = block * BLOCK + step + tl.arange(0, STEP)
        other_key = _load_keys(Ids, other, num_slots, num_experts)
        earlier += ((other_key[None, :] == key[:, None]) & (other[None, :] < slot[:, None])).to(tl.int32)
    first_dropped = tl.sum(counts, 0) + block * BLOCK - tl.sum(before, 0)
    first = tl.where(here, tl.gather(starts + before, tl.where(here, key, 0), 0), first_dropped)
    _store_places(Rows, Slots, Tokens, slot, key, first + tl.sum(earlier, 1), num_slots, num_experts, top_k)
    _write_tiles(Tiles, block * TILES, capacity, starts, counts, num_experts, block_m, EXPERTS, TILES)
    if block == 0:
        _write_totals(Offsets, NumTiles, counts, num_experts, block_m, EXPERTS)
        _write_by_size(BySize, counts, num_experts, EXPERTS, TILES)


_BLOCK = 256
"""Slots that one program counts and places."""

FEW_SLOTS = 4096
"""Up to so many, looking at all of them for each takes less than two launches more."""


def sort_ids(ids: Tensor, num_experts: int, block_m: int) -> tuple[Tensor, ...]:
    """Everything of `Topology.from_ids`, with one schedule.

    Args:
        ids: [T, K] int32 or int64; ids outside `[0, E)` are dropped.
        num_experts: E; one program ranks them by size, which takes time with its square.
        block_m: height of the row tiles, at least 1.
    Returns:
        tokens [M], slots [M], rows [M], offsets [E + 1], by_size [E], tiles [3, capacity] and num_tiles [], all int32.
    """
    return replay(_sort_ids, ids, num_experts, block_m)


def _sort_ids(ids: Tensor, num_experts: int, block_m: int) -> tuple[Tensor, ...]:
    num_slots, top_k = ids.numel(), max(1, ids.shape[1])
    capacity = tile_capacity(num_slots, num_experts, block_m)

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=ids.device)

    tokens, slots, rows, offsets = new(num_slots), new(num_slots), new(num_slots), new(num_experts + 1)
    by_size, tiles, num_tiles = new(num_experts), new(3, capacity), new()
    results = (tokens, slots, rows, offsets, by_size, tiles, num_tiles)
    flat = ids.reshape(-1).contiguous()
    experts = max(16, next_power_of_2(num_experts))
    if num_slots <= FEW_SLOTS:
        block, tiles_each = 64, max(8, min(64, 8192 // experts))
        programs = ceil_div(num_slots, block) + max(1, ceil_div(capacity, tiles_each))
        launch(
            _sort_few_kernel, ids.device, (programs,),
            flat, tokens, slots, rows, offsets, by_size, tiles, num_tiles,
            num_slots, num_experts, top_k, capacity, block_m,
            BLOCK=block, STEP=64, EXPERTS=experts, TILES=tiles_each, num_warps=8,
        )  # fmt: skip
        return results
    num_blocks = ceil_div(num_slots, _BLOCK)
    before, totals = new(num_blocks, num_experts), new(num_experts)
    launch(_count_kernel, ids.device, (num_blocks,), flat, before, num_slots, num_experts, BLOCK=_BLOCK, EXPERTS=experts)
    launch(
        _scan_kernel, ids.device, (ceil_div(num_experts, 16),),
        before, totals, num_blocks, num_experts,
        CHUNK=256, SHARE=16, num_warps=8,
    )  # fmt: skip
    launch(
        _place_kernel, ids.device, (num_blocks,),
        flat, before, totals, tokens, slots, rows, offsets, by_size, tiles, num_tiles,
        num_slots, num_experts, top_k, capacity, block_m,
        BLOCK=_BLOCK, STEP=32, EXPERTS=experts, TILES=max(16, next_power_of_2(ceil_div(capacity, num_blocks))), num_warps=8,
    )  # fmt: skip
    return results
