"""Conversion between BlockSparse and stk.Matrix, against dense matrices and stk's own operations."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blocksparse_moe_kernels import BlockSparse, Columns, Topology, reference
from blocksparse_moe_kernels.block_sparse import block_offsets, values_shape

from .support import DEVICE, column_choices, routings

stk = pytest.importorskip("stk", reason="needs stanford-stk, which needs Triton")

blocks = st.integers(1, 20)


@st.composite
def matrices(draw, dtypes=(torch.float32,)) -> BlockSparse:
    """No value is zero, and those behind the rows that are kept are NaN."""
    routing = draw(routings())
    topology, columns = routing.topology, draw(column_choices(routing.num_experts))
    values = 1 + torch.rand(values_shape(topology.num_slots, columns), device=DEVICE)
    values.view(-1)[int(block_offsets(topology, columns)[-1]) :] = torch.nan
    return BlockSparse(values.to(draw(st.sampled_from(dtypes))), topology, columns)


def padded(s: BlockSparse, block: int) -> Tensor:
    """The dense matrix that stk should hold: each expert's rows and columns padded, dropped rows left out."""
    parts = [F.pad(part, (0, -part.shape[1] % block, 0, -part.shape[0] % block)) for part in s.blocks()]
    return torch.block_diag(*parts)


@given(matrices(dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16)), blocks)
def test_round_trip_is_exact(s, block):
    matrix = s.to_stk(block)
    if s.dtype == torch.float16 and matrix.nnz:
        matrix.validate()
    back = BlockSparse.from_stk(matrix, s.topology, s.columns)
    assert back.dtype == s.dtype and back.topology is s.topology
    assert torch.equal(back.values, s.values.nan_to_num(0))


@given(matrices(), blocks)
def test_matrix_is_the_padded_one(s, block):
    matrix, dense = s.to_stk(block), padded(s, block)
    assert tuple(matrix.size()) == tuple(dense.shape)
    assert matrix.blocking == block and matrix.data.shape[0] == matrix.row_indices.numel()
    assert torch.equal(stk.ops.to_dense(matrix), dense)


