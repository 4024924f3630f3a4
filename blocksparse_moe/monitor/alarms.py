"""Alarms: thresholds of metrics, and who is called where one is passed."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ..checks import one_of, positive_integer
from .reading import PER_EXPERT, SCALARS, Reading

logger = logging.getLogger("blocksparse_moe.monitor")


@dataclass(frozen=True)
class Alert:
    """What an alarm found.

    Attributes:
        experts: those that passed the bound, for a metric of experts; empty for one of a layer.
        value: of the layer, or the worst of the experts.
    """

    step: int
    layer: str
    metric: str
    value: float
    bound: float
    experts: tuple[int, ...] = ()

    def __str__(self) -> str:
        of = f" of experts {', '.join(map(str, self.experts))}" if self.experts else ""
        side = "above" if self.value > self.bound else "below"
        return f"step {self.step}, layer {self.layer!r}: {self.metric}{of} is {self.value:.4g}, {side} {self.bound:g}"


def log(alert: Alert) -> None:
    """A warning of the logger "blocksparse_moe.monitor"."""
    logger.warning("%s", alert)


@dataclass
class Alarm:
    """Calls somebody when a metric passes a bound.

        Alarm("load_max_over_mean", above=8)                        # a warning of logging
        Alarm("load", below=0.1 / 128, patience=3, callback=lambda alert: reinit_experts(...))

    Args:
        metric: a name of `SCALARS` or of `PER_EXPERT`, of which any expert may pass the bound.
        above, below: bounds; NaN, which stands for nothing measured, passes none.
        patience: readings in a row of which each passes it.
        callback: gets an `Alert` at every reading from then on, until the metric is back.
    """

    metric: str
    above: float = math.inf
    below: float = -math.inf
    patience: int = 1
    callback: Callable[[Alert], None] = log
    _times: Counter[tuple[str, int | None]] = field(default_factory=Counter, init=False, repr=False)

    def __post_init__(self) -> None:
        one_of("Alarm", "metric", self.metric, (*SCALARS, *PER_EXPERT))
        self.patience = positive_integer("Alarm", "patience", self.patience)
        for name in ("above", "below"):
            bound = getattr(self, name)
            if not isinstance(bound, (int, float)) or math.isnan(bound):
                raise TypeError(f"Alarm: {name} must be a number; got {bound!r}.")
        if not callable(self.callback):
            raise TypeError(f"Alarm: callback must take an Alert; got {self.callback!r}.")
        if self.above == math.inf and self.below == -math.inf:
            raise ValueError(f"Alarm: {self.metric!r} has no bound; give above or below.")

    def check(self, reading: Reading) -> None:
        for layer in reading:
            if self.metric in SCALARS:
                value = layer.scalars[self.metric]
                if self._passed(layer.name, None, value):
                    self.callback(Alert(reading.step, layer.name, self.metric, value, self._bound(value)))
                continue
            values = dict(enumerate(layer.experts[self.metric].tolist()))
            passed = {expert: value for expert, value in values.items() if self._passed(layer.name, expert, value)}
            if passed:
                value = max(passed.values(), key=lambda value: max(value - self.above, self.below - value))
                self.callback(Alert(reading.step, layer.name, self.metric, value, self._bound(value), tuple(passed)))

    def _passed(self, layer: str, expert: int | None, value: float) -> bool:
        key = (layer, expert)
        self._times[key] = self._times[key] + 1 if value > self.above or value < self.below else 0
        return self._times[key] >= self.patience

    def _bound(self, value: float) -> float:
        return self.above if value > self.above else self.below
