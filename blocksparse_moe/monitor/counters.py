"""What is counted of a layer: sums on its device, which nothing waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..hooks import unless_recomputed
from ..router.choice import log_scores
from .reading import SUMS


class Counters:
    """Sums over the tokens of this step, of the steps of a window, and their exponential moving average.

    Attributes:
        columns: C, experts that a slot can go to, identity and null experts included.
        now: [2 C + len(SUMS)] fp64: slots of each expert, summed probabilities of each expert, then `SUMS`.
        past: [window, as many].
    """

    def __init__(self, columns: int, window: int, device: torch.device) -> None:
        self.columns = columns
        size = 2 * columns + len(SUMS)
        device = torch.device("cpu") if device.type == "meta" else device  # until the layer is somewhere
        self.now, self._sum = torch.zeros(2, size, dtype=torch.float64, device=device)
        self._weight = self.now.new_zeros(())  # of the steps in the average
        self.past = torch.zeros(window, size, dtype=torch.float64, device=device)

    def move_to(self, device: torch.device) -> None:
        if self.now.device != device:
            self.now, self.past, self._sum, self._weight = (
                kept.to(device) for kept in (self.now, self.past, self._sum, self._weight)
            )

    def close_step(self, step: int, ema: float) -> None:
        """Move what was counted into the window and the average."""
        self.past[step % len(self.past)] = self.now
        is_finite = are_finite(self.now)
        self._sum = torch.where(is_finite, self._sum.lerp(self.now, 1 - ema), self._sum)
        self._weight = torch.where(is_finite, ema * self._weight + (1 - ema), self._weight)
        self.now.zero_()

    @property
    def average(self) -> Tensor:
        """[as many]: the exponential moving average of the steps that were finite; 0 before the first."""
        return self._sum / self._weight.clamp(min=torch.finfo(torch.float64).tiny)

    def once(self, add: Callable[..., None], *seen: Any) -> None:
        """`add(*seen)`, unless compiled code is recomputed; other code has been asked before it comes here."""
        before = self.now.clone() if torch.compiler.is_compiling() else None
        add(*seen)
        if before is not None:
            self.now.copy_(unless_recomputed(self.now, before))

    def add_logits(self, logits: Tensor, score: str) -> None:
        """[T, C] or, where a router has other columns than experts, [T, any]; their probabilities are then not counted."""
        logits = logits.float()
        probabilities = log_scores(logits, score).softmax(dim=1)
        largest = probabilities.amax(dim=1) if logits.numel() else logits.new_zeros(0)
        open_logits = logits.masked_fill(logits == -torch.inf, 0)  # closed experts
        norms = torch.linalg.vector_norm(open_logits, dim=1, dtype=torch.float64)  # whose squares do not overflow
        entropy = torch.special.entr(probabilities).sum()
        sums = torch.stack((norms.sum(), entropy, largest.sum(), logits.logsumexp(dim=1).double().square().sum()))
        C = self.columns
        if logits.shape[1] == C:
            self.now[C : 2 * C] += probabilities.sum(dim=0)
        else:
            self.now[C : 2 * C] = torch.nan
        self.now[2 * C] += len(logits)
        self.now[2 * C + 3 : -1] += sums
        if logits.numel():
            self.now[-1] = torch.maximum(self.now[-1], open_logits.abs().amax().double())

    def add_ids(self, expert_ids: Tensor) -> None:
        """[T, K], of any integer dtype; those outside [0, C) are no expert's."""
        C, ids = self.columns, expert_ids.reshape(-1).long()
        ids = ids.where((ids >= 0) & (ids < C), C)
        counts = ids.new_zeros(C + 1).scatter_add(0, ids, torch.ones_like(ids))
        self.now[:C] += counts[:C]
        self.now[2 * C + 1] += ids.numel()
        self.now[2 * C + 2] += counts[C]


def are_finite(sums: Tensor) -> Tensor:
    """[..., sums] -> [...]: whether a step's `SUMS` are; probabilities may be NaN because they are not counted."""
    return sums[..., -len(SUMS) :].isfinite().all(dim=-1)


def over_window(past: Tensor) -> Tensor:
    """[steps, sums] -> [sums]: of all steps that are finite."""
    past = past.where(are_finite(past)[:, None], 0)
    total = past.sum(dim=0)
    total[-1] = past[:, -1].amax()
    return total
