"""sdd, dsd and its transpose: values and gradients against the fp64 oracle, whatever the routing, sizes and layouts."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blocksparse_moe import dsd, sdd
from blocksparse_moe.products import implementation
from blocksparse_moe_kernels import ACTIVATIONS, BlockSparse, Columns, Topology, get_activation, reference
from blocksparse_moe_kernels.config import GemmConfig, column_product_config, row_product_config

from .support import (
    DEVICE,
    HAS_CUDA,
    assert_within_budget,
    column_choices,
    each_backend,
    each_backend_and_dtype,
    each_backend_and_dtype_slowly,
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


@each_backend_and_dtype_slowly
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


@pytest.mark.slow
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


# ---------------------------------------------------------------- operands by descriptor


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The launchers whose weight went through the tensor memory accelerator, in the order of their calls."""
    calls = []
    for launcher in ("sdd", "dsd", "dsd_transposed"):
        module = importlib.import_module(f"blocksparse_moe_kernels.triton.{launcher}")
        describe = module.describe_weight

        def spy(*arguments, describe=describe, launcher=launcher):
            calls.append(launcher)
            return describe(*arguments)

        monkeypatch.setattr(module, "describe_weight", spy)
    return calls


DESCRIBED_DTYPE = torch.bfloat16 if HAS_CUDA else torch.float16
TMA_TILE = GemmConfig(16, 32, 16, 4, 2, tma=True)
dense_axes = st.sampled_from(["hidden", "columns"])
eights = st.integers(1, 6).map(lambda number: 8 * number)


GPT_OSS = "swiglu(alpha=1.702, gate_limit=7, up_limit=7, up_offset=1, interleaved)"


def weight_of(experts: int, columns: int, hidden: int, dense_axis: str, halves: int = 1) -> torch.Tensor:
    shape = (experts, halves * columns, hidden)
    w = randn(*shape, dtype=DESCRIBED_DTYPE).to(DESCRIBED_DTYPE)
    return w if dense_axis == "hidden" else w.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.slow
@pytest.mark.skipif(HAS_CUDA and torch.cuda.get_device_capability() < (9, 0), reason="needs the copy engine of sm_90")
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_descriptors_change_nothing(described, data):
    """Every product, bit for bit: operands read and results written by the tensor memory accelerator and by pointers."""
    described.clear()
    kernels, routing = implementation("triton"), data.draw(routings())
    topology, columns, hidden = routing.topology, data.draw(eights), data.draw(eights)
    if topology.num_slots == 0:
        return
    experts, activation = routing.num_experts, get_activation(data.draw(st.sampled_from(["swiglu", "gelu", GPT_OSS])))
    w = weight_of(experts, columns, hidden, data.draw(dense_axes))
    dense_axis = data.draw(dense_axes) if activation.weight_halves == 1 else "hidden"
    up = weight_of(experts, columns, hidden, dense_axis, activation.halves)
    up_bias = weight_of(1, activation.halves * columns, experts, "hidden")[0].T if data.draw(st.booleans()) else None
    down_bias = weight_of(1, experts, hidden, "hidden")[0] if data.draw(st.booleans()) else None
    order, save_pre = data.draw(st.sampled_from(["tokens", "rows"])), data.draw(st.booleans())
    x = weight_of(1, topology.num_tokens if order == "tokens" else topology.num_slots, hidden, "hidden")[0]
    x_tokens = weight_of(1, topology.num_tokens, hidden, "hidden")[0]
    s = BlockSparse(weight_of(1, topology.num_slots, columns, "hidden")[0], topology, Columns.equal(columns, experts))
    s.values[int(topology.num_rows) :] = torch.nan

    def run(config):
        pre, act = kernels.sdd_activation(x_tokens, up, topology, activation, bias=up_bias, save_pre=save_pre, config=config)
        return (
            *([pre.values] if save_pre else []),
            act.values,
            kernels.sdd(x, w, topology, order=order, config=config).values,
            kernels.dsd(s, w, bias=down_bias, config=config),
            kernels.dsd_transposed(s, x, order=order, like=w, config=config),
        )

    by_descriptors = run(TMA_TILE)
    assert described == ["sdd", "sdd", "dsd", "dsd_transposed"]
    by_pointers = run(replace(TMA_TILE, tma=False))
    assert len(described) == 4
    kept = int(topology.num_rows)
    for found, expected in zip(by_descriptors[:-1], by_pointers[:-1], strict=True):
        assert torch.equal(found[:kept], expected[:kept])
        assert found[kept:].isnan().all(), "rows behind the last one are not written"
    rounding = 0 if HAS_CUDA else torch.finfo(DESCRIBED_DTYPE).eps  # numpy sums the transposed product in another order
    torch.testing.assert_close(by_descriptors[-1], by_pointers[-1], rtol=rounding, atol=rounding)


@pytest.mark.gpu
@pytest.mark.skipif(HAS_CUDA and torch.cuda.get_device_capability() < (9, 0), reason="needs the copy engine of sm_90")
@pytest.mark.parametrize("hidden", [2048, 2040])
def test_descriptors_change_nothing_at_real_size(hidden):
    """A race of copy engine and threads would show in some of many tiles, or in one of several runs."""
    kernels, experts, columns = implementation("triton"), 24, 776
    ids = (torch.rand(12_000, 4, device=DEVICE) ** 3 * (experts + 1)).long()
    ids[ids == 7] = -1
    topology = Topology.from_ids(ids, experts)
    kept = int(topology.num_rows)
    up, w = weight_of(experts, columns, hidden, "hidden", 2), weight_of(experts, columns, hidden, "columns")
    x = weight_of(1, 12_000, hidden, "hidden")[0]
    s = BlockSparse(weight_of(1, 48_000, 2 * columns, "hidden")[0], topology, Columns.equal(2 * columns, experts))
    s.values[kept:] = torch.nan
    rows = row_product_config(48_000, experts, hidden, x.dtype, DEVICE, tma=True)
    reduced = column_product_config(48_000, experts, x.dtype, DEVICE, tma=True)
    assert rows.tma and reduced.tma

    def run(tma):
        row_config, column_config = replace(rows, tma=tma), replace(reduced, tma=tma)
        pre, act = kernels.sdd_activation(x, up, topology, ACTIVATIONS["swiglu"], config=row_config)
        return (
            pre.values[:kept],
            act.values[:kept],
            kernels.sdd(x, w, topology, config=row_config).values[:kept],
            kernels.dsd(s, up, config=row_config)[:kept],
            kernels.dsd(BlockSparse(act.values, topology, Columns.equal(columns, experts)), w, config=row_config)[:kept],
            kernels.dsd_transposed(s, x, order="tokens", like=up, config=column_config),
            kernels.dsd_transposed(s, x[topology.tokens.long()], order="rows", config=column_config),
        )

    by_pointers = run(tma=False)
    for _ in range(10):
        for found, expected in zip(run(tma=True), by_pointers, strict=True):
            assert torch.equal(found, expected)
