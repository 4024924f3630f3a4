"""Rows that are padded: what a library needs that multiplies rows in groups of whole blocks.

Our own products neither store nor move padding. A library whose operands carry one scale per block of rows, or whose GEMM wants
whole blocks, takes the rows of each expert rounded up; `PaddedRows` says where each row then lies, and is made at the last
moment.

    expert      0         1 (none)   2                      alignment 4
    row         0 1 2                3 4 5 6 7
    padded row  0 1 2 -   -          4 5 6 7 8 - - -        counts = 4 0 8
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .topology import Topology


@dataclass(frozen=True, eq=False)
class PaddedRows:
    """The rows of `topology`, those of each expert rounded up to a multiple of the alignment.

    Attributes:
        topology: where the rows come from.
        counts: rows of each expert with padding, on the host; P is their sum.
        tokens: [P] int32, token of each padded row, -1 for padding.
        slots: [P] int32, slot of each padded row, -1 for padding.
        rows: [M] int32, padded row of each slot, -1 where the slot is dropped.
        padded: topology of the P rows themselves: row r is token r and slot r, none is dropped.
    """

    topology: Topology
    counts: tuple[int, ...]
    tokens: Tensor
    slots: Tensor
    rows: Tensor
    padded: Topology

    @property
    def num_rows(self) -> int:
        """P."""
        return sum(self.counts)


def pad_rows(topology: Topology, alignment: int) -> PaddedRows:
    """The rows of each expert rounded up to a multiple of `alignment`. Reads the counts on the host: one synchronisation.

    An expert without rows stays without. If no expert has any, the first one gets a block of padding, as libraries do not take
    nothing.

    Raises:
        ValueError: `alignment` is below 1.
    """
    if alignment < 1:
        raise ValueError(f"pad_rows: alignment must be at least 1; got {alignment}.")
    counts = (topology.counts + alignment - 1) // alignment * alignment
    on_host = counts.tolist()
    if not any(on_host):
        on_host[0] = alignment
        counts = torch.tensor(on_host, dtype=counts.dtype, device=counts.device)
    num_rows = sum(on_host)
    padded = Topology.from_counts(counts, num_rows)
    expert = padded.row_experts()
    row = padded.tokens - padded.offsets[expert] + topology.offsets[expert]
    is_row = row < topology.offsets[expert + 1]
    source = torch.where(is_row, row, 0)
    if topology.num_slots == 0:
        nothing = torch.full_like(row, -1)
        return PaddedRows(topology, tuple(on_host), nothing, nothing, topology.rows, padded)
    # The row of a slot moves by as much as its expert begins later; a dropped slot has none.
    moved = topology.rows + (padded.offsets - topology.offsets)[_expert_of_slots(topology)]
    return PaddedRows(
        topology,
        tuple(on_host),
        torch.where(is_row, topology.tokens[source], -1),
        torch.where(is_row, topology.slots[source], -1),
        torch.where(topology.rows < 0, -1, moved),
        padded,
    )


def _expert_of_slots(topology: Topology) -> Tensor:
    """[M] int64, expert of each slot; any for a dropped one."""
    rows = topology.rows.clamp(min=0)
    return topology.row_experts()[rows].clamp(max=topology.num_experts - 1)
