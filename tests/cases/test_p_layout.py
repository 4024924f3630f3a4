"""Group P: strides, offsets and views of every operand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blocksparse_moe import BlockSparse, combine, dsd, expert_mlp, sdd
from blocksparse_moe.products import implementation
from blocksparse_moe_kernels import torch_products
from tests.cases.helpers import DTYPE, Problem, distinct_ids, free_memory, low_precision
from tests.support import DEVICE, HAS_CUDA, LAYOUTS, each_backend_slowly

H, FFN, E, K, T = (1024, 512, 16, 4, 2048) if HAS_CUDA else (24, 16, 3, 2, 7)


def assert_same(problem: Problem, contiguous: Problem, backend: str) -> None:
    """Equal up to the order of a sum, which a library may choose by layout."""
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if torch.bfloat16 == DTYPE else {"rtol": 1e-5, "atol": 1e-5}
    expected = contiguous.ours(backend)
    for name, found, value in zip(expected._fields, problem.ours(backend), expected, strict=True):
        scale = max(1.0, float(value.abs().max()))
        torch.testing.assert_close(found / scale, value / scale, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.case("P1")
@each_backend_slowly
@pytest.mark.parametrize("layout", ["transposed", "sliced", "offset by one element"])
def test_views_give_what_contiguous_tensors_give(backend, layout):
    """Tutel 218, intel-xpu-backend-for-triton 7455: non-contiguous input gives wrong values and no error."""
    problem = Problem.draw(H, FFN, E, distinct_ids(T, E, K))
    change = LAYOUTS[layout]
    views = replace(
        problem,
        x=change(problem.x),
        expert_ids=problem.expert_ids.repeat(2, 2)[:T, K:],
        weights=change(problem.weights),
        up_proj=change(problem.up_proj),
        down_proj=change(problem.down_proj),
        grad=change(problem.grad),
    )
    assert layout == "offset by one element" or not any(
        tensor.is_contiguous() for tensor in (views.x, views.weights, views.up_proj, views.down_proj, views.grad)
    )
    assert_same(views, problem, backend)


@pytest.mark.case("P1")
@each_backend_slowly
@pytest.mark.parametrize("dim", [0, 1])
def test_expanded_input(backend, dim):
    """Tutel 218: an input of stride 0, one token for all or one number per token."""
    problem = Problem.draw(H, FFN, E, distinct_ids(T, E, K))
    x = problem.x.narrow(dim, 0, 1).expand_as(problem.x)
    assert x.stride(dim) == 0
    weights = problem.weights[:1].expand_as(problem.weights)
    contiguous = replace(problem, x=x.contiguous(), weights=weights.contiguous())
    assert_same(replace(problem, x=x, weights=weights), contiguous, backend)


@pytest.mark.case("P1")
@each_backend_slowly
def test_expanded_incoming_gradient(backend):
    """Tutel 218: the gradient of `y.sum()` is one number with stride 0 in both dimensions; also through the products."""
    problem = Problem.draw(H, FFN, E, distinct_ids(T, E, K))
    one = torch.ones((), device=DEVICE, dtype=DTYPE)
    expanded = replace(problem, grad=one.expand(T, H))
    assert_same(expanded, replace(problem, grad=expanded.grad.contiguous()), backend)

    x, w = problem.x.clone().requires_grad_(), problem.up_proj.clone().requires_grad_()
    rows, down = problem.topology, problem.down_proj.transpose(1, 2)

    def products(grad_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        s = sdd(x, w, rows, backend=backend)
        y = dsd(BlockSparse(s.values[:, :FFN], rows, s.columns.equal(FFN, E)), down, backend=backend)
        out = combine(y, rows, problem.weights, backend=backend)
        return torch.autograd.grad((out, s.values), (x, w), (grad_of(out), grad_of(s.values)))

    for found, expected in zip(products(lambda y: one.expand_as(y)), products(torch.ones_like), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.case("P2")
@each_backend_slowly
def test_odd_strides_and_unaligned_pointers(backend):
    """transformers 48644: an odd row stride reaches a kernel that needs 16-byte alignment. Hidden 1025, transposed weights."""
    dtype = low_precision(backend)
    hidden, ffn = (1025, 24) if HAS_CUDA or backend == "torch" else (33, 7)
    problem = Problem.draw(hidden, ffn, 3, distinct_ids(T, 3, 2), dtype=dtype)
    unaligned = replace(
        problem,
        x=LAYOUTS["offset by one element"](problem.x),
        up_proj=LAYOUTS["transposed"](problem.up_proj),
        down_proj=LAYOUTS["transposed"](problem.down_proj),
        grad=LAYOUTS["offset by one element"](problem.grad),
    )
    assert unaligned.x.data_ptr() % 16 == dtype.itemsize
    unaligned.check(backend)


@pytest.fixture
def weights_seen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The weights that the launchers of the test's backend were given."""
    kernels, seen = implementation(request.getfixturevalue("backend")), []
    monkeypatch.setattr(kernels, "replay", torch_products.replay)  # each call in full

    def watch(name: str) -> None:
        launch = getattr(kernels, name)

        def watching(x, w, *arguments, **options):
            seen.append(w)
            return launch(x, w, *arguments, **options)

        monkeypatch.setattr(kernels, name, watching)

    for name in ("sdd", "sdd_activation", "dsd"):
        watch(name)
    return seen


