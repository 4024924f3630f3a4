"""Experts that are given, and those of a choice that are left out, by an id of -1: not needed, or without room."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..checks import number, positive_integer
from .choice import log_scores, scores
from .config import RouterConfig


def weigh(logits: Tensor, expert_ids: Tensor, config: RouterConfig) -> Tensor:
    """[T, K] fp32: weights of given experts, as of those that a router chose itself; 0 where the id is no expert's.

    Args:
        logits: [T, E] fp32. expert_ids: [T, K] int64, -1 for no expert.
    """
    here = expert_ids >= 0
    columns = expert_ids.where(here, 0)
    if config.normalize:
        chosen = log_scores(logits, config.score).gather(1, columns).masked_fill(~here, -torch.inf)
        largest = chosen.amax(dim=1, keepdim=True).masked_fill(~here.any(dim=1, keepdim=True), 0)
        weights = (chosen - largest).exp()
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    else:
        weights = scores(logits, config.score).gather(1, columns).masked_fill(~here, 0)
    return weights * config.scaling_factor


def within_top_p(logits: Tensor, weights: Tensor, expert_ids: Tensor, config: RouterConfig) -> tuple[Tensor, Tensor]:
    """The fewest of each token's experts, in their order, whose probabilities add up to `config.top_p`, or all K.

    Source: Harder Tasks Need More Experts, arXiv:2403.07652.
    """
    assert config.top_p is not None
    probability = log_scores(logits, config.score).softmax(dim=1).gather(1, expert_ids)
    before = probability.detach().cumsum(dim=1) - probability.detach()
    wanted = ~(before >= config.top_p)  # of the first it is nil; of a row that is not finite NaN, and all stay
    weights = weights.masked_fill(~wanted, 0)
    if config.normalize:
        weights = weights * (config.scaling_factor / weights.sum(dim=1, keepdim=True))
    return weights, expert_ids.masked_fill(~wanted, -1)


def within_capacity(weights: Tensor, expert_ids: Tensor, num_experts: int, config: RouterConfig) -> tuple[Tensor, Tensor]:
    """Without the slots that exceed the capacity of their expert, ceil(capacity_factor * T * K / E).

    By position earlier choices go first, then earlier tokens, as in GShard (arXiv:2006.16668); by probability larger weights
    do, as in the batch prioritized routing of arXiv:2106.05974.
    """
    T, top_k = expert_ids.shape
    if T == 0:
        return weights, expert_ids
    assert config.capacity_factor is not None
    capacity = math.ceil(config.capacity_factor * T * top_k / num_experts - 1e-9)  # 1.1 * 100 is 110
    experts = expert_ids.T.reshape(-1)
    if config.drop == "probability":
        order = weights.detach().T.reshape(-1).argsort(descending=True, stable=True)
    else:
        order = torch.arange(T * top_k, device=experts.device)
    order = order[experts[order].argsort(stable=True)]
    ordered = experts[order] + 1  # those of -1 are a queue of their own
    counts = ordered.new_zeros(num_experts + 1).scatter_add(0, ordered, torch.ones_like(ordered))
    place = torch.arange(T * top_k, device=experts.device) - (counts.cumsum(0) - counts)[ordered]
    has_room = torch.empty_like(place, dtype=torch.bool).scatter(0, order, place < capacity).view(top_k, T).T
    return weights.masked_fill(~has_room, 0), expert_ids.masked_fill(~has_room, -1)


def balanced_ids(num_tokens: int, top_k: int, num_experts: int, device: torch.device | str | None = None) -> Tensor:
    """[T, K] int64: every expert gets as many slots as any other, up to one; for benchmarks, with `dMoE(x, expert_ids=...)`.

    Raises:
        ValueError: K is not in [1, E], or T is negative; TypeError: one of them is no integer.
    """
    number("balanced_ids", "num_tokens", num_tokens, at_least=0)
    num_experts = positive_integer("balanced_ids", "num_experts", num_experts)
    top_k = positive_integer("balanced_ids", "top_k", top_k)
    if top_k > num_experts:
        raise ValueError(f"balanced_ids: top_k must be at most num_experts={num_experts}; got {top_k}.")
    return torch.arange(num_tokens * top_k, device=device).view(num_tokens, top_k) % num_experts
