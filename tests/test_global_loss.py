"""The load-balancing loss of a batch that is split: over micro-batches, and over two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from blocksparse_moe import Router, RouterConfig
from blocksparse_moe.router import BiasBalancer, GlobalLoadBalancingLoss, load_balancing_loss

from .support import DEVICE

ROOT = Path(__file__).parents[1]


def a_router(num_experts: int = 6, **options) -> Router:
    return Router(5, num_experts, RouterConfig(2, **options), device=DEVICE, init_std=1.0)


def of_the_whole(router: Router, x: Tensor, **options) -> tuple[Tensor, Tensor]:
    """The loss of all tokens at once, and its gradient."""
    loss = load_balancing_loss(router(x), **options)
    return loss.detach(), torch.autograd.grad(loss, router.weight)[0]


def in_parts(router: Router, x: list[Tensor], masks: list[Tensor | None], beforehand: bool) -> tuple[Tensor, Tensor]:
    """The mean loss of micro-batches, and the gradient that they accumulate."""
    router.weight.grad, balance, losses = None, GlobalLoadBalancingLoss(), []
    if beforehand:
        for part, mask in zip(x, masks, strict=True):
            balance.count(router(part), mask=mask)
    for part, mask in zip(x, masks, strict=True):
        losses.append(balance(router(part), mask=mask))
        (losses[-1] / len(x)).backward()
    return torch.stack(losses).mean().detach(), router.weight.grad


@pytest.mark.case("N5")
@given(data=st.data())
def test_the_loss_does_not_depend_on_the_split(data):
    """Micro-batches that differ, in their tokens, their number of tokens and their padding."""
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    masked = data.draw(st.booleans())
    router = a_router(score=data.draw(st.sampled_from(["softmax", "sigmoid"])))
    parts = [torch.randn(size, 5, device=DEVICE) + 2 * torch.randn(5, device=DEVICE) for size in sizes]
    masks = [torch.rand(size, device=DEVICE) < 0.6 if masked else None for size in sizes]
    loss, grad = of_the_whole(router, torch.cat(parts), mask=torch.cat(masks) if masked else None)

    exact_loss, exact_grad = in_parts(router, parts, masks, beforehand=True)
    torch.testing.assert_close(exact_loss, loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(exact_grad, grad, rtol=1e-4, atol=1e-6)

    estimated_loss, estimated_grad = in_parts(router, parts, masks, beforehand=False)
    torch.testing.assert_close(estimated_loss, loss, rtol=1e-5, atol=1e-6)
    if len(sizes) == 1:
        torch.testing.assert_close(estimated_grad, grad, rtol=1e-4, atol=1e-6)


@pytest.mark.case("N5")
@pytest.mark.parametrize("beforehand", [False, True])
def test_the_strength_does_not_depend_on_accumulation(beforehand):
    router, x = a_router(), torch.randn(12, 5, device=DEVICE)
    loss, grad = of_the_whole(router, x)
    for times in (1, 4):
        repeated_loss, repeated_grad = in_parts(router, [x] * times, [None] * times, beforehand)
        torch.testing.assert_close(repeated_loss, loss)
        torch.testing.assert_close(repeated_grad, grad)


def test_without_a_count_beforehand_the_gradient_takes_the_load_so_far():
    router, x = a_router(), torch.randn(3, 8, 5, device=DEVICE)
    _, found = in_parts(router, list(x), [None] * 3, beforehand=False)
    expected = torch.zeros_like(found)
    for step in range(3):
        load = router(x[: step + 1].flatten(0, 1)).tokens_per_expert
        loss = 6 * (load / load.sum() * router(x[step]).probabilities.mean(dim=0)).sum()
        expected += torch.autograd.grad(loss, router.weight)[0] / 3
    torch.testing.assert_close(found, expected)


@pytest.mark.case("N8")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("beforehand", [False, True])
def test_recompute_does_not_count(use_reentrant, beforehand):
    router = a_router()
    parts = [torch.randn(size, 5, device=DEVICE, requires_grad=True) for size in (4, 7, 2)]
    loss, grad = in_parts(router, parts, [None] * 3, beforehand)

    router.weight.grad, balance, losses = None, GlobalLoadBalancingLoss(), []
    for part in parts if beforehand else []:
        balance.count(router(part))
    for part in parts:
        losses.append(checkpoint(lambda part: balance(router(part)), part, use_reentrant=use_reentrant))
        (losses[-1] / 3).backward()
    torch.testing.assert_close(torch.stack(losses).mean().detach(), loss)
    torch.testing.assert_close(router.weight.grad, grad)


@pytest.mark.parametrize("beforehand", [False, True])
def test_what_is_recomputed_has_the_same_value(beforehand):
    router, balance, values = a_router(), GlobalLoadBalancingLoss(), []
    parts = list(torch.randn(3, 6, 5, device=DEVICE, requires_grad=True))
    for part in parts if beforehand else []:
        balance.count(router(part))

    def loss_of(part: Tensor) -> Tensor:
        loss = balance(router(part))
        values.append(loss.item())
        return loss.square()

    for part in parts:
        checkpoint(loss_of, part, use_reentrant=False).backward()
    assert values[::2] == values[1::2] and len(set(values)) == 3


@pytest.mark.slow
@pytest.mark.case("N8")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("beforehand", [False, True])
def test_recompute_of_compiled_code_does_not_count(use_reentrant, beforehand):
    router = a_router()
    parts = [torch.randn(4, 5, device=DEVICE, requires_grad=True) for _ in range(3)]
    loss, grad = in_parts(router, parts, [None] * 3, beforehand)

    router.weight.grad, balance, losses = None, GlobalLoadBalancingLoss(), []
    for part in parts if beforehand else []:
        balance.count(router(part))
    compiled = torch.compile(lambda part: balance(router(part)), backend="aot_eager")
    for part in parts:
        losses.append(checkpoint(compiled, part, use_reentrant=use_reentrant))
        (losses[-1] / 3).backward()
    torch.testing.assert_close(torch.stack(losses).mean().detach(), loss)
    torch.testing.assert_close(router.weight.grad, grad)


def test_layers():
    routers, x = [a_router(), a_router()], torch.randn(2, 8, 5, device=DEVICE)
    balance = GlobalLoadBalancingLoss()
    mean = torch.stack([balance(*(router(part) for router in routers)) for part in x]).mean()
    expected = torch.stack([load_balancing_loss(router(x.flatten(0, 1))) for router in routers]).mean()
    torch.testing.assert_close(mean, expected)
    balance.reset()
    routings = [routers[0](x[0]), Router(5, 6, RouterConfig(3), device=DEVICE)(x[0])]
    scaled = torch.stack([load_balancing_loss(routing, transformers_scale=True) for routing in routings]).mean()
    torch.testing.assert_close(balance(*routings, transformers_scale=True), scaled)


def test_what_is_refused():
    routing, other = a_router()(torch.randn(4, 5, device=DEVICE)), a_router(4)(torch.randn(4, 5, device=DEVICE))
    balance = GlobalLoadBalancingLoss()
    balance(routing)
    with pytest.raises(ValueError, match="before the first loss"):
        balance.count(routing)
    with pytest.raises(ValueError, match="the same layers"):
        balance(routing, routing)
    with pytest.raises(ValueError, match="the same layers"):
        balance(other)
    balance.reset()
    for wrong in ((), (routing, other)):
        with pytest.raises(ValueError, match="one or more layers with as many experts"):
            balance(*wrong)
    with pytest.raises(ValueError, match=r"mask must have an element for each of the 4 tokens; got \[3\]"):
        balance(routing, mask=torch.ones(3))
    with pytest.raises(TypeError, match="routing must be of type RouterOutput; got list"):
        balance([routing])
    assert balance(routing).item() == load_balancing_loss(routing).item(), "what was refused was not counted"


# -------------------------------------------------------------------- two ranks


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Runs `balance_ranks`: (its inputs, what each rank found)."""

    def run(sizes: list[list[int]], beforehand: bool = False) -> tuple[dict, list[dict]]:
        """sizes: tokens of each micro-batch of each rank."""
        folder = tmp_path_factory.mktemp("ranks")
        router = Router(6, 4, RouterConfig(2, score="sigmoid", correction_bias=True), init_std=1.0)
        x = [[torch.randn(size, 6) + torch.randn(6) for size in rank] for rank in sizes]
        inputs = {"x": x, "state": router.state_dict(), "beforehand": beforehand}
        torch.save(inputs, folder / "inputs.pt")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command += ["-m", "tests.balance_ranks", str(folder)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-4000:]
        return inputs, [torch.load(folder / f"{rank}.pt") for rank in range(2)]

    return run


