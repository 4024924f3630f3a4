"""Losses that balance a router, as functions of what it decided. None is scaled by a coefficient, nothing is kept anywhere.

A loss over tokens that are spread over micro-batches or ranks needs the load of all of them: `GlobalLoad`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import positive_integer

if TYPE_CHECKING:
    from .output import RouterOutput


def load_balancing_loss(
    routing: RouterOutput,
    *,
    mask: Tensor | None = None,
    sequences: int = 1,
    load: Tensor | None = None,
    transformers_scale: bool = False,
) -> Tensor:
    """E * sum_e f_e P_e: f_e the share of slots that chose expert e (a mean over K), P_e the mean probability, which is the
    score divided by the sum over all experts. 1 at perfect balance, E at collapse, 0 for no tokens.

    Args:
        mask: [T] (or any shape of T elements), true for tokens that count; padding is false.
        sequences: the tokens are so many sequences of equal length, one after the other; the loss is the mean over sequences
            of each one's own. DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
        load: [E], slots of each expert over a larger batch to which these tokens belong, in place of their own: see
            `GlobalLoad`. Not with `sequences`.
        transformers_scale: times K, the value that transformers' load_balancing_loss_func gives of one layer.
    Returns:
        scalar fp32, differentiable in the logits through P.
    Raises:
        ValueError: the tokens do not make so many sequences, or mask or load has another size.
    Source: Switch Transformer, arXiv:2101.03961; over the global batch: arXiv:2501.11873.
    """
    (T, E), top_k = routing.logits.shape, routing.expert_ids.shape[1]
    sequences = positive_integer("load_balancing_loss", "sequences", sequences)
    if T % sequences:
        raise ValueError(f"load_balancing_loss: {T} tokens do not make {sequences} sequences of equal length.")
    if load is not None and (sequences > 1 or load.shape != (E,)):
        raise ValueError(f"load_balancing_loss: load must be [{E}], and goes with sequences=1; got {list(load.shape)}.")
    counts = _count_slots(routing, mask, sequences) if load is None else load[None]
    share = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    probability = routing.probabilities
    if mask is None:
        tokens: int | Tensor = max(1, T // sequences)
    else:
        counted = _flat_mask("load_balancing_loss", routing, mask)
        probability = probability.where(counted[:, None], 0)
        tokens = counted.view(sequences, -1).sum(dim=1, keepdim=True).clamp(min=1)
    mean = probability.view(sequences, -1, E).sum(dim=1) / tokens
    loss = E * (share * mean).sum(dim=1)
    if sequences == 1:
        loss = loss[0]
    else:  # sequences of padding alone do not count
        loss = loss.sum() / (counts.sum(dim=1) > 0).sum().clamp(min=1)
    return loss * top_k if transformers_scale else loss


def z_loss(routing: RouterOutput, *, mask: Tensor | None = None) -> Tensor:
    """Mean over tokens of logsumexp(logits)^2, 0 for no tokens. `mask` as above. ST-MoE, arXiv:2202.08906."""
    squares = routing.logits.logsumexp(dim=-1).square()
    if mask is None:
        return squares.sum() / max(1, len(squares))
    counted = _flat_mask("z_loss", routing, mask)
    return squares.where(counted, 0).sum() / counted.sum().clamp(min=1)


def importance_loss(routing: RouterOutput, *, mask: Tensor | None = None) -> Tensor:
    """The squared coefficient of variation over experts of the sum of their routing weights: 0 at balance, E - 1 at collapse
    and K = 1. Shazeer et al., arXiv:1701.06538, equations 6 and 7."""
    weights = routing.weights
    if mask is not None:
        weights = weights.where(_flat_mask("importance_loss", routing, mask)[:, None], 0)
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
    margin = (routing.clean_logits - others.masked_fill(is_free, 0)) / routing.noise_scale
    probability = torch.special.ndtr(margin).masked_fill(is_free, 1).masked_fill(is_closed, 0)
    if mask is not None:
        probability = probability.where(_flat_mask("load_loss", routing, mask)[:, None], 0)
    return _squared_variation(probability.sum(dim=0))


class GlobalLoad:
    """Slots of each expert over the micro-batches of an optimizer step and the ranks of a process group.

        load = GlobalLoad(group)
        for micro_batch in ...:
            y, routing = layer(micro_batch, return_routing=True)
            loss = load_balancing_loss(routing, load=load.add(routing.tokens_per_expert))
            ...
        optimizer.step()
        load.reset()

    The loss is bilinear in load and probability, and its gradient goes through the probability alone. So ranks whose
    gradients are averaged get the gradient of the loss over all their tokens, if each has as many of them. Over micro-batches
    the load is that of those seen so far (arXiv:2501.11873), padding included. Add outside
    of what a checkpoint recomputes. For several layers stack their counts, [layers, E]: one all-reduce for all.

    Args:
        group: the ranks that have other tokens; None for all of them if torch.distributed is initialised, else this one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self._so_far: Tensor | None = None

    def add(self, counts: Tensor) -> Tensor:
        """`counts`, of any shape, of one micro-batch; returns the sum over ranks and over micro-batches so far."""
        counts = sum_over_ranks(counts.detach().clone(), self.group)
        self._so_far = counts if self._so_far is None else self._so_far + counts
        return self._so_far

    def reset(self) -> None:
        """Begin a new step."""
        self._so_far = None


def sum_over_ranks(counts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """In place."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(counts, group=group)
    return counts


def _count_slots(routing: RouterOutput, mask: Tensor | None, sequences: int) -> Tensor:
    """[sequences, E] int64."""
    ids = routing.expert_ids
    E = routing.logits.shape[1]
    if mask is not None:
        ids = ids.where(_flat_mask("load_balancing_loss", routing, mask)[:, None], -1)
    ids = ids.reshape(sequences, -1)
    return ids.new_zeros(sequences, E).scatter_add(1, ids.clamp(min=0), (ids >= 0).long())


def _flat_mask(function: str, routing: RouterOutput, mask: Tensor) -> Tensor:
    """[T] bool."""
    T = len(routing.logits)
    if mask.numel() != T:
        raise ValueError(f"{function}: mask must have an element for each of the {T} tokens; got {list(mask.shape)}.")
    return mask.reshape(T).bool()


def _squared_variation(values: Tensor) -> Tensor:
    mean = values.mean()
    return (values - mean).square().mean() / mean.square().clamp(min=torch.finfo(values.dtype).tiny)
