"""What a monitor knows, as numbers on the host: what they mean, and how they follow from what was counted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table

COLD = 0.3
"""An expert is cold whose load is less than this part of the mean."""

SCALARS = {
    "tokens": "tokens that the router saw",
    "load_min": "smallest load of an expert, a share of the slots that went to any",
    "load_max": "largest load of an expert",
    "load_max_over_mean": "largest load of an expert over the mean, 1 at balance",
    "load_entropy": "entropy of the load over the largest that it can be, 1 at balance",
    "cold_experts": f"experts with less than {COLD} of the mean load",
    "drop_rate": "share of slots that went to no expert",
    "logit_norm": "mean norm of a token's router logits",
    "logit_max": "largest absolute router logit",
    "router_entropy": "mean entropy of a token's probabilities of experts, in nats",
    "confidence": "mean of a token's largest probability of an expert",
    "load_balancing_loss": "E sum f P over all these tokens, 1 at balance",
    "z_loss": "mean of logsumexp(router logits)^2",
    "skipped_steps": "steps of the window left out of all these, because a router logit was NaN or infinite",
    "changed": "share of sampled tokens for which another expert has the largest logit than an interval before",
    "gate_norm": "norm of the gate's weight",
}
"""Metrics of a layer; NaN where nothing was counted or measured."""

PER_EXPERT = {
    "load": "share of the slots that went to any expert",
    "output_norm": "mean norm of the expert's output for a sampled token, before its routing weight; NaN where none chose it",
    "weight_norm": "norm of the expert's weights",
    "gradient_norm": "norm of the gradient of the expert's weights",
}
"""Metrics of each expert of a layer."""

SUMS = ("tokens", "slots", "dropped", "logit_norm", "router_entropy", "confidence", "squared_logsumexp", "logit_max")
"""What is counted of a layer beside slots and probabilities of each expert; sums, but for the last, a maximum."""


@dataclass(frozen=True)
class LayerReading:
    """One layer.

    Attributes:
        name: of its module in the model.
        num_experts: E; identity and null experts, where there are any, come behind them in what has columns C.
        scalars: by the names of `SCALARS`.
        experts: by the names of `PER_EXPERT`: "load" [C], the others [E], fp64.
        history: [steps, C] fp64, slots of each expert at the steps of the window, the last one last.
    """

    name: str
    num_experts: int
    scalars: dict[str, float]
    experts: dict[str, Tensor]
    history: Tensor

    def as_dict(self) -> dict[str, Any]:
        """Scalars and, as lists, metrics of each expert; None for NaN, as JSON wants it."""
        per_expert = {name: [_finite(value) for value in values.tolist()] for name, values in self.experts.items()}
        return {name: _finite(value) for name, value in self.scalars.items()} | per_expert


@dataclass(frozen=True)
class Reading:
    """All layers of a model, after so many steps."""

    step: int
    layers: tuple[LayerReading, ...]

    def __getitem__(self, name: str) -> LayerReading:
        """The layer of that name."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(f"Reading: no layer {name!r}; there are {', '.join(repr(layer.name) for layer in self.layers)}.")

    def __iter__(self) -> Iterator[LayerReading]:
        return iter(self.layers)

    def as_dict(self) -> dict[str, Any]:
        return {"step": self.step, "layers": {layer.name: layer.as_dict() for layer in self.layers}}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        """A line for each layer: rich's `print(reading)`."""
        from .terminal import table

        yield table(self, options.max_width)


def measure(counted: Tensor, num_experts: int) -> tuple[dict[str, float], Tensor]:
    """The metrics that follow from what was counted, and the load [C].

    Args:
        counted: [2 C + len(SUMS)] on the host: slots and summed probabilities of each expert, then `SUMS`.
    """
    columns = (len(counted) - len(SUMS)) // 2
    slots, probabilities = counted[:columns], counted[columns : 2 * columns]
    sums = dict(zip(SUMS, counted[2 * columns :].tolist(), strict=True))
    served, tokens = slots.sum().item(), sums["tokens"]
    load = slots / served if served else torch.full_like(slots, math.nan)
    own = load[:num_experts] / load[:num_experts].sum().clamp(min=1e-300)  # identity and null experts may have got all

    balance = math.nan
    if tokens:
        balance = columns * (load @ probabilities).item() / tokens if served else 0.0

    def per_token(name: str) -> float:
        return sums[name] / tokens if tokens else math.nan

    return {
        "tokens": tokens,
        "load_min": load[:num_experts].min().item(),
        "load_max": load[:num_experts].max().item(),
        "load_max_over_mean": num_experts * own.max().item(),
        "load_entropy": torch.special.entr(own).sum().item() / math.log(num_experts) if num_experts > 1 else 1.0,
        "cold_experts": (own < COLD / num_experts).sum().item() if served else math.nan,
        "drop_rate": sums["dropped"] / sums["slots"] if sums["slots"] else math.nan,
        "logit_norm": per_token("logit_norm"),
        "logit_max": sums["logit_max"] if tokens else math.nan,
        "router_entropy": per_token("router_entropy"),
        "confidence": per_token("confidence"),
        "load_balancing_loss": balance,
        "z_loss": per_token("squared_logsumexp"),
    }, load


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
