"""Group A: offsets, sizes and ids that do not fit 32 (or 16) bits.

On a CPU tensors are spread over virtual memory, so that real offsets pass 2**31 while hardly a page is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from blocksparse_moe import combine, dsd, sdd
from blocksparse_moe.products import implementation
from blocksparse_moe_kernels import BlockSparse, Columns, Schedule, Topology, get_activation
from blocksparse_moe_kernels.block_sparse import block_offsets, values_shape
from blocksparse_moe_kernels.config import GemmConfig
from tests.cases.helpers import Problem, far, on_cpu, relative_error, skewed_ids, virtual
from tests.support import DEVICE, HAS_CUDA, each_backend_slowly

T, H, N, E, K = 17, 40, 24, 4, 2
FAR_COLUMNS = 2049


@pytest.fixture
def leave_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter copies storages to the device and back; on the CPU these are one, and the copy fills every page."""
    from triton.runtime.interpreter import GridExecutor

    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *arguments: None)


@pytest.fixture
def virtual_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large outputs of the launchers lie in virtual memory, with room on both sides."""
    new_empty = Tensor.new_empty

    def new_empty_virtual(self: Tensor, *size, **options) -> Tensor:
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        numel = torch.Size(shape).numel()
        if numel < 2**30:
            return new_empty(self, *size, **options)
        return virtual(3 * numel, self.dtype)[numel : 2 * numel].view(*shape)

    monkeypatch.setattr(Tensor, "new_empty", new_empty_virtual)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float16)


def topology() -> Topology:
    return Topology.from_ids(torch.randint(E, (T, K)), E)


def combine_y(kernels, far: Callable) -> list[Tensor]:
    y, weights = randn(T * K, H), torch.rand(T, K)
    return [kernels.combine(far(y, 0), topology(), weights)]


def combine_y_columns(kernels, far: Callable) -> list[Tensor]:
    y, weights = randn(10, FAR_COLUMNS), torch.rand(5, 2)
    return [kernels.combine(far(y, 1), Topology.from_ids(torch.randint(E, (5, 2)), E), weights)]


def sdd_x(kernels, far: Callable) -> list[Tensor]:
    w, rows = randn(E, N, H), topology()
    tokens = kernels.sdd(far(randn(T, H), 0), w, rows).values
    return [tokens, kernels.sdd(far(randn(T * K, H), 0), w, rows, order="rows").values]


def sdd_x_columns(kernels, far: Callable) -> list[Tensor]:
    return [kernels.sdd(far(randn(T, 300), 1), randn(E, N, 300), topology()).values]


def sdd_w(kernels, far: Callable) -> list[Tensor]:
    s = kernels.sdd(randn(T, H), far(randn(E, N, H), 0), topology()).values
    swiglu = get_activation("swiglu")
    pre, hidden = kernels.sdd_activation(randn(T, H), far(randn(E, 2, N, H), 1), topology(), swiglu)
    return [s, pre.values, hidden.values]


def dsd_s(kernels, far: Callable) -> list[Tensor]:
    s = BlockSparse(far(randn(T * K, N), 0), topology(), Columns.equal(N, E))
    return [kernels.dsd(s, randn(E, N, H)), kernels.dsd(s.T, randn(T, H), order="tokens")]


def dsd_s_columns(kernels, far: Callable) -> list[Tensor]:
    s = BlockSparse(far(randn(T * K, 300), 1), topology(), Columns.equal(300, E))
    return [kernels.dsd(s, randn(E, 300, H)), kernels.dsd(s.T, randn(T, H), order="tokens")]


def dsd_w(kernels, far: Callable) -> list[Tensor]:
    s = BlockSparse(randn(T * K, N), topology(), Columns.equal(N, E))
    return [kernels.dsd(s, far(randn(E, N, H), 0)), kernels.dsd(s, far(randn(E, N, 300), 2))]


def dsd_transposed_x(kernels, far: Callable) -> list[Tensor]:
    s = BlockSparse(randn(T * K, N), topology(), Columns.equal(N, E)).T
    tokens = kernels.dsd(s, far(randn(T, H), 0), order="tokens")
    return [tokens, kernels.dsd(s, far(randn(T * K, H), 0)), kernels.dsd(s, far(randn(T, 300), 1), order="tokens")]


def bias_x(kernels, far: Callable) -> list[Tensor]:
    rows, weights, bias = topology(), torch.rand(T, K), randn(E, H)
    x, s = far(randn(T, H), 0), BlockSparse(far(randn(T * K, N), 0), topology(), Columns.equal(N, E))
    return [kernels.expert_sum_tokens(x, rows, weights), kernels.bias_dot(x, bias, rows), kernels.expert_sum(s)]


def bias_x_columns(kernels, far: Callable) -> list[Tensor]:
    rows, x = topology(), far(randn(T, 300), 1)
    s = BlockSparse(far(randn(T * K, 300), 1), rows, Columns.equal(300, E))
    return [kernels.expert_sum_tokens(x, rows), kernels.bias_dot(x, randn(E, 300), rows), kernels.expert_sum(s)]


READERS = (
    combine_y,
    combine_y_columns,
    sdd_x,
    sdd_x_columns,
    sdd_w,
    dsd_s,
    dsd_s_columns,
    dsd_w,
    dsd_transposed_x,
    bias_x,
    bias_x_columns,
)


@pytest.mark.case("A1", "A2", "A4")
@on_cpu
@each_backend_slowly
@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
@pytest.mark.parametrize("bits", [31, 34])
def test_operands_are_read_beyond_32_bits(backend, bits, read, leave_memory_alone):
    """megablocks PR 185, TransformerEngine 2908: a read at row * stride (or column * stride) wraps in 32 bits.

    Over 2**34 elements the step of a loop, block * stride, would wrap as well.
    """
    kernels = implementation(backend)
    torch.manual_seed(0)
    near = read(kernels, lambda tensor, dim: tensor.transpose(dim, 0).contiguous().transpose(0, dim))
    torch.manual_seed(0)
    for found, expected in zip(read(kernels, partial(far, span=2**bits)), near, strict=True):
        assert relative_error(found, expected) < 2e-3


LAST, WIDE = 20, 4096
FIRST = 600_000 - LAST


@pytest.fixture
def last_rows(monkeypatch: pytest.MonkeyPatch) -> Topology:
    """600 000 rows of 5 tokens and two experts, of which only those of the second expert, the last 20, are on the schedules."""
    monkeypatch.setattr("blocksparse_moe_kernels.torch_products._row_ranges", lambda _: [(1, FIRST, FIRST + LAST)])
    rows = torch.arange(FIRST + LAST, dtype=torch.int32)
    offsets = torch.tensor([0, FIRST, FIRST + LAST], dtype=torch.int32)
    tiles = torch.tensor([[1, 1], [FIRST, FIRST + 16], [16, LAST - 16]], dtype=torch.int32)
    return Topology(rows % 5, rows, rows, offsets, 5, schedules=(Schedule(16, tiles, torch.tensor(2, dtype=torch.int32)),))


def wide_tiles(backend: str, block_n: int = 1024, block_k: int = 32) -> dict[str, GemmConfig]:
    """Options that keep Triton's interpreter from running hundreds of programs."""
    interpreted = backend == "triton" and not HAS_CUDA
    return {"config": GemmConfig(16, block_n, block_k, 4, 1)} if interpreted else {}


