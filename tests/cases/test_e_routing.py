"""Group E: what the router's numbers mean."""

from __future__ import annotations

import warnings

import pytest
import torch

from blocksparse_moe import Router, RouterConfig
from tests.support import DEVICE


def router_of(logits: list[list[float]], top_k: int, normalize: bool) -> tuple[Router, torch.Tensor]:
    """(router, x) for which the logits of x are those given."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = RouterConfig(top_k=top_k, normalize=normalize)
    x = torch.tensor(logits, device=DEVICE)
    router = Router(x.shape[1], x.shape[1], config, device=DEVICE)
    with torch.no_grad():
        router.weight.copy_(torch.eye(x.shape[1]))
    return router, x


@pytest.mark.case("E1")
def test_one_choice_is_normalised_over_choices():
    """megablocks PR 87: with K = 1 the result loses a dimension, and "normalise" runs over the tokens (0.538 and 0.462)."""
    router, x = router_of([[0.7, 0.3], [0.4, 0.6]], top_k=1, normalize=True)
    routing = router(x.log())
    assert routing.expert_ids.tolist() == [[0], [1]]
    assert routing.weights.tolist() == [[1.0], [1.0]]
    router, x = router_of([[0.7, 0.3], [0.4, 0.6]], top_k=1, normalize=False)
    torch.testing.assert_close(router(x.log()).weights, torch.tensor([[0.7], [0.6]], device=DEVICE))


@pytest.mark.case("E2")
@pytest.mark.parametrize(("normalize", "expected"), [(True, [0.7311, 0.2689]), (False, [0.6439, 0.2369])])
def test_weights_with_and_without_renormalisation(normalize, expected):
    """torchtitan 1448: no option to renormalise the chosen weights, so converted models train badly."""
    router, x = router_of([[2.0, 1.0, 0.0, -1.0]], top_k=2, normalize=normalize)
    routing = router(x)
    assert routing.expert_ids.tolist() == [[0, 1]]
    torch.testing.assert_close(routing.weights, torch.tensor([expected], device=DEVICE), rtol=0, atol=5e-5)


@pytest.mark.case("E3")
@pytest.mark.parametrize("normalize", [False, True])
def test_unchosen_experts_share_the_softmax(normalize):
    """Megatron 955, Qwen3 687: softmax over the chosen experts alone is not softmax over all without renormalisation."""
    router, x = router_of([[2.0, 1.0, 0.0, -1.0]], top_k=2, normalize=normalize)
    x.requires_grad_()
    routing = router(x)
    expected = 1.0 if normalize else 0.8808
    torch.testing.assert_close(routing.weights.sum(), torch.tensor(expected, device=DEVICE), rtol=0, atol=5e-5)
    (grad,) = torch.autograd.grad(routing.weights[0, 0], x)
    unchosen = grad[0, 2:].abs()
    assert (unchosen < 1e-7).all() if normalize else (unchosen > 1e-2).all()