def storages(tensors: list[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def packed_weight(layout: str) -> Tensor:
    """[E, 2F, H] as it lies in memory: halves one after the other, interleaved, or transposed ([E, H, 2F])."""
    packed = torch.randn(E, 2 * FFN, H, device=DEVICE, dtype=DTYPE) * H**-0.5
    return packed.transpose(1, 2).contiguous().transpose(1, 2) if layout == "transposed" else packed


@pytest.mark.case("P3")
@each_backend_slowly
@pytest.mark.parametrize("layout", ["halves", "transposed"])
def test_halves_of_a_packed_weight_are_not_copied(backend, layout, weights_seen):
    """Liger PR 1377: gate and up halves of one packed tensor are refused, which forces full copies of the weights."""
    problem = replace(Problem.draw(H, FFN, E, distinct_ids(T, E, K)), up_proj=packed_weight(layout))
    expected = problem.ours(backend)
    weights_seen.clear()

    packed, down = problem.up_proj.detach().requires_grad_(), problem.down_proj
    rows = problem.topology
    gate = sdd(problem.x, packed[:, :FFN], rows, backend=backend)
    up = sdd(problem.x, packed[:, FFN:], rows, backend=backend)
    hidden = BlockSparse(F.silu(gate.values) * up.values, rows, gate.columns)
    y = combine(dsd(hidden, down.transpose(1, 2), backend=backend), rows, problem.weights, backend=backend)
    (grad,) = torch.autograd.grad(y, packed, problem.grad)
    tolerance = {"rtol": 5e-2, "atol": 5e-2} if torch.bfloat16 == DTYPE else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(y, expected.y, **tolerance)
    scale = float(expected.up_proj.abs().max())
    torch.testing.assert_close(grad / scale, expected.up_proj / scale, **tolerance)
    assert storages(weights_seen) == storages([packed, down])


@pytest.mark.case("P3")
@each_backend_slowly
@pytest.mark.parametrize("layout", ["halves", "transposed", "interleaved"])
def test_packed_weight_reaches_the_kernels_as_it_is(backend, layout, weights_seen):
    """Liger PR 1377: the packed tensor itself, halves apart, transposed or interleaved, forward and backward."""
    problem = Problem.draw(H, FFN, E, distinct_ids(T, E, K))
    packed = packed_weight(layout).requires_grad_()
    w = packed.unflatten(1, (FFN, 2)).transpose(1, 2) if layout == "interleaved" else packed
    expected = replace(problem, up_proj=w.detach().reshape(E, 2 * FFN, H).contiguous()).ours(backend)
    weights_seen.clear()
    y = expert_mlp(problem.x, problem.topology, w, problem.down_proj, problem.weights, backend=backend)
    (grad,) = torch.autograd.grad(y, packed, problem.grad)
    inner = grad.unflatten(1, (FFN, 2)).transpose(1, 2).reshape(E, 2 * FFN, H) if layout == "interleaved" else grad
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if torch.bfloat16 == DTYPE else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(y, expected.y, **tolerance)
    scale = float(expected.up_proj.abs().max())
    torch.testing.assert_close(inner / scale, expected.up_proj / scale, **tolerance)
    assert storages(weights_seen) == storages([packed, problem.down_proj])


@pytest.mark.case("P3")
@pytest.mark.gpu
@each_backend_slowly
@torch.no_grad()
def test_no_memory_for_copies_of_weights(backend):
    """Liger PR 1377: 0.375 GiB a layer for copies. With 512 tokens nothing of a weight's size may be allocated."""
    num_experts, hidden, ffn = 64, 2048, 1024
    problem = Problem.draw(hidden, ffn, num_experts, distinct_ids(512, num_experts, 2))
    w = problem.up_proj.unflatten(1, (ffn, 2)).transpose(1, 2)
    rows = problem.topology
    expert_mlp(problem.x, rows, w, problem.down_proj, problem.weights, backend=backend)
    free_memory()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    expert_mlp(problem.x, rows, w, problem.down_proj, problem.weights, backend=backend)
    assert torch.cuda.max_memory_allocated() - before < problem.up_proj.nbytes / 4