@pytest.mark.case("A3")
@on_cpu
@each_backend_slowly
def test_results_are_written_beyond_32_bits(backend, last_rows, leave_memory_alone, virtual_outputs):
    """vLLM PR 34279: the store of the expert product forms row * columns in 32 bits. 600 000 rows, of which 20 are computed."""
    kernels, options = implementation(backend), wide_tiles(backend)
    x, w, w_down, s = randn(5, H), randn(2, WIDE, H), randn(2, N, WIDE), randn(FIRST + LAST, N)
    expected = x[last_rows.tokens[-LAST:].long()].float() @ w[1].T.float()

    assert relative_error(kernels.sdd(x, w, last_rows, **options).values[-LAST:], expected) < 2e-3
    pre, hidden = kernels.sdd_activation(x, w, last_rows, get_activation("swiglu"), **options)
    assert relative_error(pre.values[-LAST:], expected) < 2e-3
    gate, up = expected.chunk(2, dim=1)
    assert relative_error(hidden.values[-LAST:], torch.nn.functional.silu(gate) * up) < 4e-3
    y = kernels.dsd(BlockSparse(s, last_rows, Columns.equal(N, 2)), w_down, **options)
    assert relative_error(y[-LAST:], s[-LAST:].float() @ w_down[1].float()) < 2e-3


