"""The load of every expert over a whole training, in bounded memory."""

from __future__ import annotations

import torch
from torch import Tensor

from .reading import LayerReading, Reading


class HeatMap:
    """Loads of one layer, experts by steps; once there are too many columns, neighbours are averaged into one.

    Attributes:
        columns: loads [C] over their mean, one for `stride` steps each; NaN for steps that were not seen.
        stride: steps of a column.
        before: steps before the first column.
    """

    def __init__(self, limit: int = 1024) -> None:
        self.limit = limit
        self._begin(0)
        self._step: int | None = None

    def _begin(self, before: int) -> None:
        """An empty map whose first column comes after so many steps."""
        self.before, self.stride = before, 1
        self.columns: list[Tensor] = []
        self._rest: list[Tensor] = []

    @property
    def end(self) -> int:
        """The step of the last column."""
        return self.before + len(self.columns) * self.stride

    def extend(self, step: int, layer: LayerReading) -> None:
        """Take the steps since the last reading, as far as the window of the monitor still has them. A step that was seen
        already begins a new map."""
        history = layer.history
        if self._step is None or step < self._step:
            self._step = step - len(history)
            self._begin(self._step)
        missing = step - self._step - len(history)
        new = history[max(0, -missing) :]
        self._step = step
        for slots in (*[torch.zeros_like(new[0])] * max(0, missing), *new) if len(new) else ():
            mean = slots[: layer.num_experts].mean()
            self._rest.append(slots / mean if mean > 0 else torch.full_like(slots, torch.nan))
            if len(self._rest) == self.stride:
                self.columns.append(torch.stack(self._rest).mean(dim=0))
                self._rest = []
            if len(self.columns) == self.limit:
                self.columns = [(one + other) / 2 for one, other in zip(self.columns[::2], self.columns[1::2], strict=True)]
                self.stride *= 2

    @property
    def image(self) -> Tensor:
        """[C, columns]; NaN where a step had no tokens."""
        return torch.stack(self.columns, dim=1) if self.columns else torch.zeros(0, 0, dtype=torch.float64)


class HeatMaps(dict[str, HeatMap]):
    """Of all layers, by name."""

    def extend(self, reading: Reading) -> None:
        for layer in reading:
            self.setdefault(layer.name, HeatMap()).extend(reading.step, layer)
