"""Where readings go: each writer gets one every so many steps."""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from blocksparse_moe_kernels.versions import require

from .heat_map import HeatMaps
from .reading import PER_EXPERT, SCALARS, Reading

if TYPE_CHECKING:
    from rich.console import Console

_MAP = "viridis"
_HOTTEST = 4.0
"""The load, 1 = mean, from which on a heat map has its last colour."""


class Writer(Protocol):
    """What takes readings."""

    def write(self, reading: Reading) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """Appends a line to a file for every reading: {"step": 50, "layers": {name: {metric: number or list}}}; null for NaN."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, reading: Reading) -> None:
        self._file.write(json.dumps(reading.as_dict(), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Scalars `moe/LAYER/METRIC`, of experts their least and largest, and the load of every expert over the steps as an image.

    Args:
        log_dir: a folder, or a `SummaryWriter` of torch.utils.tensorboard that is open already and stays open.
    """

    def __init__(self, log_dir: Any) -> None:
        require("tensorboard", "2.18", "TensorBoard")
        require("matplotlib", "3.9", "TensorBoard")
        from torch.utils.tensorboard import SummaryWriter

        self._is_ours = not hasattr(log_dir, "add_scalar")
        self._writer = SummaryWriter(os.fspath(log_dir)) if self._is_ours else log_dir
        self._maps = HeatMaps()

    def write(self, reading: Reading) -> None:
        self._maps.extend(reading)
        for layer in reading:
            prefix = f"moe/{layer.name or 'model'}"
            for name, value in layer.scalars.items():
                if math.isfinite(value):
                    self._writer.add_scalar(f"{prefix}/{name}", value, reading.step)
            for name in set(PER_EXPERT) - {"load"}:
                values = layer.experts[name]
                values = values[values.isfinite()]
                if len(values):
                    self._writer.add_scalar(f"{prefix}/{name}_min", values.min().item(), reading.step)
                    self._writer.add_scalar(f"{prefix}/{name}_max", values.max().item(), reading.step)
            image = self._maps[layer.name].image
            if image.numel():
                self._writer.add_image(f"{prefix}/load", _coloured(image), reading.step, dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        if self._is_ours:
            self._writer.close()


def _coloured(image: Tensor) -> Tensor:
    """[C, steps] of load over its mean -> [height, width, 3] uint8, a few pixels for each entry."""
    from matplotlib import colormaps

    colours = colormaps[_MAP](image.clamp(max=_HOTTEST).div(_HOTTEST).nan_to_num().numpy(), bytes=True)
    pixels = torch.from_numpy(colours)[..., :3]
    down, across = max(1, 256 // pixels.shape[0]), max(1, 512 // pixels.shape[1])
    return pixels.repeat_interleave(down, dim=0).repeat_interleave(across, dim=1)


class Prometheus:
    """Gauges `moe_METRIC{layer}` and `moe_expert_METRIC{layer, expert}`, and `moe_step`.

    Args:
        port: serve them at http://ADDRESS:PORT/metrics; 0 takes a free one, None serves nothing.
        address: the interface to serve on.
        registry: where the gauges are; a new one if not given.
    Attributes:
        port: that is served.
    """

    def __init__(self, port: int | None = None, *, address: str = "127.0.0.1", registry: Any = None) -> None:
        require("prometheus-client", "0.20", "Prometheus")
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        self.registry = CollectorRegistry() if registry is None else registry
        self._step = Gauge("moe_step", "steps of the training", registry=self.registry)
        self._scalars = {
            name: Gauge(f"moe_{name}", meaning, ["layer"], registry=self.registry) for name, meaning in SCALARS.items()
        }
        self._experts = {
            name: Gauge(f"moe_expert_{name}", meaning, ["layer", "expert"], registry=self.registry)
            for name, meaning in PER_EXPERT.items()
        }
        self._server = None
        self.port = port
        if port is not None:
            try:
                self._server, _ = start_http_server(port, address, self.registry)
            except OSError as error:
                self._unregister()
                raise OSError(f"Prometheus: cannot serve {address}:{port}: {error}. Port 0 takes a free one.") from error
            self.port = self._server.server_port

    def write(self, reading: Reading) -> None:
        self._step.set(reading.step)
        for layer in reading:
            for name, value in layer.scalars.items():
                self._scalars[name].labels(layer.name).set(value)
            for name, values in layer.experts.items():
                for expert, value in enumerate(values.tolist()):
                    self._experts[name].labels(layer.name, expert).set(value)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        self._unregister()

    def _unregister(self) -> None:
        """So that the next one may be made in the same registry."""
        for gauge in (self._step, *self._scalars.values(), *self._experts.values()):
            with suppress(KeyError):
                self.registry.unregister(gauge)


class Figure:
    """A PNG that is drawn anew at every reading: the load of every expert over the steps, one layer below the other, and the
    course of all layers."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        require("matplotlib", "3.9", "Figure")
        self.path = Path(path)
        self._maps = HeatMaps()
        self._course: dict[str, list[tuple[int, float, float]]] = {}

    def write(self, reading: Reading) -> None:
        self._maps.extend(reading)
        for layer in reading:
            course = self._course.setdefault(layer.name, [])
            course[:] = [point for point in course if point[0] < reading.step]  # of a training that began again
            course.append((reading.step, layer.scalars["load_max_over_mean"], layer.scalars["load_entropy"]))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(f".{self.path.name}")
        self._draw(reading).savefig(beside, format="png", dpi=120)
        beside.replace(self.path)

    def _draw(self, reading: Reading) -> Any:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
        from matplotlib.ticker import MaxNLocator

        names = [layer.name for layer in reading if self._maps[layer.name].columns]
        height = min(40, 2.5 + 0.8 * len(names))
        canvas = Canvas(figsize=(12, height))
        FigureCanvasAgg(canvas)
        edges = {"left": 0.16, "right": 0.98, "top": 1 - 0.4 / height, "bottom": 0.6 / height}
        grid = canvas.add_gridspec(2, 2, width_ratios=(2, 1), wspace=0.16, hspace=0.2, **edges)
        left, above, below = (canvas.add_subplot(grid[place]) for place in ((slice(None), 0), (0, 1), (1, 1)))
        if names:  # as many pixels down for each layer, a blank line between them
            images = [_stretched(self._maps[name].image, 32) for name in names]
            picture = torch.cat([torch.nn.functional.pad(image, (0, 0, 0, 2), value=torch.nan) for image in images])[:-2]
            first, last = self._maps[names[0]].before + 0.5, self._maps[names[0]].end + 0.5
            extent = (first, last, len(picture), 0)
            style: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "cmap": _MAP}
            shown = left.imshow(picture.numpy(), vmin=0, vmax=_HOTTEST, extent=extent, **style)
            canvas.colorbar(shown, ax=left, label="load, 1 = mean", pad=0.02, fraction=0.03, aspect=40)
            left.set_yticks(
                [34 * index + 16 for index in range(len(names))], [name or "model" for name in names], fontsize="small"
            )
        for index, layer in enumerate(reading):
            steps, hottest, entropy = zip(*self._course[layer.name], strict=True)
            colour = f"C{index % 10}"
            above.plot(steps, hottest, color=colour, linewidth=1)
            below.plot(steps, entropy, color=colour, linewidth=1)
        above.set_title("max / mean load", loc="left", fontsize="medium")
        below.set_title("entropy of the load", loc="left", fontsize="medium")
        below.set_ylim(0, 1.05)
        for axes in (left, below):
            axes.set_xlabel("step")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return canvas

    def close(self) -> None:
        pass


def _stretched(image: Tensor, height: int) -> Tensor:
    """[height, columns]: of more experts than lines a line shows the hottest of its neighbours."""
    top = torch.nn.functional.adaptive_max_pool1d(image.nan_to_num(-1).T, height).T
    return torch.where(top < 0, torch.nan, top)


class Terminal:
    """The last reading, live in the terminal."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.live import Live

        self._live = Live(console=console, auto_refresh=False)
        self._is_on = False

    def write(self, reading: Reading) -> None:
        if not self._is_on:
            self._live.start()
            self._is_on = True
        self._live.update(reading, refresh=True)

    def close(self) -> None:
        if self._is_on:
            self._live.stop()
            self._is_on = False
