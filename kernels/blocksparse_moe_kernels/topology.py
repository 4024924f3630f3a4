"""Topology: which routed row belongs to which expert.

The router chooses K experts for each of T tokens. Every one of these M = T * K choices is a *slot*; `Topology` sorts the
slots by expert (stably, so that the order is reproducible) and calls a sorted slot a *row*:

    slot 0 1 2 3 4 5     expert  1 0 1 1 0 2        tokens = slot // K
    row  0 1 2 3 4 5     expert  0 0 1 1 1 2        slots  = 1 4 0 2 3 5        rows = 2 0 3 4 1 5

It knows rows and nothing of columns: those are the `Columns` of a `BlockSparse`. Everything is computed on the device of
the ids, without a host synchronisation, and no shape depends on the routing.

The row-sorted, dropless form of routing is that of MegaBlocks, arXiv:2211.15841.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .config import choose_block_m
from .sort_op import has_kernel, sort_ids, tile_capacity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .block_sparse import Columns

_ID_DTYPES = (torch.int32, torch.int64)
_EXPERTS_SHOWN = 16


@dataclass(frozen=True, eq=False)
class Schedule:
    """Row tiles of at most `block_m` rows that never cross an expert: the work list of a kernel.

    Attributes:
        block_m: height of a tile.
        tiles: [3, capacity] int32: expert, first row and length of each tile; unused entries are -1. The capacity
            `(M + min(E, M) * (block_m - 1)) // block_m` bounds the number of tiles whatever the routing is.
        num_tiles: 0-dim int32, entries that are used.
    """

    block_m: int
    tiles: Tensor
    num_tiles: Tensor

    @property
    def experts(self) -> Tensor:
        """[capacity] int32, expert of each tile."""
        return self.tiles[0]

    @property
    def first_rows(self) -> Tensor:
        """[capacity] int32, first row of each tile."""
        return self.tiles[1]

    @property
    def lengths(self) -> Tensor:
        """[capacity] int32, rows in each tile."""
        return self.tiles[2]

    @property
    def capacity(self) -> int:
        return self.tiles.shape[1]


@dataclass(frozen=True, eq=False)
class Topology:
    """Rows of a block-sparse matrix, expert after expert.

    Build one with `from_ids`, `from_counts` or `from_pairs`. Rows of slots that were dropped (their expert id lies outside
    `[0, E)`) come last, from `num_rows` on; kernels neither read nor write them.

    Attributes:
        tokens: [M] int32, token of each row.
        slots: [M] int32, slot of each row, a permutation.
        rows: [M] int32, row of each slot: the inverse of `slots`, -1 where the slot is dropped.
        offsets: [E + 1] int32, first row of each expert, and the number of rows that are kept.
        num_tokens: T.
        token_slots: [M] int32, slots in the order of their tokens; None when that order is the identity.
        token_offsets: [T + 1] int32, where each token's slots begin in `token_slots`; None when every token has K slots.
        schedules: row tiles made ahead of time, see `schedule`: those that were asked for, and on a GPU those of the products.
        by_size: what `experts_by_size` returns, made ahead of time by `from_ids` on a GPU.
    """

    tokens: Tensor
    slots: Tensor
    rows: Tensor
    offsets: Tensor
    num_tokens: int
    token_slots: Tensor | None = None
    token_offsets: Tensor | None = None
    schedules: tuple[Schedule, ...] = ()
    by_size: Tensor | None = None

    # ---------------------------------------------------------------- constructors

    @classmethod
    def from_ids(cls, expert_ids: Tensor, num_experts: int, *, block_ms: Sequence[int] = ()) -> Topology:
        """Topology of a router's choice.

        Args:
            expert_ids: [T, K] int32 or int64. A token may name an expert twice; ids outside `[0, E)` mean "not here".
            num_experts: E, at least 1.
            block_ms: tile heights whose schedules are wanted.
        Raises:
            ValueError: shape or number of experts; TypeError: dtype.
        On a GPU one kernel does it or, of many ids, three; elsewhere torch's sort does; the result is the same.
        Oracle: reference.topology.
        """
        if not isinstance(expert_ids, Tensor):
            raise TypeError(f"Topology.from_ids: expert_ids must be a tensor [T, K]; got a {type(expert_ids).__name__}.")
        if expert_ids.ndim != 2:
            raise ValueError(
                f"Topology.from_ids: expert_ids must be [T, K], one row a token; got shape {tuple(expert_ids.shape)}. "
                "Give a single expert per token as expert_ids[:, None]."
            )
        num_tokens, top_k = expert_ids.shape
        _check_ids("Topology.from_ids", "expert_ids", expert_ids, num_experts)
        if has_kernel(expert_ids.device, num_experts):
            block_m = (
                block_ms[0] if isinstance(block_ms, Sequence) and block_ms else choose_block_m(expert_ids.numel(), num_experts)
            )
            tokens, slots, rows, offsets, by_size, tiles, num_tiles = sort_ids(expert_ids, num_experts, block_m)
            topology = cls(
                tokens, slots, rows, offsets, num_tokens, schedules=(Schedule(block_m, tiles, num_tiles),), by_size=by_size
            )
            return topology.with_schedules(block_ms[1:])
        slots, rows, offsets = _sort_by(expert_ids.reshape(-1), num_experts)
        tokens = torch.div(slots, top_k, rounding_mode="floor") if top_k else slots
        return cls(tokens, slots, rows, offsets, num_tokens).with_schedules(block_ms)

    @classmethod
    def from_counts(cls, counts: Tensor, num_rows: int, *, block_ms: Sequence[int] = ()) -> Topology:
        """Topology of rows that are sorted already: row r is token r and slot r.

        Args:
            counts: [E] int32 or int64, rows of each expert; a negative count is 0.
            num_rows: M, known on the host; rows beyond `counts.sum()` are dropped, and counts beyond M are cut off.
            block_ms: tile heights whose schedules are wanted.
        Raises:
            ValueError: shape or a negative number of rows; TypeError: dtype.
        """
        _check_tensors("Topology.from_counts", counts=counts)
        _check_integer("Topology.from_counts", "num_rows", num_rows)
        if counts.ndim != 1 or num_rows < 0:
            raise ValueError(
                "Topology.from_counts: counts must be [E] and num_rows at least 0; "
                f"got shape {tuple(counts.shape)} and {num_rows}."
            )
        if counts.dtype not in _ID_DTYPES:
            raise TypeError(f"Topology.from_counts: counts must be int32 or int64; got {counts.dtype}. Use counts.long().")
        if counts.numel() == 0:
            raise ValueError("Topology.from_counts: a topology needs at least one expert; counts is empty.")
        _check_int32("Topology.from_counts", num_rows)
        ends = counts.long().clamp(0, num_rows).cumsum(0).clamp(max=num_rows).int()
        offsets = torch.cat((ends.new_zeros(1), ends))
        row = torch.arange(num_rows, dtype=torch.int32, device=counts.device)
        rows = torch.where(row < ends[-1], row, -1)
        return cls(row, row, rows, offsets, num_rows).with_schedules(block_ms)

    @classmethod
    def from_pairs(
        cls, tokens: Tensor, experts: Tensor, *, num_tokens: int, num_experts: int, block_ms: Sequence[int] = ()
    ) -> Topology:
        """Topology of (token, expert) pairs, any number of them per token: slot i is pair i.

        Args:
            tokens: [M] int32 or int64; pairs whose token lies outside `[0, T)` are dropped.
            experts: [M] int32 or int64; pairs whose expert lies outside `[0, E)` are dropped.
            num_tokens: T.
            num_experts: E, at least 1.
            block_ms: tile heights whose schedules are wanted.
        Raises:
            ValueError: shapes or sizes; TypeError: dtypes.
        """
        _check_tensors("Topology.from_pairs", tokens=tokens, experts=experts)
        _check_integer("Topology.from_pairs", "num_tokens", num_tokens)
        if tokens.device != experts.device:
            raise ValueError(f"Topology.from_pairs: tokens are on {tokens.device} and experts on {experts.device}; move one.")
        if tokens.ndim != 1 or tokens.shape != experts.shape:
            raise ValueError(
                "Topology.from_pairs: tokens and experts must be [M] both; "
                f"got {tuple(tokens.shape)} and {tuple(experts.shape)}."
            )
        if tokens.dtype not in _ID_DTYPES:
            raise TypeError(f"Topology.from_pairs: tokens must be int32 or int64; got {tokens.dtype}.")
        if not 0 <= num_tokens < 2**31:
            raise ValueError(f"Topology.from_pairs: num_tokens must be in [0, 2**31); got {num_tokens}.")
        _check_ids("Topology.from_pairs", "experts", experts, num_experts)
        known = (tokens >= 0) & (tokens < num_tokens)
        slots, rows, offsets = _sort_by(torch.where(known, experts, -1), num_experts)
        safe_tokens = torch.where(known, tokens, 0).int()
        token_slots, _, token_offsets = _sort_by(torch.where(known, tokens, -1), num_tokens)
        topology = cls(safe_tokens[slots], slots, rows, offsets, num_tokens, token_slots, token_offsets)
        return topology.with_schedules(block_ms)

    # ---------------------------------------------------------------- what it knows

    @property
    def num_experts(self) -> int:
        """E."""
        return self.offsets.shape[0] - 1

    @property
    def num_slots(self) -> int:
        """M, the number of slots, dropped ones included."""
        return self.slots.shape[0]

    @property
    def num_rows(self) -> Tensor:
        """0-dim int32 on the device: rows that are kept."""
        return self.offsets[-1]

    @property
    def counts(self) -> Tensor:
        """[E] int32, rows of each expert."""
        return self.offsets.diff()

    @property
    def device(self) -> torch.device:
        return self.offsets.device

    @property
    def slots_per_token(self) -> int:
        """K; only meaningful when every token has the same number of slots, that is when `token_offsets` is None."""
        return self.num_slots // max(1, self.num_tokens)

    def row_experts(self) -> Tensor:
        """[M] int64, expert of each row; E for dropped rows."""
        row = torch.arange(self.num_slots, dtype=torch.int32, device=self.device)
        return torch.searchsorted(self.offsets, row, right=True) - 1

    def experts_by_size(self) -> Tensor:
        """[E] int32, experts by falling number of rows, those of one number in their own order."""
        return self.counts.argsort(descending=True, stable=True).int() if self.by_size is None else self.by_size

    def schedule(self, block_m: int) -> Schedule:
        """Row tiles of height `block_m` (at least 1), made now unless a constructor was asked for them."""
        for schedule in self.schedules:
            if schedule.block_m == block_m:
                return schedule
        _check_integer("Topology.schedule", "block_m", block_m)
        if block_m < 1:
            raise ValueError(f"Topology.schedule: block_m must be at least 1; got {block_m}.")
        E = self.num_experts
        capacity = tile_capacity(self.num_slots, E, block_m)
        offsets = self.offsets.long()
        tiles_of_expert = (offsets.diff() + block_m - 1) // block_m
        tile_ends = tiles_of_expert.cumsum(0)
        tile = torch.arange(capacity, device=self.device)
        expert = torch.searchsorted(tile_ends, tile, right=True)
        used = expert < E
        expert = expert.clamp(max=E - 1)
        first_row = offsets[expert] + (tile - tile_ends[expert] + tiles_of_expert[expert]) * block_m
        length = (offsets[expert + 1] - first_row).clamp(max=block_m)
        tiles = torch.where(used, torch.stack((expert, first_row, length)), -1).int()
        return Schedule(block_m, tiles, tile_ends[-1].int())

    def to_dense_mask(self, columns: Columns | None = None) -> Tensor:
        """[M, sum of columns] bool: where the block-sparse matrix has entries; without `columns`, one column per expert."""
        from .block_sparse import check_columns, column_offsets

        column_experts = torch.arange(self.num_experts, device=self.device)
        if columns is not None:
            check_columns("Topology.to_dense_mask", self, columns)
            column = torch.arange(columns.total, device=self.device)
            column_experts = torch.searchsorted(column_offsets(columns, self.device), column, right=True) - 1
        return self.row_experts()[:, None] == column_experts

    def __str__(self) -> str:
        lines = [f"Topology: {self.num_tokens} tokens, {self.num_slots} slots, {self.num_experts} experts on {self.device}"]
        if self.device.type == "meta":
            return lines[0]
        counts = self.counts.tolist()
        kept, fewest, most = sum(counts), min(counts), max(counts)
        lines.append(
            f"  {kept} rows, {self.num_slots - kept} dropped; per expert {fewest} to {most}, "
            f"mean {kept / len(counts):.1f}, {counts.count(0)} empty"
        )
        for expert, count in enumerate(counts[:_EXPERTS_SHOWN]):
            bar = "█" * round(32 * count / most) if most else ""
            lines.append(f"  expert {expert:>4} {count:>8} {bar}".rstrip())
        if len(counts) > _EXPERTS_SHOWN:
            lines.append(f"  ... {len(counts) - _EXPERTS_SHOWN} more experts")
        return "\n".join(lines)

    def plot(self, columns: Columns | None = None, ax: Axes | None = None) -> Axes:
        """Draw the pattern (rows down, experts across, dropped rows blank) and return the matplotlib axes. Synchronises."""
        from .plot import plot_topology

        return plot_topology(self, columns, ax)

    def with_schedules(self, block_ms: Sequence[int]) -> Topology:
        """The same topology, which keeps the row tiles of these heights."""
        if not isinstance(block_ms, Sequence):
            raise TypeError(f"Topology: block_ms must be a sequence of tile heights, such as (128,); got {block_ms!r}.")
        if not block_ms:
            return self
        schedules = self.schedules + tuple(self.schedule(block_m) for block_m in block_ms)
        tables = (self.tokens, self.slots, self.rows, self.offsets, self.num_tokens, self.token_slots, self.token_offsets)
        return Topology(*tables, schedules, self.by_size)


def _check_ids(operation: str, name: str, ids: Tensor, num_experts: int) -> None:
    _check_integer(operation, "num_experts", num_experts)
    if num_experts < 1:
        raise ValueError(f"{operation}: a topology needs at least one expert; got num_experts={num_experts}.")
    if ids.dtype not in _ID_DTYPES:
        raise TypeError(
            f"{operation}: {name} must be int32 or int64; got {ids.dtype}. "
            f"Convert with {name}.long(); narrower types cannot hold every expert id."
        )
    _check_int32(operation, ids.numel())


def _check_tensors(operation: str, **tensors: object) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{operation}: {name} must be a tensor; got a {type(tensor).__name__}. Make one with torch.as_tensor."
            )


def _check_integer(operation: str, name: str, number: object) -> None:
    if not isinstance(number, (Integral, torch.SymInt)) or isinstance(number, bool):
        raise TypeError(f"{operation}: {name} must be an integer; got {number!r}.")


def _check_int32(operation: str, num_slots: int) -> None:
    if num_slots >= 2**31:
        raise ValueError(f"{operation}: {num_slots} slots do not fit 32-bit row numbers; split the batch below 2**31 slots.")


def _sort_by(keys: Tensor, num_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Stable sort of slots by key; keys outside `[0, num_keys)` last. Returns int32 slots [M], rows [M] and offsets."""
    here = (keys >= 0) & (keys < num_keys)
    sorted_keys, slots = torch.where(here, keys, num_keys).sort(stable=True)
    boundaries = torch.arange(num_keys + 1, dtype=sorted_keys.dtype, device=keys.device)
    offsets = torch.searchsorted(sorted_keys, boundaries, out_int32=True)
    row = torch.arange(keys.numel(), dtype=torch.int32, device=keys.device)
    rows = torch.empty_like(row).scatter_(0, slots, row)
    return slots.int(), torch.where(here, rows, -1), offsets
