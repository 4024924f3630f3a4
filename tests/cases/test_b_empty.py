"""Group B: experts, layers and operands without work, and memory that nobody wrote."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from blocksparse_moe import combine, dsd, expert_mlp, sdd
from blocksparse_moe_kernels import BlockSparse, Columns, Topology
from tests.cases.helpers import (
    DTYPE,
    Problem,
    assert_results_agree,
    dirty_allocator,
    gradients,
    ids_from_counts,
    layer,
)
from tests.support import DEVICE, HAS_CUDA, each_backend_slowly


@pytest.mark.case("B1")
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("backend", "counts", "hidden", "ffn"),
    [
        pytest.param("torch", (162, 0, 2577, 446, 0, 83), 64, 48, id="torch"),
        pytest.param("triton", (17, 0, 37, 9, 0, 1), 40, 24, id="triton", marks=pytest.mark.slow),
        pytest.param("torch", (162, 0, 2577, 446, 0, 83), 2048, 768, id="torch-real", marks=pytest.mark.gpu),
        pytest.param("triton", (162, 0, 2577, 446, 0, 83), 2048, 768, id="triton-real", marks=pytest.mark.gpu),
    ],
)
def test_experts_without_rows_have_zero_gradients(backend, counts, hidden, ffn):
    """pytorch 172439: on one GPU generation the weight gradient of a group without rows is not zero."""
    problem = Problem.draw(hidden, ffn, len(counts), ids_from_counts(counts))
    ours = problem.check(backend)
    for expert, count in enumerate(counts):
        assert bool(ours.up_proj[expert].any()) == bool(ours.down_proj[expert].any()) == (count > 0)


@pytest.mark.case("B2")
@each_backend_slowly
@pytest.mark.parametrize("num_tokens", [64, 0])
@pytest.mark.parametrize(
    ("hidden", "ffn"), [pytest.param(16, 12, id="small"), pytest.param(1024, 768, id="real", marks=pytest.mark.gpu)]
)
def test_gradients_of_unused_experts_are_written(backend, num_tokens, hidden, ffn, fresh_memory):
    """MSLK PR 158 and 97: the gradient buffer is allocated without being written, so idle experts keep NaN of old bytes."""
    if backend == "triton" and not HAS_CUDA:
        num_experts, num_tokens = 24, num_tokens // 4
    else:
        num_experts = 256
    problem = Problem.draw(hidden, ffn, num_experts, torch.randint(num_experts, (num_tokens, 1)))
    dirty_allocator(problem.up_proj.shape, problem.down_proj.shape, problem.x.shape, dtype=problem.x.dtype)
    ours = problem.ours(backend)
    unused = torch.bincount(problem.expert_ids.reshape(-1), minlength=num_experts) == 0
    assert unused.any()
    for gradient in (ours.up_proj, ours.down_proj):
        assert gradient.isfinite().all()
        assert not gradient[unused].any()
        assert gradient[~unused].flatten(1).any(dim=1).all()
    assert ours.x.isfinite().all()
    assert ours.weights.isfinite().all()
    fresh_memory.check_guards()


@pytest.mark.case("B3")
@each_backend_slowly
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "ffn"),
    [pytest.param(20, 24, 12, id="small"), pytest.param(4096, 1024, 512, marks=pytest.mark.gpu)],
)
def test_unwritten_tail_rows_never_reach_gradients(backend, num_tokens, hidden, ffn, fresh_memory):
    """pytorch 193633, transformers PR 45621: rows behind the last group are never written, and 0 * NaN spoils later steps."""
    ids = torch.randint(-2, 5, (num_tokens, 2))
    problem = Problem.draw(hidden, ffn, 3, ids)
    assert (ids < 0).any() and (ids >= 3).any()

    def three_steps(unwritten: float) -> list[Tensor]:
        fresh_memory.value = unwritten
        fresh_memory.buffers.clear()
        weights, seen = [problem.up_proj.clone(), problem.down_proj.clone(), problem.weights.clone()], []
        for _ in range(3):
            up, down, routing = weights
            step = replace(problem, up_proj=up, down_proj=down, weights=routing).ours(backend)
            seen += step
            for parameter, grad in zip(weights, (step.up_proj, step.down_proj, step.weights), strict=True):
                parameter -= 0.01 * grad
        fresh_memory.check_guards()
        return seen

    for poisoned, zeroed in zip(three_steps(torch.nan), three_steps(0.0), strict=True):
        assert poisoned.isfinite().all()
        assert torch.equal(poisoned, zeroed)


@pytest.mark.case("B4")
@pytest.mark.usefixtures("poisoned_memory")
@each_backend_slowly
def test_products_of_nothing(backend):
    """stk 1a70106, bb0369b: zero-size operands crash, or leave an output unwritten that ought to be all zero."""
    E, N, H = 3, 6, 5
    none = Topology.from_ids(torch.zeros(0, 2, dtype=torch.int64, device=DEVICE), E)
    w = torch.randn(E, N, H, device=DEVICE, requires_grad=True)
    x = torch.randn(0, H, device=DEVICE, requires_grad=True)
    s = sdd(x, w, none, backend=backend)
    assert s.values.shape == (0, N)
    y = dsd(s, w, backend=backend)
    assert y.shape == (0, H)
    out = combine(y, none, backend=backend)
    assert out.shape == (0, H)
    grad_x, grad_w = torch.autograd.grad(out.sum(), (x, w))
    assert grad_x.shape == (0, H)
    assert grad_w.shape == w.shape and not grad_w.any()

    for order in ("tokens", "rows"):  # the inner dimension of the weight gradient is the rows
        grad = dsd(s.T, x, order=order, backend=backend)
        assert grad.shape == (E, N, H) and not grad.any()


@pytest.mark.case("B4")
@pytest.mark.usefixtures("poisoned_memory")
@each_backend_slowly
def test_inner_dimension_of_zero(backend):
    """stk bb0369b: a product over an inner dimension of size zero must still write zeros."""
    E, N = 3, 6
    rows = Topology.from_ids(torch.tensor([[0, 2], [2, 1], [0, 0]], device=DEVICE), E)
    x = torch.randn(3, 0, device=DEVICE, requires_grad=True)
    w = torch.randn(E, N, 0, device=DEVICE, requires_grad=True)
    s = sdd(x, w, rows, backend=backend)
    assert s.values.shape == (6, N) and not s.values.any()
    y = dsd(s, w, backend=backend)
    assert y.shape == (6, 0)
    assert combine(y, rows, backend=backend).shape == (3, 0)
    grad_x, grad_w = torch.autograd.grad(s.values.sum(), (x, w))
    assert grad_x.shape == x.shape and grad_w.shape == w.shape

    dropped = Topology.from_ids(torch.full((3, 2), -1, device=DEVICE), E)
    w = torch.randn(E, N, 4, device=DEVICE)
    x = torch.randn(3, 4, device=DEVICE)
    s = sdd(x, w, dropped, backend=backend)
    y = dsd(s, w, backend=backend)
    for product in (s.values, y, combine(y, dropped, backend=backend), dsd(s.T, x, order="tokens", backend=backend)):
        assert not product.any()


@pytest.mark.case("B4")
@pytest.mark.usefixtures("poisoned_memory")
@each_backend_slowly
def test_tokens_without_slots(backend):
    """stk 1a70106: tokens that have no expert at all (K = 0) come out as zeros, forward and backward."""
    problem = Problem.draw(6, 4, 3, torch.zeros(5, 0, dtype=torch.int64))
    ours = problem.ours(backend)
    assert ours.y.shape == (5, 6) and ours.weights.shape == (5, 0)
    assert not any(result.any() for result in ours)


@pytest.mark.case("B5")
@pytest.mark.usefixtures("poisoned_memory")
@each_backend_slowly
@pytest.mark.parametrize("shape", [(0,), (2, 0)], ids=str)
def test_layer_without_tokens(backend, shape):
    """TransformerEngine PR 3019, 3067, 2134: no token reaches the layer: a crash, or a weight without gradient."""
    hidden = 2048 if HAS_CUDA else 16
    moe = layer(hidden, 24, 6, 2, backend=backend, bias=True)
    x = torch.randn(*shape, hidden, device=DEVICE, dtype=DTYPE, requires_grad=True)
    y, routing = moe(x, return_routing=True)
    assert y.shape == x.shape
    assert routing.tokens_per_expert.tolist() == [0] * 6
    (y.sum() + routing.load_balancing_loss + routing.z_loss).backward()
    assert x.grad.shape == x.shape
    for name, grad in gradients(moe).items():
        assert not grad.any(), name


@pytest.mark.case("B6")
@pytest.mark.usefixtures("poisoned_memory")
@each_backend_slowly
def test_single_expert_reads_no_padding(backend):
    """TransformerEngine 3484: with one expert a dense shortcut reads the padded tail: NaN in the weight gradient."""
    hidden, ffn = (2048, 768) if HAS_CUDA else (24, 16)
    real = torch.arange(128) < 100
    problem = Problem.draw(hidden, ffn, 1, torch.where(real, 0, -1)[:, None])
    padding = ~real.to(DEVICE)
    problem.x[padding] = torch.nan
    problem.grad[padding] = torch.nan
    problem.weights[padding] = torch.nan
    unpadded = Problem(
        problem.x[:100],
        problem.expert_ids[:100],
        problem.weights[:100],
        problem.up_proj,
        problem.down_proj,
        problem.grad[:100],
    )
    ours = problem.ours(backend)
    for result in (ours.y, ours.x, ours.weights):
        assert not result[padding].any()
    cut = ours._replace(y=ours.y[:100], x=ours.x[:100], weights=ours.weights[:100])
    assert_results_agree(cut, unpadded.dense(torch.float64), unpadded.dense())


@pytest.mark.case("B6")
@pytest.mark.usefixtures("poisoned_memory")
@each_backend_slowly
def test_single_expert_of_sorted_rows_reads_no_padding(backend):
    """TransformerEngine 3484: the same through the products, on rows that are sorted already and a count of 100."""
    H, N = (2048, 768) if HAS_CUDA else (24, 16)
    rows = Topology.from_counts(torch.tensor([100], device=DEVICE), 128)
    x = torch.randn(128, H, device=DEVICE, dtype=DTYPE)
    values = torch.randn(128, N, device=DEVICE, dtype=DTYPE)
    x[100:], values[100:] = torch.nan, torch.nan
    w = torch.randn(1, N, H, device=DEVICE, dtype=DTYPE) * H**-0.5
    s = BlockSparse(values, rows, Columns.equal(N, 1))
    tolerance = {"rtol": 2e-2, "atol": 2e-1} if HAS_CUDA else {"rtol": 1e-5, "atol": 1e-4}
    grad = dsd(s.T, x, backend=backend)
    torch.testing.assert_close(grad[0], values[:100].T @ x[:100], **tolerance)
    product = sdd(x, w, rows, order="rows", backend=backend)
    torch.testing.assert_close(product.values[:100], x[:100] @ w[0].T, **tolerance)
    y = dsd(s, w, backend=backend)
    torch.testing.assert_close(y[:100], values[:100] @ w[0], **tolerance)
    assert not product.values[100:].any() and not y[100:].any()


@pytest.mark.case("B5")
@each_backend_slowly
def test_whole_batch_routed_elsewhere(backend):
    """TransformerEngine PR 3067: tokens arrive, but none for the experts of this layer."""
    problem = Problem.draw(12, 8, 4, torch.full((6, 2), 4))
    ours = problem.ours(backend)
    assert not any(result.any() for result in ours)
    no_grad = expert_mlp(problem.x, problem.topology, problem.up_proj, problem.down_proj, problem.weights, backend=backend)
    assert not no_grad.any()
