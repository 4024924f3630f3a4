"""BlockSparse: the values of a block-sparse matrix, with the rows of a `Topology` and the columns of `Columns`.

Row r has the columns of its expert and no others. Values are stored without padding, expert after expert:

    equal experts    values [M, N]: row r of the topology is row r of `values`
    unequal experts  values [M * max(N_e)] flat: the block of expert e is [n_e, N_e], row-major, from `block_offsets()[e]`
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import index
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .topology import Topology

if TYPE_CHECKING:
    import stk


@dataclass(frozen=True)
class Columns:
    """Columns of each expert, known on the host; made by `Columns.equal` and `Columns.of`.

    Attributes:
        num_experts: E.
        widest: max(N_e).
        unequal: N_e of each expert, where they differ.
    """

    num_experts: int
    widest: int
    unequal: tuple[int, ...] | None = None

    @classmethod
    def equal(cls, width: int, num_experts: int) -> Columns:
        """The same number of columns for every expert."""
        try:
            width, num_experts = index(width), index(num_experts)
        except TypeError:
            raise TypeError(f"Columns.equal: both must be integers; got {width!r} and {num_experts!r}.") from None
        if num_experts < 1 or width < 1:
            raise ValueError(f"Columns: every expert needs at least one column; got {width} columns for {num_experts} experts.")
        return cls(num_experts, width)

    @classmethod
    def of(cls, widths: Sequence[int]) -> Columns:
        """N_e of each expert."""
        try:
            widths = tuple(map(index, widths))
        except TypeError:
            raise TypeError(f"Columns.of: the columns of each expert must be integers; got {widths!r}.") from None
        if not widths or min(widths) < 1:
            raise ValueError(f"Columns.of: every expert needs at least one column; got {widths}.")
        return cls(len(widths), max(widths), None if min(widths) == max(widths) else widths)

    @property
    def widths(self) -> tuple[int, ...]:
        """N_e of each expert."""
        return (self.widest,) * self.num_experts if self.unequal is None else self.unequal

    @property
    def total(self) -> int:
        """Sum of N_e: rows of a flat weight."""
        return sum(self.widths)

    @property
    def are_equal(self) -> bool:
        return self.unequal is None

    def times(self, factor: int) -> Columns:
        """Every width multiplied: the 2F columns of a gated pre-activation from the F of its activation."""
        unequal = None if self.unequal is None else tuple(factor * width for width in self.unequal)
        return Columns(self.num_experts, factor * self.widest, unequal)

    def offsets(self) -> tuple[int, ...]:
        """First column of each expert, and the total."""
        return (0, *accumulate(self.widths))

    def __str__(self) -> str:
        return f"{self.widest} x {self.num_experts}" if self.are_equal else str(list(self.widths))


@dataclass(frozen=True, eq=False)
class BlockSparse:
    """A block-sparse matrix of M rows and `columns.total` columns.

    Attributes:
        values: [M, N] when experts have one size, else flat [M * max(N_e)]; see the module's docstring. In a transposed
            matrix the values stay as they are.
        topology: rows.
        columns: columns of each expert.
        transposed: made by `.T`; only `dsd` takes such a matrix.
    """

    values: Tensor
    topology: Topology
    columns: Columns
    transposed: bool = False

    def __post_init__(self) -> None:
        for name, kind in (("values", Tensor), ("topology", Topology), ("columns", Columns)):
            if not isinstance(getattr(self, name), kind):
                came = type(getattr(self, name)).__name__
                raise TypeError(f"BlockSparse: {name} must be a {kind.__name__}; got a {came}. sdd makes a BlockSparse.")
        rows, columns = self.topology.num_slots, self.columns
        check_columns("BlockSparse", self.topology, columns)
        expected = values_shape(rows, columns)
        if tuple(self.values.shape) != expected:
            raise ValueError(
                f"BlockSparse: values must be {list(expected)} for {rows} rows and columns {columns}; "
                f"got {list(self.values.shape)}."
            )
        if self.values.device != self.topology.device:
            raise ValueError(
                f"BlockSparse: values and topology must be on one device; "
                f"got {self.values.device} and {self.topology.device}. Move either with .to()."
            )

    @property
    def T(self) -> BlockSparse:
        """The transpose, without moving a value."""
        return BlockSparse(self.values, self.topology, self.columns, not self.transposed)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def shape(self) -> tuple[int, int]:
        shape = (self.topology.num_slots, self.columns.total)
        return shape[::-1] if self.transposed else shape

    def block_offsets(self) -> Tensor:
        """[E + 1] int64 on the device: where each expert's block begins in the flattened values."""
        return block_offsets(self.topology, self.columns)

    def end(self) -> tuple[Tensor, int]:
        """(ends, scale): the first element of `values` behind the rows that are kept is ends[-1] * scale."""
        if self.columns.are_equal:
            return self.topology.offsets, self.columns.widest
        return self.block_offsets(), 1

    def blocks(self) -> list[Tensor]:
        """The block [n_e, N_e] of each expert, empty ones included: views of `values`. Synchronises."""
        shapes = _block_shapes(self.topology, self.columns)
        rows = [n for n, _ in shapes]
        if self.columns.are_equal:
            return list(self.values[: sum(rows)].split(rows))
        sizes = [math.prod(shape) for shape in shapes]
        flat = self.values[: sum(sizes)].split(sizes)
        return [block.unflatten(0, shape) for block, shape in zip(flat, shapes, strict=True)]

    @classmethod
    def from_blocks(cls, blocks: Sequence[Tensor], topology: Topology, columns: Columns) -> BlockSparse:
        """Inverse of `blocks`; the values of dropped rows are zero. Differentiable; synchronises."""
        check_columns("BlockSparse.from_blocks", topology, columns)
        expected, found = _block_shapes(topology, columns), [tuple(block.shape) for block in blocks]
        if found != expected:
            raise ValueError(
                f"BlockSparse.from_blocks: the experts' blocks must be [n_e, N_e] = {expected} for this topology "
                f"and columns {columns}; got {found}."
            )
        shape = values_shape(topology.num_slots, columns)
        used = torch.cat([block.reshape(-1) for block in blocks])
        unused = used.new_zeros(math.prod(shape) - used.numel())
        return cls(torch.cat((used, unused)).view(shape), topology, columns)

    def to_dense(self) -> Tensor:
        """[M, columns.total] with zeros elsewhere (transposed if the matrix is). Differentiable; synchronises."""
        dense = self.values.new_zeros(self.topology.num_slots, self.columns.total)
        row = column = 0
        for block in self.blocks():
            rows, width = block.shape
            dense[row : row + rows, column : column + width] = block
            row, column = row + rows, column + width
        return dense.T if self.transposed else dense

    @classmethod
    def from_dense(cls, dense: Tensor, topology: Topology, columns: Columns) -> BlockSparse:
        """Keep the entries of dense [M, columns.total] that the pattern has; dropped rows are zero. Synchronises."""
        expected = (topology.num_slots, columns.total)
        if tuple(dense.shape) != expected:
            raise ValueError(
                f"BlockSparse.from_dense: expected [M, sum of columns] = {list(expected)}; got {list(dense.shape)}. "
                "Give rows in the order of the topology, and a transposed matrix as dense.T."
            )
        check_columns("BlockSparse.from_dense", topology, columns)
        rows, starts = topology.offsets.tolist(), columns.offsets()
        blocks = [dense[rows[e] : rows[e + 1], starts[e] : starts[e + 1]] for e in range(columns.num_experts)]
        return cls.from_blocks(blocks, topology, columns)

    def to_stk(self, block: int = 128) -> stk.Matrix:
        """`stk.Matrix`, each expert's rows and columns padded with zeros to multiples of `block`. Synchronises."""
        from .stk_conversion import to_stk

        return to_stk(self, block)

    @classmethod
    def from_stk(cls, matrix: stk.Matrix, topology: Topology, columns: Columns) -> BlockSparse:
        """Inverse of `to_stk`: the matrix must have the padded pattern of `topology` and `columns`. Synchronises."""
        from .stk_conversion import from_stk

        return from_stk(matrix, topology, columns)


