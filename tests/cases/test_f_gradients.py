"""Group F: what must get a gradient gets the right one, and nothing else costs work or memory."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blocksparse_moe import RouterConfig, RouterOutput, expert_mlp
from blocksparse_moe.products import implementation
from blocksparse_moe_kernels import Topology, reference, torch_products
from tests.cases.helpers import DTYPE, Problem, Result, dense_moe, distinct_ids, free_memory, gradients, layer, relative_error
from tests.support import DEVICE, HAS_CUDA, each_backend_slowly

H, FFN, E, K, T = (1024, 512, 16, 4, 4096) if HAS_CUDA else (20, 12, 3, 2, 5)


@pytest.mark.case("F1")
def test_router_without_task_gradient_is_announced():
    """minimind 858: with K = 1 and renormalised weights every weight is 1, so the task cannot train the router."""
    with pytest.warns(UserWarning, match="no gradient"):
        RouterConfig(top_k=1, normalize=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RouterConfig(top_k=1, normalize=False)
        RouterConfig(top_k=2, normalize=True)


@pytest.mark.case("F1")
@each_backend_slowly
def test_one_choice_trains_the_router(backend):
    """minimind 858: without renormalisation the router of K = 1 gets a gradient of the size of the others."""
    moe = layer(H, FFN, E, 1, normalize=False, backend=backend)
    x = torch.randn(T, H, device=DEVICE, dtype=DTYPE)
    moe(x).square().mean().backward()
    found = gradients(moe)
    assert found["router.weight"].norm() > 1e-3 * found["experts.gate_up_proj"].norm()


@pytest.mark.case("F2")
@pytest.mark.usefixtures("poisoned_memory")
@each_backend_slowly
def test_dropped_slot_does_not_end_the_gate_gradient(backend):
    """Tutel PR 127: the gate gradient returns at the first dropped slot, so later gates get none."""
    ids = distinct_ids(8, 8, 8)
    ids[4, 3] = -1
    problem = Problem.draw(H, FFN, 8, ids)
    ours = problem.ours(backend)
    ones, found = torch.ones(8, 1, dtype=torch.float64, device=DEVICE), ours.weights.double()
    for k in range(8):
        up, down = problem.up_proj.double(), problem.down_proj.double()
        output = dense_moe(problem.x.double(), problem.expert_ids[:, k : k + 1], up, down, ones, "swiglu")
        expected = torch.linalg.vecdot(output, problem.grad.double())
        torch.testing.assert_close(found[:, k], expected, rtol=0.02 if HAS_CUDA else 1e-4, atol=0.2 if HAS_CUDA else 1e-4)
    assert found[4, 3] == 0
    assert (found.reshape(-1) == 0).sum() == 1


@pytest.mark.case("F3")
@each_backend_slowly
def test_renormalised_weights_are_differentiable(backend):
    """megablocks PR 70: the weights are normalised in place, which breaks autograd. Gradients against the dense layer."""
    moe = layer(H, FFN, E, K, backend=backend, dtype=torch.float32)
    x = torch.randn(T, H, device=DEVICE, requires_grad=True)
    y, routing = moe(x, return_routing=True)
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, *moe.parameters()), grad)

    leaves = [tensor.detach().double().requires_grad_() for tensor in (x, *moe.parameters())]
    x64, router, up, down = leaves
    probabilities = F.linear(x64, router).softmax(dim=-1).gather(1, routing.expert_ids)
    weights = probabilities / probabilities.sum(dim=-1, keepdim=True)
    expected = torch.autograd.grad(dense_moe(x64, routing.expert_ids, up, down, weights, "swiglu"), leaves, grad.double())
    for name, ours, dense in zip(("x", *dict(moe.named_parameters())), found, expected, strict=True):
        assert relative_error(ours, dense) < 1e-4, name


@pytest.mark.case("F3")
def test_gradcheck_of_the_reference():
    """megablocks PR 70: numerical gradients of router and experts together, in fp64."""
    router = torch.randn(3, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    up = torch.randn(3, 4, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    down = torch.randn(3, 4, 2, dtype=torch.float64, device=DEVICE, requires_grad=True)
    x = torch.randn(5, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)

    def moe(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
        _, weights, ids = reference.router(x, router, 2, normalize=True)
        return reference.expert_mlp(x, Topology.from_ids(ids, 3), up, down, weights)

    assert torch.autograd.gradcheck(moe, (x, router, up, down))


@pytest.mark.case("F3")
def test_gradcheck_of_the_torch_backend():
    """megablocks PR 70: the same of our own nodes, with a dropped slot and a negative weight."""
    ids = torch.tensor([[0, 2], [1, -1], [2, 0], [2, 2]], device=DEVICE)
    rows = Topology.from_ids(ids, 3)
    inputs = [
        torch.randn(shape, dtype=torch.float64, device=DEVICE, requires_grad=True)
        for shape in ((4, 4), (3, 4, 4), (3, 4, 2), (4, 2))
    ]
    assert torch.autograd.gradcheck(lambda *tensors: expert_mlp(tensors[0], rows, *tensors[1:], backend="torch"), inputs)


@pytest.mark.case("F5")
@each_backend_slowly
def test_zero_and_negative_weights(backend):
    """unsloth-zoo PR 858: the gate's gradient is found by dividing by a clamped gate: wrong for weights of 0 and below."""
    problem = Problem.draw(H, FFN, E, distinct_ids(T, E, 3))
    weights = torch.tensor([-0.5, 0.0, 0.3], device=DEVICE, dtype=DTYPE).repeat(T, 1)
    ours = replace(problem, weights=weights).check(backend)
    assert ours.weights[:, 1].abs().min() > 0


