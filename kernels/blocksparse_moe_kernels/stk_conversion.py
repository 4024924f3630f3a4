"""`BlockSparse` as `stk.Matrix`, the format of the Sparse Toolkit that MegaBlocks computes with, and back.

stk stores square blocks row after row (block compressed sparse row). Each expert's block [n_e, N_e] is padded with zeros to
multiples of the block, so that expert e becomes ceil(n_e / b) x ceil(N_e / b) dense blocks, to the right of and below those
of the experts before it. Dropped rows have no place there. Values convert both ways with their gradients.

Source: stk.Matrix of stanford-stk 0.7, https://github.com/stanford-futuredata/stk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from .block_sparse import BlockSparse, Columns, check_columns
from .topology import Topology
from .versions import require

require("stanford-stk", "0.7.1", "conversion to and from stk.Matrix")

import stk  # noqa: E402

_MOST_BLOCKS = torch.iinfo(torch.int16).max


@dataclass(frozen=True)
class _Pattern:
    """Blocks of the padded matrix, in the order of stk; int64 on the host.

    Attributes:
        block: b.
        tall, wide: [E], blocks of each expert down and across.
        row_indices, column_indices: [blocks], place of each block.
        offsets: [block rows + 1], first block of each block row.
    """

    block: int
    tall: Tensor
    wide: Tensor
    row_indices: Tensor
    column_indices: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, operation: str, topology: Topology, columns: Columns, block: int) -> _Pattern:
        check_columns(operation, topology, columns)
        tall = _blocks_across(topology.offsets.cpu().long().diff(), block)
        wide = _blocks_across(torch.tensor(columns.widths), block)
        if max(tall.sum(), wide.sum()) > _MOST_BLOCKS:
            raise ValueError(
                f"{operation}: stk.Matrix numbers blocks in 16 bits, at most {_MOST_BLOCKS} block rows and block columns; "
                f"needed are {tall.sum()} x {wide.sum()} blocks of {block}. Use larger blocks, or convert fewer experts."
            )
        first_column = wide.cumsum(0) - wide
        expert = torch.arange(topology.num_experts).repeat_interleave(tall)
        offsets = _offsets(wide[expert])
        row = torch.arange(expert.numel()).repeat_interleave(wide[expert])
        column = torch.arange(row.numel()) - offsets[row] + first_column[expert[row]]
        return cls(block, tall, wide, row, column, offsets)

    @property
    def block_rows(self) -> int:
        return self.offsets.numel() - 1

    @property
    def block_columns(self) -> int:
        return int(self.wide.sum())

    @property
    def size(self) -> torch.Size:
        return torch.Size((self.block_rows * self.block, self.block_columns * self.block))

    def transposed(self) -> tuple[Tensor, Tensor, Tensor]:
        """What stk keeps for the transpose: column indices, offsets, and the block that stands at each place."""
        order = self.column_indices.argsort(stable=True)
        per_column = self.column_indices.bincount(minlength=self.block_columns)
        return self.row_indices[order], _offsets(per_column), order


def to_stk(block_sparse: BlockSparse, block: int = 128) -> stk.Matrix:
    """The same matrix, each expert's rows and columns padded with zeros to multiples of `block`. Synchronises.

    Args:
        block_sparse: [M, sum N_e], any dtype; a transposed one becomes a transposed stk.Matrix.
        block: height and width of a block. stk's own products compute with 128 only.
    Returns:
        stk.Matrix on the same device; its values are a differentiable function of those of `block_sparse`.
    Raises:
        ValueError: the matrix has more than 32767 rows or columns of blocks, which stk numbers in 16 bits.
    """
    if not isinstance(block, int) or block < 1:
        raise ValueError(f"to_stk: block must be an integer of at least 1; got {block}.")
    if block_sparse.transposed:
        return to_stk(block_sparse.T, block).t()
    pattern = _Pattern.of("to_stk", block_sparse.topology, block_sparse.columns, block)
    tiles = []
    for values in block_sparse.blocks():
        rows, width = values.shape
        padded = F.pad(values, (0, -width % block, 0, -rows % block))
        tiles.append(rearrange(padded, "(r i) (c j) -> (r c) i j", i=block, j=block))
    device = block_sparse.device
    column_indices_t, offsets_t, block_offsets_t = pattern.transposed()
    return stk.Matrix(
        pattern.size,
        torch.cat(tiles),
        pattern.row_indices.to(device, torch.int16),
        pattern.column_indices.to(device, torch.int16),
        pattern.offsets.to(device, torch.int32),
        column_indices_t.to(device, torch.int16),
        offsets_t.to(device, torch.int32),
        block_offsets_t.to(device, torch.int32),
    )


def from_stk(matrix: stk.Matrix, topology: Topology, columns: Columns) -> BlockSparse:
    """Inverse of `to_stk`; what stands in the padding is left behind. Synchronises.

    Args:
        matrix: must have exactly the blocks that `to_stk` gives for `topology` and `columns`, in its order.
        topology: M rows over E experts.
        columns: columns of each expert.
    Returns:
        BlockSparse in the dtype of the matrix, zero in dropped rows; transposed if the matrix is.
    Raises:
        ValueError: the patterns differ; the message says where. TypeError: not an stk.Matrix.
    """
    if not isinstance(matrix, stk.Matrix):
        raise TypeError(f"from_stk: expected an stk.Matrix; got {type(matrix).__name__}.")
    if not matrix.is_contiguous():
        return from_stk(matrix.t(), topology, columns).T
    pattern = _Pattern.of("from_stk", topology, columns, matrix.blocking)
    if difference := _difference(matrix, pattern):
        raise ValueError(
            f"from_stk: the matrix does not have the pattern of the topology and columns {columns}: {difference}. "
            "Was it made from another topology, with other columns?"
        )
    tall, wide = pattern.tall.tolist(), pattern.wide.tolist()
    tiles_of_expert = matrix.data.split((pattern.tall * pattern.wide).tolist())
    blocks = [
        rearrange(tiles, "(r c) i j -> (r i) (c j)", r=r, c=c)[:rows, :width]
        for tiles, r, c, rows, width in zip(tiles_of_expert, tall, wide, topology.counts.tolist(), columns.widths, strict=True)
    ]
    return BlockSparse.from_blocks(blocks, topology, columns)


def _difference(matrix: stk.Matrix, pattern: _Pattern) -> str | None:
    """The first thing in which the matrix differs from the pattern."""
    if tuple(matrix.size()) != tuple(pattern.size):
        return f"it is {list(matrix.size())} in blocks of {matrix.blocking}, expected {list(pattern.size)}"
    blocks = pattern.row_indices.numel()
    if matrix.data.shape[0] != blocks:
        return f"it has {matrix.data.shape[0]} blocks, expected {blocks}"
    for name in ("row_indices", "column_indices", "offsets"):
        found, expected = getattr(matrix, name).long().cpu(), getattr(pattern, name)
        different = (found != expected).nonzero()
        if different.numel():
            at = int(different[0])
            return f"{name}[{at}] is {found[at]}, expected {expected[at]}"
    return None


def _blocks_across(sizes: Tensor, block: int) -> Tensor:
    return (sizes + block - 1) // block


def _offsets(counts: Tensor) -> Tensor:
    return F.pad(counts.cumsum(0), (1, 0))
