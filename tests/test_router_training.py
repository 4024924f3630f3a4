"""What a router does while training only: jitter, noise, tokens that bypass the experts, experts that are closed."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from blocksparse_moe import MoEConfig, Router, RouterConfig, RouterOutput, dMoE

from .support import DEVICE

DISTURBANCES = {
    "jitter": dict(jitter=0.3),
    "noise": dict(noise=1.0),
    "learned noise": dict(learned_noise=True),
    "token dropout": dict(token_dropout=0.4),
    "expert dropout": dict(expert_dropout=0.4),
}


@pytest.mark.case("E10")
@pytest.mark.parametrize("options", DISTURBANCES.values(), ids=DISTURBANCES)
def test_training_is_disturbed_by_the_seed_and_inference_is_not(options):
    router = Router(12, 8, RouterConfig(3, **options), init_std=1.0, device=DEVICE)
    plain = Router(12, 8, RouterConfig(3), device=DEVICE)
    x = torch.randn(40, 12, device=DEVICE)
    with torch.no_grad():
        plain.weight.copy_(router.weight)

    def run(seed: int) -> RouterOutput:
        torch.manual_seed(seed)
        return router(x)

    one, again, other = run(1), run(1), run(2)
    assert torch.equal(one.weights, again.weights) and torch.equal(one.expert_ids, again.expert_ids)
    assert not torch.equal(one.weights, other.weights)
    router.eval()
    for out in (run(1), run(2)):
        for name in ("logits", "weights", "expert_ids"):
            assert torch.equal(getattr(out, name), getattr(plain(x), name))


def test_jitter_multiplies_the_input_and_can_be_annealed():
    x = torch.full((4000, 4), 2.0, device=DEVICE)
    router = Router(4, 4, RouterConfig(2, jitter=0.1), device=DEVICE)
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
    assert 1.8 <= router(x).logits.min() < 1.81
    router.jitter = 0.25
    logits = router(x).logits
    assert 1.5 <= logits.min() < 1.51 and 2.49 < logits.max() <= 2.5
    router.jitter = 0.0
    assert torch.equal(router(x).logits, x)
    with pytest.raises(ValueError, match="made without jitter"):
        Router(4, 4, RouterConfig(2)).jitter = 0.1
    with pytest.raises(ValueError, match="jitter must be at least 0 and below 1"):
        router.jitter = 1.0


@pytest.mark.slow
def test_annealed_jitter_is_not_compiled_anew():
    router = Router(4, 4, RouterConfig(2, jitter=0.1), device=DEVICE)
    x = torch.full((64, 4), 2.0, device=DEVICE)
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
    compiled = torch.compile(router, fullgraph=True)
    compiled(x)
    with torch.compiler.set_stance("fail_on_recompile"):
        for eps in (0.05, 0.0):
            router.jitter = eps
            spread = (compiled(x).logits - 2).abs().max().item()
            assert spread == 0 if eps == 0 else 0.08 < spread <= 0.1


@pytest.mark.parametrize("shape", [(3, 5), (1, 3, 4), (4,)])
def test_refuses_other_shapes(shape):
    router = Router(4, 3, RouterConfig(2), device=DEVICE)
    with pytest.raises(ValueError, match=r"Router: hidden states must be \[T, 4\]; got"):
        router(torch.randn(shape, device=DEVICE))


def test_learned_noise_is_learned():
    router = Router(6, 4, RouterConfig(2, learned_noise=True), device=DEVICE)
    x = torch.zeros(20_000, 6, device=DEVICE)
    assert router(x).logits.std().item() == pytest.approx(math.log(2), rel=0.02)  # softplus(0)
    router(torch.randn(50, 6, device=DEVICE)).weights[:, 0].sum().backward()
    assert router.noise_weight.grad.any()


def test_tokens_that_bypass_the_experts():
    config = MoEConfig(8, 12, 4, router=RouterConfig(2, token_dropout=0.5), init_std=0.5)
    layer = dMoE(config, device=DEVICE)
    x = torch.randn(200, 8, device=DEVICE, requires_grad=True)
    y, routing = layer(x, return_routing=True)
    bypasses = (routing.expert_ids == -1).all(dim=1)
    assert 60 < bypasses.sum() < 140 and torch.equal(bypasses, (routing.expert_ids == -1).any(dim=1))
    assert not y[bypasses].any() and not routing.weights[bypasses].any() and y[~bypasses].any(dim=1).all()
    assert routing.tokens_per_expert.sum() == 2 * (~bypasses).sum()
    y.square().sum().backward()
    assert not x.grad[bypasses].any() and x.grad.isfinite().all()
    assert routing.load_balancing_loss.item() == pytest.approx(1, abs=0.5)


def test_closed_experts():
    router = Router(8, 6, RouterConfig(2, expert_dropout=0.9), init_std=1.0, device=DEVICE)
    x = torch.randn(30, 8, device=DEVICE)
    open_experts = []
    for _ in range(50):
        out = router(x)
        closed = out.logits.isinf().all(dim=0)
        assert torch.equal(closed, out.logits.isinf().any(dim=0)) and not closed[out.expert_ids].any()
        assert out.weights.isfinite().all() and out.load_balancing_loss.isfinite() and out.z_loss.isfinite()
        open_experts.append(6 - int(closed.sum()))
    assert min(open_experts) == 2 and max(open_experts) > 2
    (out.weights[:, 0].sum() + out.load_balancing_loss + out.z_loss).backward()
    assert router.weight.grad.isfinite().all()


@pytest.mark.parametrize("options", DISTURBANCES.values(), ids=DISTURBANCES)
def test_checkpointing_recomputes_the_same_disturbance(options):
    layer = dMoE(MoEConfig(8, 12, 6, router=RouterConfig(2, **options), init_std=0.5), device=DEVICE)
    grads = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        torch.manual_seed(3)
        x = torch.linspace(-1, 1, 80, device=DEVICE).view(10, 8).requires_grad_()
        run(x).square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