def check_columns(operation: str, topology: Topology, columns: Columns) -> None:
    """Refuse columns of another number of experts than the topology has."""
    if columns.num_experts != topology.num_experts:
        raise ValueError(
            f"{operation}: columns describe {columns.num_experts} experts; the topology has {topology.num_experts}. "
            "Were they built for different layers?"
        )


def _block_shapes(topology: Topology, columns: Columns) -> list[tuple[int, int]]:
    rows = (last - first for first, last in pairwise(topology.offsets.tolist()))
    return list(zip(rows, columns.widths, strict=True))


def values_shape(num_slots: int, columns: Columns) -> tuple[int, ...]:
    """Shape of `BlockSparse.values`."""
    return (num_slots, columns.widest) if columns.are_equal else (num_slots * columns.widest,)


def block_offsets(topology: Topology, columns: Columns) -> Tensor:
    """[E + 1] int64 on the device of `topology`: first element of each expert's block in the flattened values."""
    widths = column_offsets(columns, topology.device).diff()
    return torch.cat((widths.new_zeros(1), (topology.counts * widths).cumsum(0)))


def column_offsets(columns: Columns, device: torch.device) -> Tensor:
    """[E + 1] int64 on `device`: first column of each expert."""
    if columns.are_equal:
        return torch.arange(0, columns.total + 1, columns.widest, device=device)
    tracing = torch.compiler.is_compiling() or type(torch.empty(0)) is not Tensor
    if tracing:
        return torch.tensor(columns.offsets(), device=device)
    return _cached_column_offsets(columns, device)


@lru_cache(maxsize=256)
def _cached_column_offsets(columns: Columns, device: torch.device) -> Tensor:
    """Copied to a device once, as such a copy synchronises. Fake tensors of a trace must not come in here."""
    with torch.inference_mode(False):
        return torch.tensor(columns.offsets(), device=device)


def new_weight(values: Tensor, columns: Columns, hidden_size: int) -> Tensor:
    """An empty weight for `columns`: [E, N, H], or flat [sum N_e, H] if they differ; dtype and device of `values`."""
    if columns.are_equal:
        return values.new_empty(columns.num_experts, columns.widest, hidden_size)
    return values.new_empty(columns.total, hidden_size)