@pytest.mark.case("A3")
@on_cpu
@each_backend_slowly
def test_unequal_experts_beyond_32_bits(backend, last_rows, leave_memory_alone, virtual_outputs):
    """vLLM PR 34279: blocks of unequal experts begin behind 2**31 elements of their flat buffer."""
    kernels, options = implementation(backend), wide_tiles(backend, 64)
    widths = Columns.of([WIDE, N])
    x, w = randn(5, H), randn(widths.total, H)
    s = kernels.sdd(x, w, last_rows, columns=widths, **options)
    first = FIRST * WIDE if backend == "triton" else 0  # torch's blocks follow those of the rows it was told of
    block = s.values[first : first + LAST * N].view(LAST, N)
    expected = x[last_rows.tokens[-LAST:].long()].float() @ w[WIDE:].T.float()
    assert relative_error(block, expected) < 2e-3
    y = kernels.dsd(s, w, **options)
    assert relative_error(y[-LAST:], expected @ w[WIDE:].float()) < 4e-3


@pytest.mark.case("A1", "A4")
def test_sizes_are_computed_in_64_bits():
    """DeepGEMM PR 226: products of sizes in host and scheduling code overflow; too many rows are refused by name."""
    rows = Topology.from_counts(torch.tensor([524_288, 35_712], dtype=torch.int32, device=DEVICE), 560_000)
    columns = Columns.of([8192, 4096])
    assert block_offsets(rows, columns).tolist() == [0, 524_288 * 8192, 524_288 * 8192 + 35_712 * 4096]
    assert values_shape(560_000, columns) == (560_000 * 8192,)
    assert rows.schedule(128).first_rows.max() == 560_000 - 128
    too_many = torch.empty(2**28, 8, dtype=torch.int64, device="meta")
    for build in (
        lambda: Topology.from_ids(too_many, 16),
        lambda: Topology.from_counts(torch.tensor([1]), 2**31),
        lambda: Topology.from_pairs(too_many.view(-1), too_many.view(-1), num_tokens=2**28, num_experts=16),
    ):
        with pytest.raises(ValueError, match="2147483648 slots"):
            build()


@pytest.mark.case("A5")
def test_stk_refuses_more_column_blocks_than_it_can_number():
    """stk f7ba880: block columns are numbered in 16 bits; 512 experts of 8192 columns in blocks of 128 have 32 768."""
    pytest.importorskip("stk", reason="needs stanford-stk")
    rows = Topology.from_ids(torch.tensor([[511], [0], [300], [511]]), 512)
    s = BlockSparse(torch.randn(4, 8192), rows, Columns.equal(8192, 512))
    with pytest.raises(ValueError, match=r"32[ ,_]?76[78]"):
        s.to_stk(128)


@pytest.mark.case("A5")
@each_backend_slowly
def test_many_column_blocks_are_no_limit_of_ours(backend):
    """stk f7ba880: the same matrix, 4 194 304 columns wide, through our own products."""
    num_experts, width = 512, 8192
    rows = Topology.from_ids(torch.tensor([[511]], device=DEVICE), num_experts)
    base = torch.randn(width, 16, device=DEVICE) / 4
    w, x = base.expand(num_experts, -1, -1), torch.randn(1, 16, device=DEVICE)
    kernels = implementation(backend)
    s = kernels.sdd(x, w, rows, **wide_tiles(backend))
    torch.testing.assert_close(s.values, x @ base.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kernels.dsd(s, w, **wide_tiles(backend, 16, 1024)), s.values @ base, rtol=1e-4, atol=1e-2)


