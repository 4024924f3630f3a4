"""Readings in the terminal."""

from __future__ import annotations

import math

from rich import box
from rich.table import Table

from .reading import LayerReading, Reading

COLUMNS = {
    "load_max_over_mean": "max/mean",
    "load_entropy": "entropy",
    "cold_experts": "cold",
    "drop_rate": "dropped",
    "load_balancing_loss": "balance",
    "z_loss": "z-loss",
    "router_entropy": "nats/token",
    "confidence": "top-1",
    "logit_max": "max logit",
    "changed": "changed",
}
_LEVELS = " ▁▂▃▄▅▆▇█"
_BARS = 32


def table(reading: Reading) -> Table:
    """A line for each layer: load of its experts, 1/4 of the height for the mean, and what it comes to."""
    made = Table(title=f"step {reading.step}", title_justify="left", box=box.SIMPLE_HEAD)
    made.add_column("layer", overflow="fold")
    made.add_column("load", no_wrap=True)
    for heading in COLUMNS.values():
        made.add_column(heading, justify="right", no_wrap=True)
    for layer in reading:
        made.add_row(layer.name or "model", _bars(layer), *(_short(layer.scalars[name]) for name in COLUMNS))
    return made


def _bars(layer: LayerReading) -> str:
    """At most so many bars; of more experts each shows the hottest of its neighbours."""
    load = layer.experts["load"][: layer.num_experts] * layer.num_experts
    width = math.ceil(len(load) / _BARS)
    heights = [part.max().item() for part in load.split(width)]
    return "".join("?" if math.isnan(height) else _LEVELS[min(8, math.ceil(2 * height))] for height in heights)


def _short(value: float) -> str:
    if math.isnan(value):
        return "·"
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e6 else f"{value:.3g}"