@pytest.mark.slow
@pytest.mark.case("R1")
@pytest.mark.case("N5")
@pytest.mark.case("N9")
@pytest.mark.case("N10")
@pytest.mark.parametrize(
    ("sizes", "beforehand"),
    [([[8], [8]], False), ([[12], [4]], False), ([[16], [0]], False), ([[2, 9, 0, 4], [7, 1, 3, 5]], True)],
    ids=["halves", "unlike", "one_without_tokens", "micro_batches"],
)
def test_two_ranks_are_as_one(two_ranks, sizes, beforehand):
    """Averaged gradients, mean loss and moved biases are those of the whole batch, whatever the share of each rank."""
    from .balance_ranks import router, watched

    inputs, found = two_ranks(sizes, beforehand)
    layer = router(inputs["state"])
    balancer, x = BiasBalancer(layer, gamma=0.01), torch.cat([part for rank in inputs["x"] for part in rank])
    loss = load_balancing_loss(layer(x))
    loss.backward()
    balancer.step()
    assert layer.correction_bias.any()
    for rank in found:
        torch.testing.assert_close(rank["grad"], layer.weight.grad)
        assert torch.equal(rank["bias"], layer.correction_bias)
        for name, value in watched(x, None).items():
            torch.testing.assert_close(rank["watched"][name], value, msg=name)
        assert torch.equal(*rank["shared"]), "a shared expert counts once, whatever the number of ranks"
    torch.testing.assert_close(torch.cat([rank["losses"] for rank in found]).mean(), loss.detach())
