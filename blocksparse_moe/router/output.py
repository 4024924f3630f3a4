"""What a router decided, and the losses of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from . import losses
from .choice import log_scores


@dataclass(frozen=True)
class RouterOutput:
    """What the router decided.

    Attributes:
        logits: [T, E] fp32; while training with their noise, and -inf for experts that are closed.
        weights: [T, K] fp32, of the experts in their order.
        expert_ids: [T, K] int64, in falling order of score (plus correction bias); -1 for slots that go to no expert; from E on
            identity experts, then null experts.
        score: what made scores of the logits, see `RouterConfig`.
        clean_logits: [T, E] fp32 without their noise; None where none was drawn.
        noise_scale: standard deviation of the noise, [T, E] or []; None where none was drawn.

    The losses are computed when they are read, and nothing is kept anywhere.
    """

    logits: Tensor
    weights: Tensor
    expert_ids: Tensor
    score: str = "softmax"
    clean_logits: Tensor | None = None
    noise_scale: Tensor | None = None

    @property
    def tokens_per_expert(self) -> Tensor:
        """[E] int64: slots that chose each expert, those that compute nothing included."""
        return losses.count_slots(self)[0]

    @property
    def drop_rate(self) -> Tensor:
        """Share of slots that go to no expert: bypassing tokens, experts beyond `top_p` or beyond their capacity."""
        return (self.expert_ids < 0).float().mean() if self.expert_ids.numel() else self.weights.new_zeros(())

    @property
    def probabilities(self) -> Tensor:
        """[T, E] fp32: scores divided by their sum over all experts."""
        return log_scores(self.logits, self.score).softmax(dim=-1)

    @property
    def load_balancing_loss(self) -> Tensor:
        """Of these tokens: `losses.load_balancing_loss`, which also knows padding, sequences and global batches."""
        return losses.load_balancing_loss(self)

    @property
    def z_loss(self) -> Tensor:
        """Of these tokens: `losses.z_loss`."""
        return losses.z_loss(self)
