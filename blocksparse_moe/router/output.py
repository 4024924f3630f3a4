"""What a router decided, and the losses of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .choice import log_scores


@dataclass(frozen=True)
class RouterOutput:
    """What the router decided.

    Attributes:
        logits: [T, E] fp32; while training with their noise, and -inf for experts that are closed.
        weights: [T, K] fp32, of the experts in their order.
        expert_ids: [T, K] int64, in falling order of score (plus correction bias); -1 for tokens that go to no expert.
        score: what made scores of the logits, see `RouterConfig`.

    The losses are computed when they are read, and nothing is kept anywhere.
    """

    logits: Tensor
    weights: Tensor
    expert_ids: Tensor
    score: str = "softmax"

    @property
    def tokens_per_expert(self) -> Tensor:
        """[E] int64: slots that chose each expert."""
        ids = self.expert_ids.reshape(-1)
        return ids.new_zeros(self.logits.shape[-1]).scatter_add(0, ids.clamp(min=0), (ids >= 0).long())

    @property
    def probabilities(self) -> Tensor:
        """[T, E] fp32: scores divided by their sum over all experts."""
        return log_scores(self.logits, self.score).softmax(dim=-1)

    @property
    def load_balancing_loss(self) -> Tensor:
        """E * sum_e f_e P_e, f_e the share of slots (a mean over K), P_e the mean probability: 1 at perfect balance, E at
        collapse, 0 for no tokens. Not scaled by any coefficient. Switch Transformer, arXiv:2101.03961."""
        load = self.tokens_per_expert.to(self.logits.dtype)
        share = load / load.sum().clamp(min=1)
        mean_probability = self.probabilities.sum(dim=0) / max(1, self.logits.shape[0])
        return self.logits.shape[-1] * torch.dot(share, mean_probability)

    @property
    def z_loss(self) -> Tensor:
        """mean over tokens of logsumexp(logits)^2, 0 for no tokens; not scaled. ST-MoE, arXiv:2202.08906."""
        return self.logits.logsumexp(dim=-1).square().sum() / max(1, self.logits.shape[0])
