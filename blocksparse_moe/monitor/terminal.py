"""Readings in the terminal."""

from __future__ import annotations

import math

from rich import box
from rich.table import Table

from .reading import LayerReading, Reading

COLUMNS = {
    "load_max_over_mean": "max/mean",
    "cold_experts": "cold",
    "drop_rate": "dropped",
    "load_balancing_loss": "balance",
    "router_entropy": "nats/token",
    "confidence": "top-1",
    "logit_max": "max logit",
    "z_loss": "z-loss",
    "load_entropy": "entropy",
    "changed": "changed",
}
"""Those in front are shown where there is not room for all."""

_LEVELS = " ▁▂▃▄▅▆▇█"
_BARS = 32


def table(reading: Reading, width: int) -> Table:
    """A line for each layer: load of its experts, 1/4 of the height for the mean, and what it comes to, as far as it fits."""
    made = Table(title=f"step {reading.step}", title_justify="left", box=box.SIMPLE_HEAD)
    cells = {heading: [_short(layer.scalars[name]) for layer in reading] for name, heading in COLUMNS.items()}
    bars = min(_BARS, max((layer.num_experts for layer in reading), default=1))
    room = width - 2 - sum(3 + size for size in (max(len(layer.name or "model") for layer in reading), bars))
    made.add_column("layer", no_wrap=True)
    made.add_column("load", no_wrap=True)
    shown = []
    for heading, values in cells.items():
        room -= 3 + max(len(heading), *map(len, values))
        if room < 0:
            break
        made.add_column(heading, justify="right", no_wrap=True)
        shown.append(heading)
    for index, layer in enumerate(reading):
        made.add_row(layer.name or "model", _bars(layer, bars), *(cells[heading][index] for heading in shown))
    return made


def _bars(layer: LayerReading, count: int) -> str:
    """At most so many bars; of more experts each shows the hottest of its neighbours."""
    load = layer.experts["load"][: layer.num_experts] * layer.num_experts
    heights = [part.max().item() for part in load.split(math.ceil(len(load) / count))]
    return "".join("?" if math.isnan(height) else _LEVELS[min(8, math.ceil(2 * height))] for height in heights)


def _short(value: float) -> str:
    if math.isnan(value):
        return "·"
    return f"{value:.0f}" if abs(value) < 1e6 and value == int(value) else f"{value:.3g}"
