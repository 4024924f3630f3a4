"""BlockSparse and Columns: shapes, conversion to dense and back, where blocks lie."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from blocksparse_moe_kernels import BlockSparse, Columns, Topology
from blocksparse_moe_kernels.block_sparse import block_offsets, column_offsets, new_weight, values_shape

from .support import DEVICE, LAYOUTS, column_choices, layouts, routings


@st.composite
def patterns(draw) -> tuple[Topology, Columns]:
    routing = draw(routings())
    return routing.topology, draw(column_choices(routing.num_experts))


def random_values(topology: Topology, columns: Columns) -> Tensor:
    """Random in the rows that are kept, NaN behind them."""
    values = torch.randn(values_shape(topology.num_slots, columns), device=DEVICE)
    values.view(-1)[int(block_offsets(topology, columns)[-1]) :] = torch.nan
    return values


# -------------------------------------------------------------------- columns


def test_columns():
    equal, varied = Columns.equal(3, 4), Columns.of(torch.tensor([3, 1, 5]))
    assert (equal.widths, equal.num_experts, equal.total, equal.widest, equal.are_equal) == ((3,) * 4, 4, 12, 3, True)
    assert (varied.widths, varied.num_experts, varied.total, varied.widest, varied.are_equal) == ((3, 1, 5), 3, 9, 5, False)
    assert varied.offsets() == (0, 3, 4, 9)
    assert varied.times(2) == Columns.of([6, 2, 10])
    assert (str(equal), str(varied)) == ("3 x 4", "[3, 1, 5]")


@pytest.mark.parametrize("widths", [(), (3, 0), (-1, 2)])
def test_columns_that_are_none(widths):
    with pytest.raises(ValueError, match="every expert needs at least one column; got"):
        Columns.of(widths)


@pytest.mark.parametrize("widths", [[2.9], "64", 5], ids=str)
def test_columns_that_are_no_integers(widths):
    with pytest.raises(TypeError, match=r"Columns\.of: the columns of each expert must be integers; got"):
        Columns.of(widths)


@pytest.mark.parametrize("columns", [Columns.equal(3, 4), Columns.of([3, 1, 5]), Columns.equal(2, 1)])
def test_column_offsets(columns):
    offsets = column_offsets(columns, DEVICE)
    assert offsets.dtype == torch.int64 and offsets.device.type == DEVICE.type
    assert tuple(offsets.tolist()) == columns.offsets()
    assert column_offsets(columns, torch.device("meta")).is_meta


def test_column_offsets_outlive_a_trace():
    """The table is kept between calls; one made while tracing is a tensor without data and must not be."""
    columns = Columns.of([3, 1, 5, 7])
    topology = Topology.from_counts(torch.tensor([1, 0, 2, 1], device=DEVICE), 4)
    with FakeTensorMode():
        column_offsets(columns, DEVICE)
    assert tuple(column_offsets(columns, DEVICE).tolist()) == columns.offsets()
    with FakeTensorMode():
        assert column_offsets(columns, DEVICE).diff().shape == (4,)
    assert topology.to_dense_mask(columns).sum() == 3 + 2 * 5 + 7


def test_column_offsets_made_in_inference_mode_serve_training():
    columns = Columns.of([3, 1, 5, 9])
    with torch.inference_mode():
        column_offsets(columns, DEVICE)
    assert not column_offsets(columns, DEVICE).is_inference()


# -------------------------------------------------------------------- the matrix


@given(patterns())
def test_dense_and_back(pattern):
    """Values behind the last row, NaN here, are never read."""
    topology, columns = pattern
    values = random_values(topology, columns)
    s = BlockSparse(values, topology, columns)
    mask = topology.to_dense_mask(columns)
    dense = s.to_dense()

    assert dense.shape == s.shape == mask.shape == (topology.num_slots, columns.total)
    assert torch.equal(dense != 0, mask)
    starts, row = columns.offsets(), 0
    for expert, block in enumerate(s.blocks()):
        rows, width = block.shape
        assert torch.equal(dense[row : row + rows, starts[expert] : starts[expert] + width], block)
        row += rows

    outside = torch.where(mask, dense, torch.nan)
    for back in (BlockSparse.from_dense(outside, topology, columns), BlockSparse.from_blocks(s.blocks(), topology, columns)):
        assert torch.equal(back.values, values.nan_to_num(0))
        assert (back.topology, back.columns, back.transposed) == (topology, columns, False)


@given(patterns(), layouts)
def test_values_of_any_strides(pattern, layout):
    topology, columns = pattern
    values = random_values(topology, columns)
    strided = BlockSparse(LAYOUTS[layout](values), topology, columns)
    assert torch.equal(strided.to_dense(), BlockSparse(values, topology, columns).to_dense())


@given(patterns())
def test_gradients(pattern):
    """Each way, the gradient is the other way's value."""
    topology, columns = pattern
    values = random_values(topology, columns).requires_grad_()
    grad = torch.randn(topology.num_slots, columns.total, device=DEVICE)
    (grad_values,) = torch.autograd.grad(BlockSparse(values, topology, columns).to_dense(), values, grad)
    assert torch.equal(grad_values, BlockSparse.from_dense(grad, topology, columns).values)

    dense = torch.randn(topology.num_slots, columns.total, device=DEVICE, requires_grad=True)
    kept = BlockSparse.from_dense(dense, topology, columns).values
    (grad_dense,) = torch.autograd.grad(kept, dense, values.detach())
    assert torch.equal(grad_dense, BlockSparse(values.detach(), topology, columns).to_dense())