@given(matrices(), blocks)
def test_metadata_is_that_of_stk(s, block):
    """stk finds the same blocks, in the same order, in the dense matrix, and the same transpose."""
    ours = s.to_stk(block)
    theirs = stk.ops.to_sparse(padded(s, block), block)
    for name in ("row_indices", "column_indices", "offsets"):
        assert getattr(ours, name).dtype == getattr(theirs, name).dtype
        assert torch.equal(getattr(ours, name), getattr(theirs, name))

    order = sorted(range(len(ours.row_indices)), key=lambda i: (int(ours.column_indices[i]), int(ours.row_indices[i])))
    assert ours.block_offsets_t.tolist() == order
    assert ours.column_indices_t.tolist() == [int(ours.row_indices[i]) for i in order]
    per_column = ours.column_indices.long().bincount(minlength=ours.size()[1] // block)
    assert torch.equal(ours.offsets_t.long(), F.pad(per_column.cumsum(0), (1, 0)))
    for name in ("column_indices_t", "offsets_t", "block_offsets_t"):
        assert getattr(ours, name).dtype == getattr(theirs, name).dtype


@given(matrices(), blocks)
def test_transposed(s, block):
    matrix = s.T.to_stk(block)
    assert not matrix.is_contiguous() and tuple(matrix.size()) == tuple(s.to_stk(block).size()[::-1])
    back = BlockSparse.from_stk(matrix, s.topology, s.columns)
    assert back.transposed and torch.equal(back.to_dense(), s.T.to_dense())
    assert torch.equal(BlockSparse.from_stk(s.to_stk(block).t(), s.topology, s.columns).to_dense(), s.T.to_dense())


@given(matrices(), blocks)
def test_gradients_pass(s, block):
    values = s.values.clone().requires_grad_()
    data = BlockSparse(values, s.topology, s.columns).to_stk(block).data
    back = BlockSparse.from_stk(s.to_stk(block), s.topology, s.columns)
    grad = torch.randn_like(data)
    (grad_values,) = torch.autograd.grad(data, values, grad)
    matrix = s.to_stk(block)
    matrix.data.copy_(grad)
    assert torch.equal(grad_values, BlockSparse.from_stk(matrix, s.topology, s.columns).values)

    matrix.requires_grad_(True)
    kept = BlockSparse.from_stk(matrix, s.topology, s.columns).values
    (grad_data,) = torch.autograd.grad(kept, matrix.data, back.values)
    assert torch.equal(grad_data, s.to_stk(block).data)


# -------------------------------------------------------------------- the products of stk


def pad_rows(x: Tensor, lengths: list[int]) -> Tensor:
    return torch.cat([F.pad(part, (0, 0, 0, -part.shape[0] % 128)) for part in x[: sum(lengths)].split(lengths)])


def test_products_of_stk_agree():
    """sdd, dsd and the transposed dsd of stk, on a converted pattern and converted values: small integers, so exactly.

    Two experts with rows, one without, dropped rows; H = 128, as stk multiplies whole blocks only.
    """
    ids = torch.tensor([[0, 2], [2, -1], [2, 0], [2, 3]], device=DEVICE)
    topology, columns = Topology.from_ids(ids, 3), Columns.of([40, 70, 130])
    x, w = (torch.randint(-2, 3, (n, 128), device=DEVICE).float() for n in (4, columns.total))
    counts, widths = topology.counts.tolist(), list(columns.widths)
    rows, padded_w = pad_rows(x[topology.tokens], counts), pad_rows(w, widths)
    s = reference.sdd(x, w, topology, columns=columns)

    computed = stk.ops.sdd(rows, padded_w.t(), s.to_stk())
    assert torch.equal(BlockSparse.from_stk(computed, topology, columns).values, s.values)
    assert torch.equal(stk.ops.dsd(s.to_stk(), padded_w), pad_rows(reference.dsd(s, w), counts))
    expected = pad_rows(reference.dsd(s.T, x, order="tokens"), widths)
    assert torch.equal(stk.ops.dsd(s.T.to_stk(), rows), expected)


# -------------------------------------------------------------------- mistakes and limits


@pytest.mark.case("A5")
def test_more_blocks_than_16_bits_can_number():
    """stk f7ba880: ids of blocks wrap. The limit is named, before a value or an index is made."""
    one_row = Topology.from_counts(torch.tensor([1], device=DEVICE), 1)
    at_limit = BlockSparse(torch.ones(1, 32_767, device=DEVICE), one_row, Columns.equal(32_767, 1))
    assert torch.equal(BlockSparse.from_stk(at_limit.to_stk(1), one_row, at_limit.columns).values, at_limit.values)

    experts = Topology.from_counts(torch.zeros(512, dtype=torch.int64, device=DEVICE), 0)
    too_wide = BlockSparse(torch.zeros(0, 8192, device=DEVICE), experts, Columns.equal(8192, 512))
    with pytest.raises(
        ValueError, match=r"to_stk: .*16 bits, at most 32767 .*; needed are 0 x 32768 blocks of 128. Use larger"
    ):
        too_wide.to_stk(128)
    assert too_wide.to_stk(256).size()[1] == 512 * 8192

    for rows, width in [(32_768, 1), (2**20, 2**20)]:
        topology = Topology.from_counts(torch.tensor([rows], device=DEVICE), rows)
        values = torch.zeros(1, device=DEVICE).expand(rows, width)
        with pytest.raises(ValueError, match=f"to_stk: .*; needed are {rows} x {width} blocks of 1"):
            BlockSparse(values, topology, Columns.equal(width, 1)).to_stk(1)


def test_mistakes():
    topology = Topology.from_counts(torch.tensor([3, 0, 2], device=DEVICE), 6)
    columns = Columns.of([4, 2, 3])
    s = BlockSparse(torch.ones(math.prod(values_shape(6, columns)), device=DEVICE), topology, columns)
    with pytest.raises(ValueError, match=r"to_stk: block must be an integer of at least 1; got 0"):
        s.to_stk(0)
    with pytest.raises(TypeError, match=r"from_stk: expected an stk\.Matrix; got Tensor"):
        BlockSparse.from_stk(torch.zeros(3, 3), topology, columns)

    matrix = s.to_stk(2)
    for other, others_columns, message in [
        ([5, 0, 2], columns, r"it is \[6, 10\] in blocks of 2, expected \[8, 10\]\. Was it made from another topology"),
        ([3, 0, 2], Columns.of([4, 2, 5]), r"columns \[4, 2, 5\]: it is \[6, 10\] in blocks of 2, expected \[6, 12\]"),
        (
            [1, 0, 4],
            columns,
            r"column_indices\[2\] is 0, expected 3",
        ),
        ([3, 0, 2], Columns.of([2, 4, 3]), "it has 6 blocks, expected 4"),
        ([2, 2, 2], columns, "it has 6 blocks, expected 5"),
        ([3, 0, 2], Columns.equal(3, 2), "from_stk: columns describe 2 experts; the topology has 3"),
    ]:
        rows = Topology.from_counts(torch.tensor(other, device=DEVICE), 6)
        with pytest.raises(ValueError, match=message):
            BlockSparse.from_stk(matrix, rows, others_columns)

    matrix.column_indices[1] = 0
    with pytest.raises(ValueError, match=r"column_indices\[1\] is 0, expected 1"):
        BlockSparse.from_stk(matrix, topology, columns)