# -------------------------------------------------------------------- real sizes


def integers(*shape: int, largest: int) -> Tensor:
    """Small integers, whose sums and products bf16 holds exactly."""
    return torch.randint(-largest, largest + 1, shape, device=DEVICE, dtype=torch.int8).bfloat16()


ROUTED = [
    pytest.param(70_000, 4096, marks=pytest.mark.case("A1"), id="70000x8x4096"),
    pytest.param(38_000, 7168, marks=pytest.mark.case("A2"), id="38000x8x7168"),
]


@pytest.mark.gpu
@each_backend_slowly
@pytest.mark.parametrize(("num_tokens", "hidden"), ROUTED)
def test_gather_is_indexing_at_real_size(backend, num_tokens, hidden):
    """megablocks PR 185, TransformerEngine 2908: gather and its backward, through products with the identity."""
    rows, num_slots = _skewed(num_tokens)
    x = integers(num_tokens, hidden, largest=8).requires_grad_()
    identity = torch.eye(hidden, device=DEVICE, dtype=x.dtype).expand(16, hidden, hidden)
    s = sdd(x, identity, rows, backend=backend)
    kept = int(rows.num_rows)
    assert kept < num_slots
    assert torch.equal(s.values[:kept], x.detach().index_select(0, rows.tokens[:kept]))
    assert not s.values[kept:].any()

    grad = integers(num_slots, hidden, largest=1)
    (grad_x,) = torch.autograd.grad(s.values, x, grad)
    expected = torch.zeros_like(x)
    for choice in rows.rows.view(num_tokens, 8).T:
        expected += torch.where(choice[:, None] >= 0, grad.index_select(0, choice.clamp(min=0)), 0)
    assert torch.equal(grad_x, expected)


@pytest.mark.gpu
@each_backend_slowly
@pytest.mark.parametrize(("num_tokens", "hidden"), ROUTED)
def test_scatter_is_indexing_at_real_size(backend, num_tokens, hidden):
    """megablocks PR 185, TransformerEngine 2908: combine, the gradient of its rows and that of its weights."""
    rows, num_slots = _skewed(num_tokens)
    y = integers(num_slots, hidden, largest=4).requires_grad_()
    weights = torch.randint(1, 3, (num_tokens, 8), device=DEVICE).float().requires_grad_()
    out = combine(y, rows, weights, backend=backend)
    grad = integers(num_tokens, hidden, largest=2)
    grad_y, grad_weights = torch.autograd.grad(out, (y, weights), grad)
    expected, by_choice = torch.zeros_like(out), rows.rows.view(num_tokens, 8)
    with torch.no_grad():
        for k in range(8):
            here, row = (by_choice[:, k] >= 0)[:, None], by_choice[:, k].clamp(min=0)
            taken = torch.where(here, y.index_select(0, row), 0)
            expected += taken * weights[:, k, None].bfloat16()
            assert torch.equal(grad_weights[:, k], (taken.float() * grad.float()).sum(1))
            returned = torch.where(here, grad_y.index_select(0, row), 0)
            assert torch.equal(returned, torch.where(here, grad * weights[:, k, None].bfloat16(), 0))
        assert torch.equal(out, expected)
        assert not grad_y[int(rows.num_rows) :].any()


def _skewed(num_tokens: int) -> tuple[Topology, int]:
    """16 experts, expert 0 with nine slots of ten, and some hundred slots dropped."""
    ids = skewed_ids(num_tokens, 16, 8)
    ids[::100, 3] = -1
    rows = Topology.from_ids(ids, 16)
    return rows, rows.num_slots


