"""The load-balancing loss of a batch whose tokens are spread over micro-batches and ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from blocksparse_moe_kernels.launch import check_type

from ..hooks import is_recomputed, unless_recomputed
from .balancing import sum_over_ranks
from .losses import tally
from .output import RouterOutput


class GlobalLoadBalancingLoss:
    """E * sum_e f_e P_e over all tokens of an optimizer step: those of its micro-batches, and of the ranks of a process group.

        balance = GlobalLoadBalancingLoss(group)
        for micro_batch in micro_batches:
            y, routing = layer(micro_batch, return_routing=True)
            loss = task_loss(y) + coefficient * balance(routing)
            (loss / len(micro_batches)).backward()
        optimizer.step()
        balance.reset()

    The mean of what it returns, over micro-batches and ranks, is the loss of the whole batch, however that is split and padded.
    Ranks may have unlike numbers of tokens, also none, but of micro-batches all the same.

    The gradient goes through P alone, and f is not known before the last micro-batch has been routed. Each call takes the f of
    what was counted until then (arXiv:2501.11873), so that over one micro-batch the gradient, averaged over ranks, is that of
    the whole batch, and over several it is an estimate. It is exact over several as well if they are counted beforehand, by a
    forward pass more:

        with torch.no_grad():
            for micro_batch in micro_batches:
                balance.count(layer(micro_batch, return_routing=True)[1])

    What activation checkpointing computes once more is not counted again; run the backward pass after each call.

    Args:
        group: the ranks that have other tokens; None for all of them if torch.distributed is initialised, else this one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.reset()

    def reset(self) -> None:
        """Begin a new step."""
        self._counted: Tensor | None = None
        self._is_counted_beforehand = False
        # Summed probabilities of this rank [layers, E] and the losses [layers], of all calls and of all but the last.
        self._now: tuple[Tensor, Tensor] | None = None
        self._before: tuple[Tensor, Tensor]

    def count(self, *routings: RouterOutput, mask: Tensor | None = None) -> None:
        """Count a micro-batch beforehand, and give no loss of it; then all of the step must be."""
        if self._counted is not None and not self._is_counted_beforehand:
            raise ValueError(
                "GlobalLoadBalancingLoss: count() all micro-batches before the first loss, and reset() after a step."
            )
        counts, _, tokens = self._tallies(routings, mask)
        self._is_counted_beforehand = True
        self._add(counts, tokens)

    def __call__(self, *routings: RouterOutput, mask: Tensor | None = None, transformers_scale: bool = False) -> Tensor:
        """This micro-batch's part of the loss; of several layers, which must have as many experts, the mean.

        Args:
            routings: of each layer, whose counts are summed over ranks together.
            mask: [T] (or any shape of T elements), true for tokens that count; padding is false.
            transformers_scale: times K.
        Returns:
            scalar fp32, differentiable in the logits.
        """
        counts, probability, tokens = self._tallies(routings, mask)
        if not (is_recomputed() or self._is_counted_beforehand):
            self._add(counts, tokens)
        if self._counted is None:
            raise ValueError("GlobalLoadBalancingLoss: reset() before the backward pass of what is recomputed.")
        slots, tokens, calls = self._counted.tensor_split([-2, -1], dim=1)
        share = slots / slots.sum(dim=1, keepdim=True).clamp(min=1)
        if self._now is None:
            self._now = self._before = torch.zeros_like(probability), probability.new_zeros(len(probability))
        # The loss of all calls until now, each as large as their mean over ranks; this call's part is what it adds.
        self._before = unless_recomputed(self._now[0], self._before[0]), unless_recomputed(self._now[1], self._before[1])
        probability = self._before[0] + probability
        losses = slots.shape[1] * (share * probability).sum(dim=1) * (calls / tokens.clamp(min=1))[:, 0]
        parts = losses - self._before[1]
        self._now = unless_recomputed(probability, self._now[0]), unless_recomputed(losses, self._now[1])
        if transformers_scale:
            parts = torch.stack([part * routing.expert_ids.shape[1] for part, routing in zip(parts, routings, strict=True)])
        return parts.mean()

    def _tallies(self, routings: tuple[RouterOutput, ...], mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Of each layer slots [layers, E], the sum of probabilities [layers, E], and tokens [layers, 1]."""
        for routing in routings:
            check_type("GlobalLoadBalancingLoss", "routing", routing, RouterOutput, "Call a layer with return_routing=True.")
        if len({routing.logits.shape[1] for routing in routings}) != 1:
            raise ValueError("GlobalLoadBalancingLoss: give it the routing of one or more layers with as many experts.")
        device = routings[0].logits.device  # a model may lie on several
        tallies = [[one.to(device) for one in tally(routing, mask)] for routing in routings]
        counts, probability, tokens = (torch.cat(layers) for layers in zip(*tallies, strict=True))
        kept = self._counted
        if kept is not None and kept.shape != (len(counts), counts.shape[1] + 2):
            raise ValueError("GlobalLoadBalancingLoss: give it the same layers until reset().")
        return counts, probability, tokens[:, None]

    def _add(self, counts: Tensor, tokens: Tensor) -> None:
        """A micro-batch to what is kept of all of them and all ranks: [slots, tokens, calls]."""
        counted = sum_over_ranks(torch.cat((counts, tokens, torch.ones_like(tokens)), dim=1), self.group)
        self._counted = counted if self._counted is None else unless_recomputed(self._counted + counted, self._counted)