@given(patterns())
def test_transpose(pattern):
    topology, columns = pattern
    s = BlockSparse(random_values(topology, columns), topology, columns)
    assert s.T.values is s.values and s.T.transposed and not s.T.T.transposed
    assert s.T.shape == s.shape[::-1]
    assert torch.equal(s.T.to_dense(), s.to_dense().T)


@given(patterns())
def test_block_offsets(pattern):
    topology, columns = pattern
    offsets = BlockSparse(random_values(topology, columns), topology, columns).block_offsets()
    assert offsets.dtype == torch.int64 and offsets.device == topology.device
    expected, start = [0], 0
    for count, width in zip(topology.counts.tolist(), columns.widths, strict=True):
        start += count * width
        expected.append(start)
    assert offsets.tolist() == expected


@pytest.mark.case("A4")
@pytest.mark.parametrize("columns", [Columns.equal(2**20, 3), Columns.of([2**20, 1, 2**20])])
def test_block_offsets_pass_32_bits(columns):
    """DeepGEMM f63d7f2: an operand of more than 2**31 elements. Only its offsets are made here."""
    topology = Topology.from_counts(torch.tensor([3000, 0, 5000], device=DEVICE), 9000)
    assert block_offsets(topology, columns).tolist() == [0, 3000 * 2**20, 3000 * 2**20, 8000 * 2**20]


def test_blocks_are_views():
    topology = Topology.from_counts(torch.tensor([1, 0, 2], device=DEVICE), 4)
    for columns in (Columns.equal(3, 3), Columns.of([3, 1, 5])):
        s = BlockSparse(torch.zeros(values_shape(4, columns), device=DEVICE), topology, columns)
        s.blocks()[2].fill_(1)
        assert s.values.sum() == 2 * columns.widths[2] == s.to_dense().sum()


def test_new_weight():
    values = torch.zeros(1, device=DEVICE, dtype=torch.bfloat16)
    assert new_weight(values, Columns.equal(3, 4), 7).shape == (4, 3, 7)
    assert new_weight(values, Columns.of([3, 1, 5]), 7).shape == (9, 7)
    assert new_weight(values, Columns.equal(3, 4), 7).dtype == torch.bfloat16


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies(copied):
    topology, columns = Topology.from_counts(torch.tensor([1, 2], device=DEVICE), 3), Columns.of([2, 3])
    s = BlockSparse(random_values(topology, columns), topology, columns)
    assert torch.equal(copied(s).to_dense(), s.to_dense())


# -------------------------------------------------------------------- mistakes


ROWS = Topology.from_counts(torch.tensor([1, 2]), 4)
EQUAL, VARIED = Columns.equal(3, 2), Columns.of([2, 3])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: BlockSparse(torch.zeros(4, 2), ROWS, EQUAL), r"BlockSparse: values must be \[4, 3\] .*; got \[4, 2\]"),
        (lambda: BlockSparse(torch.zeros(4, 3), ROWS, VARIED), r"values must be \[12\] for 4 rows and columns \[2, 3\]"),
        (
            lambda: BlockSparse(torch.zeros(4, 3), ROWS, Columns.equal(3, 5)),
            "BlockSparse: columns describe 5 experts; the topology has 2. Were they built for different layers",
        ),
        (lambda: BlockSparse(torch.zeros(4, 3, device="meta"), ROWS, EQUAL), "must be on one device; got meta and cpu"),
        (
            lambda: BlockSparse.from_dense(torch.zeros(4, 4), ROWS, EQUAL),
            r"from_dense: expected \[M, sum of columns\] = \[4, 6\]; got \[4, 4\]",
        ),
        (
            lambda: BlockSparse.from_dense(torch.zeros(4, 9), ROWS, Columns.equal(3, 3)),
            "from_dense: columns describe 3 experts",
        ),
        (
            lambda: BlockSparse.from_blocks([torch.zeros(1, 3), torch.zeros(1, 3)], ROWS, EQUAL),
            r"from_blocks: .*\[\(1, 3\), \(2, 3\)\] .*; got \[\(1, 3\), \(1, 3\)\]",
        ),
        (lambda: BlockSparse.from_blocks([], ROWS, Columns.equal(3, 1)), "from_blocks: columns describe 1 experts"),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda s: (None, s.topology, s.columns), "values must be a Tensor; got a NoneType"),
        (lambda s: (s.values, s.columns, s.columns), "topology must be a Topology; got a Columns"),
        (lambda s: (s.values, s.topology, 4), "columns must be a Columns; got a int"),
    ],
    ids=["values", "topology", "columns"],
)
def test_arguments_of_other_types_are_refused(arguments, message):
    topology = Topology.from_ids(torch.zeros(3, 1, dtype=torch.long), 2)
    s = BlockSparse(torch.zeros(3, 4), topology, Columns.equal(4, 2))
    with pytest.raises(TypeError, match=f"BlockSparse: {message}"):
        BlockSparse(*arguments(s))
