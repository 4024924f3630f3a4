"""Losses that balance a router, as functions of what it decided. None is scaled by a coefficient, nothing is kept anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..checks import positive_integer

if TYPE_CHECKING:
    from .output import RouterOutput


def load_balancing_loss(
    routing: RouterOutput,
    *,
    mask: Tensor | None = None,
    sequences: int = 1,
    transformers_scale: bool = False,
) -> Tensor:
    """E * sum_e f_e P_e: f_e the share of slots that chose expert e (a mean over K), P_e the mean probability, which is the
    score divided by the sum over all experts. 1 at perfect balance, E at collapse, 0 for no tokens.

    Args:
        mask: [T] (or any shape of T elements), true for tokens that count; padding is false.
        sequences: the tokens are so many sequences of equal length, one after the other; the loss is the mean over sequences
            of each one's own. DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
        transformers_scale: times K, the value that transformers' load_balancing_loss_func gives of one layer.
    Returns:
        scalar fp32, differentiable in the logits through P.
    Raises:
        ValueError: the tokens do not make so many sequences, or the mask has another size.
    Source: Switch Transformer, arXiv:2101.03961. Over micro-batches and ranks: `GlobalLoadBalancingLoss`.
    """
    T, E = routing.logits.shape
    sequences = positive_integer("load_balancing_loss", "sequences", sequences)
    if T % sequences:
        raise ValueError(f"load_balancing_loss: {T} tokens do not make {sequences} sequences of equal length.")
    counts, probability, tokens = tally(routing, mask, sequences)
    share = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    mean = probability / tokens[:, None].clamp(min=1)
    # Sequences of padding alone do not count.
    loss = E * (share * mean).sum() / (counts.sum(dim=1) > 0).sum().clamp(min=1)
    return loss * routing.expert_ids.shape[1] if transformers_scale else loss


def tally(routing: RouterOutput, mask: Tensor | None = None, sequences: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """What a balancing loss is made of, of each sequence and without padding: slots of each expert [sequences, E] int64, the
    sum of each expert's probability [sequences, E] fp32, tokens [sequences] int64."""
    counts, probability = count_slots(routing, mask, sequences), routing.probabilities
    if mask is None:
        tokens = counts.new_full((sequences,), len(probability) // sequences)
    else:
        counted = _flat_mask(routing, mask)
        probability = probability.where(counted[:, None], 0)
        tokens = counted.view(sequences, -1).sum(dim=1)
    return counts, probability.view(sequences, -1, probability.shape[1]).sum(dim=1), tokens


def count_slots(routing: RouterOutput, mask: Tensor | None = None, sequences: int = 1) -> Tensor:
    """[sequences, E] int64: slots of tokens that count, by expert."""
    ids = routing.expert_ids
    if mask is not None:
        ids = ids.where(_flat_mask(routing, mask)[:, None], -1)
    ids = ids.reshape(sequences, -1)
    return ids.new_zeros(sequences, routing.logits.shape[1]).scatter_add(1, ids.clamp(min=0), (ids >= 0).long())


def z_loss(routing: RouterOutput, *, mask: Tensor | None = None) -> Tensor:
    """Mean over tokens of logsumexp(logits)^2, 0 for no tokens. `mask` as above. ST-MoE, arXiv:2202.08906."""
    squares = routing.logits.logsumexp(dim=-1).square()
    if mask is None:
        return squares.sum() / max(1, len(squares))
    counted = _flat_mask(routing, mask)
    return squares.where(counted, 0).sum() / counted.sum().clamp(min=1)


def importance_loss(routing: RouterOutput, *, mask: Tensor | None = None) -> Tensor:
    """The squared coefficient of variation over experts of the sum of their routing weights: 0 at balance, E - 1 at collapse
    and K = 1. Shazeer et al., arXiv:1701.06538, equations 6 and 7."""
    weights = routing.weights
    if mask is not None:
        weights = weights.where(_flat_mask(routing, mask)[:, None], 0)
    # The ids of a token are distinct, so nothing is added up in an order that may change.
    E = routing.logits.shape[1]
    spread = weights.new_zeros(len(weights), E + 1).scatter(1, routing.expert_ids.where(routing.expert_ids >= 0, E), weights)
    return _squared_variation(spread[:, :E].sum(dim=0))


def load_loss(routing: RouterOutput, *, mask: Tensor | None = None) -> Tensor:
    """The squared coefficient of variation of a smooth estimate of the load: for each token and expert the probability that
    the expert would be among the K largest logits, were its noise alone drawn anew. Correction biases, groups, top-p and
    capacities are not looked at; closed experts have none.

    Raises:
        ValueError: the router drew no noise (`noise` or `learned_noise`, while training), or K = E.
    Source: Shazeer et al., arXiv:1701.06538, equations 8 to 11.
    """
    if routing.clean_logits is None or routing.noise_scale is None:
        raise ValueError("load_loss: the router drew no noise; give it noise or learned_noise, and call it in training.")
    top_k, E = routing.expert_ids.shape[1], routing.logits.shape[1]
    if top_k == E:
        raise ValueError(f"load_loss: all {E} experts are chosen by every token, whatever the noise.")
    best = routing.logits.topk(top_k + 1, dim=1).values
    is_chosen = routing.logits > best[:, -1:]
    others = torch.where(is_chosen, best[:, -1:], best[:, -2:-1])  # the K-th best of the other experts
    is_closed, is_free = routing.logits == -torch.inf, others == -torch.inf  # free: too few others are open
    scale = routing.noise_scale.clamp(min=1e-12)  # whose inverse square is finite
    margin = (routing.clean_logits - others.masked_fill(is_free, 0)) / scale
    probability = torch.special.ndtr(margin).masked_fill(is_free, 1).masked_fill(is_closed, 0)
    if mask is not None:
        probability = probability.where(_flat_mask(routing, mask)[:, None], 0)
    return _squared_variation(probability.sum(dim=0))


def _flat_mask(routing: RouterOutput, mask: Tensor) -> Tensor:
    """[T] bool."""
    T = len(routing.logits)
    if mask.numel() != T:
        raise ValueError(f"mask must have an element for each of the {T} tokens; got {list(mask.shape)}.")
    return mask.reshape(T).bool()


def _squared_variation(values: Tensor) -> Tensor:
    mean = values.mean()
    return (values - mean).square().mean() / mean.square().clamp(min=torch.finfo(values.dtype).tiny)