@pytest.mark.case("F6")
@each_backend_slowly
def test_balance_loss_reaches_the_router_alone(backend):
    """NeMo Automodel 1408, 1412: the node of the balance loss is thrown away, so its coefficient has no effect."""
    moe = layer(H, FFN, E, K, backend=backend)
    x = torch.randn(T, H, device=DEVICE, dtype=DTYPE)

    def router_gradient(coefficient: float) -> Tensor:
        moe.zero_grad()
        y, routing = moe(x, return_routing=True)
        (0 * y.sum() + coefficient * routing.load_balancing_loss).backward()
        found = gradients(moe)
        assert not found["experts.gate_up_proj"].any() and not found["experts.down_proj"].any()
        return found["router.weight"]

    once = router_gradient(0.5)
    assert once.any()
    assert torch.equal(router_gradient(1.0), 2 * once)

    moe.zero_grad()
    _, routing = moe(x, return_routing=True)
    routing.load_balancing_loss.backward()
    assert moe.experts.gate_up_proj.grad is None and moe.experts.down_proj.grad is None
    assert torch.equal(moe.router.weight.grad, 2 * once)


@pytest.mark.case("F7")
@each_backend_slowly
def test_gradients_accumulate(backend):
    """Primus PR 1046: of two micro-batches without zeroing only the first one's expert gradient is kept."""
    moe = layer(H, FFN, E, K, backend=backend)
    first, second = (torch.randn(T, H, device=DEVICE, dtype=DTYPE) for _ in range(2))

    def gradients_of(*batches: Tensor) -> dict[str, Tensor]:
        moe.zero_grad()
        for batch in batches:
            moe(batch).square().sum().backward()
        return gradients(moe)

    alone, then, both = gradients_of(first), gradients_of(second), gradients_of(first, second)
    for name, found in both.items():
        assert torch.equal(found, alone[name] + then[name]), name
        assert then[name].any(), name