@pytest.mark.case("A3", "A4")
@pytest.mark.gpu
@each_backend_slowly
@pytest.mark.parametrize("order", ["tokens", "rows"])
def test_expert_output_at_real_size(backend, order):
    """vLLM PR 34279, DeepGEMM PR 226: 131 073 rows of 16 384 columns, written, and read by both gradients."""
    num_rows, hidden, width = 131_073, 16_384, 64
    rows = Topology.from_ids(skewed_ids(num_rows, 3, 1), 3)
    values = torch.randn(num_rows, width, device=DEVICE, dtype=torch.bfloat16)
    w = torch.randn(3, width, hidden, device=DEVICE, dtype=torch.bfloat16) / 8
    offsets = rows.offsets.tolist()
    s = BlockSparse(values, rows, Columns.equal(width, 3))
    y = dsd(s, w, backend=backend)
    for expert in range(3):
        last = slice(max(offsets[expert], offsets[expert + 1] - 300), offsets[expert + 1])
        assert relative_error(y[last], values[last].double() @ w[expert].double()) < 1e-2
    grad = sdd(y, w, rows, order=order, backend=backend).values
    source = rows.tokens.long() if order == "tokens" else torch.arange(num_rows, device=DEVICE)
    assert relative_error(grad[-300:], y[source[-300:]].double() @ w[2].T.double()) < 1e-2
    grad_w = dsd(s.T, y, order=order, backend=backend)
    for expert in range(3):
        first, last = offsets[expert : expert + 2]
        expected = torch.zeros(width, hidden, device=DEVICE)
        for part in range(first, last, 16_384):
            chunk = slice(part, min(last, part + 16_384))
            expected += values[chunk].T.float() @ y[source[chunk]].float()
        assert relative_error(grad_w[expert], expected) < 1e-2


@pytest.mark.case("A1", "A3", "A4")
@pytest.mark.gpu
@each_backend_slowly
def test_expert_mlp_at_real_size(backend):
    """megablocks PR 185 and the reports of A3 and A4: a layer whose pre-activation has 280 000 * 8192 elements."""
    problem = Problem.draw(64, 4096, 8, skewed_ids(35_000, 8, 8))
    ours, dense = problem.ours(backend), problem.dense(torch.float32, chunk=5000)
    for name, found, expected in zip(ours._fields, ours, dense, strict=True):
        assert relative_error(found, expected) < 2e-2, name


@pytest.mark.case("A3", "A4")
@pytest.mark.gpu
@each_backend_slowly
def test_unequal_experts_at_real_size(backend):
    """vLLM PR 34279: 280 000 rows of experts with 4096 and 8192 columns, the last blocks behind 2**31 elements."""
    ids, widths = skewed_ids(280_000, 3, 1), Columns.of([8192, 4096, 8192])
    rows = Topology.from_ids(ids, 3)
    x = torch.randn(280_000, 64, device=DEVICE, dtype=torch.bfloat16)
    w = torch.randn(widths.total, 64, device=DEVICE, dtype=torch.bfloat16) / 8
    s = sdd(x, w, rows, columns=widths, backend=backend)
    start, last = int(s.block_offsets()[2]), int(rows.counts[2])
    assert start > 2**31
    w_last, x_last = w[-8192:].double(), x[rows.tokens[int(rows.offsets[2]) :].long()].double()
    block = s.values[start : start + last * 8192].view(last, 8192)
    assert relative_error(block[-300:], x_last[-300:] @ w_last.T) < 1e-2
    assert not s.values[start + last * 8192 :].any()
    y = dsd(s, w, backend=backend)
    assert relative_error(y[-300:], block[-300:].double() @ w_last) < 1e-2
    grad_w = dsd(s.T, x, order="tokens", backend=backend)
    expected = torch.zeros(8192, 64, device=DEVICE)
    for part in range(0, last, 4096):
        expected += block[part : part + 4096].T.float() @ x_last[part : part + 4096].float()
    assert relative_error(grad_w[-8192:], expected) < 1e-2
