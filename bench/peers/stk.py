"""The products of the Sparse Toolkit (stk), with which MegaBlocks computes: peers of sdd and dsd, not of the layer.

Its matrices are made of blocks of 128 x 128, so the rows of each expert are padded to multiples of 128. The places of the
blocks, which its format has in 16 bits, are given to its kernels in 32: Triton 3.2 and newer would multiply them in 16 bits and
lose the addresses from the 256th row or column of blocks on.

Written after the sources of 0.7.1; run in Triton's interpreter only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from blocksparse_moe_kernels import BlockSparse, Columns, Topology

from ..inputs import Case
from ..variants import Tensors, Variant
from .requirements import missing, unsupported

if TYPE_CHECKING:
    from stk import Matrix

BLOCK = 128


def why_not(case: Case) -> str | None:
    reason = missing("stanford-stk", "0.7.1") or unsupported(case, (torch.float16, torch.bfloat16))
    return reason or unsupported_sizes(case)


def unsupported_sizes(case: Case) -> str | None:
    if case.shape.H % BLOCK or case.shape.F % BLOCK:
        return f"needs sizes of whole blocks of {BLOCK}; H={case.shape.H} and F={case.shape.F} are not all so"
    return None


def sdd(x: Tensor, w: Tensor, rows: Topology) -> Variant:
    """Gathered tokens, padding among them (any token will do), times the weights of all experts side by side."""
    import stk

    from blocksparse_moe_kernels.stk_conversion import from_stk, to_stk

    columns = Columns.equal(w.shape[1], w.shape[0])
    blocks = to_stk(BlockSparse(x.new_zeros(rows.num_slots, w.shape[1]), rows, columns))
    pattern = _in_32_bits(blocks, blocks.data)
    tokens = torch.zeros(pattern.size()[0], dtype=torch.int64, device=x.device)
    tokens[_places(rows)] = rows.tokens.long()
    side_by_side = w.flatten(0, 1).t()  # [H, E * N]

    def run() -> Tensors:
        return (stk.ops.sdd(x.index_select(0, tokens), side_by_side, pattern).data,)

    def comparable(results: Tensors) -> Tensors:
        return (from_stk(_in_32_bits(pattern, results[0]), rows, columns).values,)

    return Variant("stk", "peer", run, comparable)


def dsd(s: BlockSparse, w: Tensor) -> Variant:
    """The sparse matrix, in blocks beforehand, times the weights of all experts one above the other."""
    import stk

    from blocksparse_moe_kernels.stk_conversion import to_stk

    blocks, stacked, places = to_stk(s), w.reshape(-1, w.shape[2]), _places(s.topology)
    matrix = _in_32_bits(blocks, blocks.data)
    return Variant("stk", "peer", lambda: (stk.ops.dsd(matrix, stacked),), lambda results: (results[0][places],))


def _places(rows: Topology) -> Tensor:
    """[M], where each row is among the padded ones."""
    counts = rows.counts.long()
    padding = (-counts % BLOCK).cumsum(0)
    before = F.pad(padding[:-1], (1, 0)).repeat_interleave(counts)
    return torch.arange(rows.num_slots, device=rows.device) + before


def _in_32_bits(matrix: Matrix, data: Tensor) -> Matrix:
    """`data` in the places of a matrix."""
    import stk

    rows, columns, columns_t = (places.int() for places in (matrix.row_indices, matrix.column_indices, matrix.column_indices_t))
    tables = (columns_t, matrix.offsets_t, matrix.block_offsets_t)
    return stk.Matrix(matrix.size(), data, rows, columns, matrix.offsets, *tables)