@pytest.mark.case("F8")
def test_losses_are_smooth_at_perfect_balance():
    """google-research/vmoe PR 218: a balance loss with a standard deviation has a NaN gradient when all logits are equal."""
    logits = torch.zeros(6, 4, device=DEVICE, requires_grad=True)
    weights, ids = logits.softmax(dim=-1).topk(2, dim=-1)
    routing = RouterOutput(logits, weights, ids)
    for loss in (routing.load_balancing_loss, routing.z_loss):
        (grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
        assert loss.isfinite() and grad.isfinite().all()

    moe = layer(H, FFN, 4, 2)
    torch.nn.init.zeros_(moe.router.weight)
    y, routing = moe(torch.randn(T, H, device=DEVICE, dtype=DTYPE), return_routing=True)
    (y.square().mean() + routing.load_balancing_loss + routing.z_loss).backward()
    assert all(grad.isfinite().all() for grad in gradients(moe).values())


@pytest.fixture
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each product of the test's backend runs."""
    kernels, counted = implementation(request.getfixturevalue("backend")), Counter()
    monkeypatch.setattr(kernels, "replay", torch_products.replay)  # each call in full

    def count(name: str) -> None:
        launch = getattr(kernels, name)

        def counting(*arguments, **options):
            counted[name] += 1
            return launch(*arguments, **options)

        monkeypatch.setattr(kernels, name, counting)

    for name in ("sdd", "dsd", "dsd_transposed", "combine", "activation_backward"):
        count(name)
    return counted


@pytest.mark.case("F9")
@each_backend_slowly
def test_frozen_inputs_cost_no_gradient(backend, calls):
    """pytorch/ao PR 4471, ms-swift PR 9790: frozen weights crash the backward, or their gradients are made for nothing."""
    problem = Problem.draw(H, FFN, E, distinct_ids(T, E, K))
    complete = problem.ours(backend)
    for frozen in (
        {"up_proj", "down_proj"},
        {"up_proj"},
        {"down_proj"},
        {"x"},
        {"weights"},
        {"x", "up_proj", "down_proj"},
    ):
        leaves = {name: getattr(problem, name).detach().requires_grad_(name not in frozen) for name in Result._fields[1:]}
        inputs = {"routing_weights" if name == "weights" else name: leaf for name, leaf in leaves.items()}
        y = expert_mlp(topology=problem.topology, backend=backend, **inputs)
        calls.clear()
        y.backward(problem.grad)
        for name, leaf in leaves.items():
            if name in frozen:
                assert leaf.grad is None, f"{name} of frozen {frozen}"
            else:
                assert torch.equal(leaf.grad, getattr(complete, name)), f"{name} beside frozen {frozen}"
        assert calls["dsd_transposed"] == 2 - len({"up_proj", "down_proj"} & frozen), frozen
        assert calls["dsd"] == calls["combine"] == ("x" not in frozen), frozen


@pytest.mark.case("F9")
@each_backend_slowly
@pytest.mark.parametrize("frozen", ["experts", "router"])
def test_frozen_modules(backend, frozen, calls):
    """Liger PR 1441: the same for a layer whose experts, or whose router, are frozen."""
    moe = layer(H, FFN, E, K, backend=backend)
    moe.get_submodule(frozen).requires_grad_(False)
    x = torch.randn(T, H, device=DEVICE, dtype=DTYPE, requires_grad=True)
    y = moe(x)
    calls.clear()
    y.square().sum().backward()
    for name, parameter in moe.named_parameters():
        assert (parameter.grad is None) == name.startswith(frozen), name
    assert x.grad.any()
    assert calls["dsd_transposed"] == (0 if frozen == "experts" else 2)


@pytest.mark.case("F10")
@each_backend_slowly
def test_hooks_see_every_kept_activation(backend):
    """Tutel PR 238: activations kept as attributes, not as saved tensors, escape the hooks that would offload them."""
    moe = layer(H, FFN, E, K, backend=backend)
    x = torch.randn(T, H, device=DEVICE, dtype=DTYPE, requires_grad=True)
    moe(x).sum().backward()
    expected = {"x": x.grad.clone(), **gradients(moe)}
    moe.zero_grad()
    x.grad = None
    stored: list[Tensor] = []

    def offload(tensor: Tensor) -> int:
        stored.append(tensor.detach().to("cpu", copy=True))
        return len(stored) - 1

    free_memory()
    before, allocated = _floating_tensors(), _allocated()
    with torch.autograd.graph.saved_tensors_hooks(offload, lambda index: stored[index].to(DEVICE)):
        y = moe(x)
    assert (T * K, 2 * FFN) in {tuple(tensor.shape) for tensor in stored}
    known = {id(tensor) for tensor in (*before, *stored, y, y._base)}
    kept = [tuple(tensor.shape) for tensor in _floating_tensors() if id(tensor) not in known]
    assert not kept, f"beside what the hooks saw, the graph keeps tensors of shapes {kept}"
    assert _allocated() - allocated <= y.nbytes + 2**20

    y.sum().backward()
    for name, found in {"x": x.grad, **gradients(moe)}.items():
        assert torch.equal(found, expected[name]), name


@pytest.mark.slow
@pytest.mark.case("F10")
@each_backend_slowly
def test_dropped_graphs_leave_nothing_behind(backend):
    """Tutel PR 238: twenty training forwards whose graph is dropped, after which memory is what it was."""
    moe = layer(H, FFN, E, K, backend=backend)
    x = torch.randn(T, H, device=DEVICE, dtype=DTYPE, requires_grad=True)
    kept: list[weakref.ref[Tensor]] = []

    def remember(tensor: Tensor) -> Tensor:
        alias = tensor.detach()  # the tensor itself may be the output of its own node: a cycle of the test's making
        kept.append(weakref.ref(alias))
        return alias

    moe(x)
    free_memory()
    allocated, tensors = _allocated(), len(_floating_tensors())
    for _ in range(20 if HAS_CUDA or backend == "torch" else 3):
        with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
            moe(x)
    assert kept
    assert not any(reference() is not None for reference in kept)
    assert (_allocated(), len(_floating_tensors())) == (allocated, tensors)


def _floating_tensors() -> list[Tensor]:
    """Every tensor that Python can reach."""
    gc.collect()
    return [found for found in gc.get_objects() if issubclass(type(found), Tensor) and found.is_floating_point()]


def _allocated() -> int:
    """Bytes of GPU memory in use; 0 on a CPU, whose memory torch does not count."""
    return torch.cuda.memory_allocated() if HAS_CUDA else 0
