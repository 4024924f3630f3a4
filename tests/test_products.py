"""sdd, dsd and its transpose: values and gradients against the fp64 oracle, whatever the routing, sizes and layouts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocksparse_moe import dsd, sdd
from blocksparse_moe_kernels import BlockSparse, Columns, Topology, reference

from .support import (
    DEVICE,
    assert_within_budget,
    column_choices,
    each_backend,
    each_backend_and_dtype,
    layouts,
    leaf,
    randn,
    routings,
    sizes,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def weight_like(columns: Columns, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    shape = (columns.num_experts, columns.widest, hidden) if columns.are_equal else (columns.total, hidden)
    return randn(*shape, dtype=dtype)


def sparse(values: torch.Tensor, topology: Topology, columns: Columns) -> BlockSparse:
    return BlockSparse(values, topology, columns)


def used(values: torch.Tensor, topology: Topology, columns: Columns) -> torch.Tensor:
    """The elements of the kept rows."""
    return values.reshape(-1)[: int(sparse(values, topology, columns).block_offsets()[-1])]


@each_backend_and_dtype
@given(data=st.data())
def test_sdd(backend, dtype, data):
    routing = data.draw(routings())
    topology, order = routing.topology, data.draw(st.sampled_from(["tokens", "rows"]))
    columns = data.draw(column_choices(routing.num_experts))
    hidden = data.draw(sizes)
    rows = topology.num_tokens if order == "tokens" else topology.num_slots
    x, w = randn(rows, hidden, dtype=dtype), weight_like(columns, hidden, dtype)
    layout_x, layout_w = data.draw(layouts), data.draw(layouts)

    def run(function, precision, **options):
        leaves = leaf(x, precision, layout_x), leaf(w, precision, layout_w)
        s = function(*leaves, topology, order=order, columns=columns, **options)
        grad = randn(*s.values.shape, dtype=dtype).to(precision)
        torch.manual_seed(0)
        return s.values, *torch.autograd.grad(s.values, leaves, grad)

    torch.manual_seed(0)
    ours = run(sdd, dtype, backend=backend)
    torch.manual_seed(0)
    oracle = run(reference.sdd, torch.float64)
    torch.manual_seed(0)
    torchs = run(reference.sdd, dtype)
    for name, *values in zip(("s", "dx", "dw"), ours, oracle, torchs, strict=True):
        assert_within_budget(name, *values, dtype)
        assert values[0].dtype == dtype


@each_backend_and_dtype
@given(data=st.data())
def test_dsd(backend, dtype, data):
    routing = data.draw(routings())
    topology = routing.topology
    columns = data.draw(column_choices(routing.num_experts))
    hidden = data.draw(sizes)
    shape = (topology.num_slots, columns.widest) if columns.are_equal else (topology.num_slots * columns.widest,)
    values, w = randn(*shape, dtype=dtype), weight_like(columns, hidden, dtype)
    grad = randn(topology.num_slots, hidden, dtype=dtype)
    grad[int(topology.num_rows) :] = torch.nan  # gradients of rows that do not exist are never read
    layout_s, layout_w = data.draw(layouts), data.draw(layouts)

    def run(function, precision, **options):
        s, weight = leaf(values, precision, layout_s), leaf(w, precision, layout_w)
        y = function(sparse(s, topology, columns), weight, **options)
        return y, *torch.autograd.grad(y, (s, weight), (grad if function is dsd else grad.nan_to_num(0)).to(precision))

    ours = run(dsd, dtype, backend=backend)
    oracle = run(reference.dsd, torch.float64)
    torchs = run(reference.dsd, dtype)
    for name, *results in zip(("y", "ds", "dw"), ours, oracle, torchs, strict=True):
        assert_within_budget(name, *results, dtype)


@each_backend_and_dtype
@given(data=st.data())
def test_dsd_of_a_transposed_matrix(backend, dtype, data):
    routing = data.draw(routings())
    topology, order = routing.topology, data.draw(st.sampled_from(["tokens", "rows"]))
    columns = data.draw(column_choices(routing.num_experts))
    hidden = data.draw(sizes)
    shape = (topology.num_slots, columns.widest) if columns.are_equal else (topology.num_slots * columns.widest,)
    rows = topology.num_tokens if order == "tokens" else topology.num_slots
    values, x = randn(*shape, dtype=dtype), randn(rows, hidden, dtype=dtype)
    grad = weight_like(columns, hidden, dtype)
    layout_s, layout_x = data.draw(layouts), data.draw(layouts)

    def run(function, precision, **options):
        s, dense = leaf(values, precision, layout_s), leaf(x, precision, layout_x)
        w = function(sparse(s, topology, columns).T, dense, order=order, **options)
        return w, *torch.autograd.grad(w, (s, dense), grad.to(precision))

    ours = run(dsd, dtype, backend=backend)
    oracle = run(reference.dsd, torch.float64)
    torchs = run(reference.dsd, dtype)
    for name, *results in zip(("w", "ds", "dx"), ours, oracle, torchs, strict=True):
        assert_within_budget(name, *results, dtype)
    for expert in (topology.counts == 0).nonzero().flatten().tolist():
        first, last = columns.offsets()[expert : expert + 2]
        block = ours[0][expert] if columns.are_equal else ours[0][first:last]
        assert torch.equal(block, torch.zeros_like(block)), "an expert without rows has exactly zero"


@each_backend
def test_two_halves_that_lie_apart(backend):
    """A weight [E, 2, N, H] of any strides is two weights side by side: interleaved rows, as gpt-oss stores them."""
    ids = torch.tensor([[0, 1], [2, 2], [-1, 0]], device=DEVICE)
    topology = Topology.from_ids(ids, 3)
    x, interleaved = randn(3, 20).float(), randn(3, 14, 20).float()
    halves = interleaved.unflatten(1, (7, 2)).transpose(1, 2)
    concatenated = halves.flatten(1, 2)
    assert not halves.is_contiguous()
    results = []
    for w in (halves, concatenated):
        w = w.detach().requires_grad_()
        s = sdd(x, w, topology, backend=backend)
        y = dsd(s, w, backend=backend)
        (grad,) = torch.autograd.grad(y.square().sum(), w)
        results.append((s.values, y, grad.reshape(3, 14, 20)))
    for apart, together in zip(*results, strict=True):
        torch.testing.assert_close(apart, together, rtol=1e-5, atol=1e-5 * together.abs().max().item())


@each_backend
def test_gradient_of_a_sum_has_stride_zero(backend):
    topology = Topology.from_ids(torch.tensor([[0], [1], [1]], device=DEVICE), 2)
    x, w = randn(3, 8).float().requires_grad_(), randn(2, 5, 8).float().requires_grad_()
    y = dsd(sdd(x, w, topology, backend=backend), w, backend=backend)
    grads = torch.autograd.grad(y.sum(), (x, w))
    expected = torch.autograd.grad(reference.dsd(reference.sdd(x, w, topology), w).sum(), (x, w))
    for ours, oracle in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, oracle)


def test_second_order_gradients():
    topology = Topology.from_ids(torch.tensor([[0, 1], [1, 2], [2, -1]], device=DEVICE), 3)
    x, w = randn(3, 4).requires_grad_(), randn(3, 5, 4).requires_grad_()

    def chain(x, w):
        s = sdd(x, w, topology, backend="torch")
        return dsd(s, w, backend="torch"), dsd(s.T, x, order="tokens", backend="torch")

    assert torch.autograd.gradcheck(chain, (x, w))
    assert torch.autograd.gradgradcheck(chain, (x, w))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(w=(4, 5, 8)), "the topology covers 3 experts; the weight has 4"),
        (dict(x=(2, 7)), "the dense operand has 7 columns"),
        (dict(x=(5, 8)), r'with order="tokens" the dense operand must be \[2, H\]'),
        (dict(w=(5,)), r"a weight is \[E, N, H\]"),
        (dict(w=(15, 8)), "a flat weight .* needs columns"),
    ],
)
@each_backend
def test_errors_say_what_to_do(backend, change, message):
    topology = Topology.from_ids(torch.tensor([[0], [2]], device=DEVICE), 3)
    shapes = {"x": (2, 8), "w": (3, 5, 8)} | change
    x, w = (torch.randn(shapes[name], device=DEVICE) for name in ("x", "w"))
    with pytest.raises(ValueError, match=message):
        sdd(x, w, topology, backend=backend)


@each_backend
def test_dtypes_must_agree(backend):
    topology = Topology.from_ids(torch.tensor([[0]], device=DEVICE), 1)
    x, w = torch.randn(1, 8, device=DEVICE), torch.randn(1, 5, 8, device=DEVICE, dtype=torch.float16)
    with pytest.raises(TypeError, match=r"convert one, for example with \.to\(torch\.float16\)"):
        sdd(x, w, topology, backend=backend)
