"""Where readings go: each writer gets one every so many steps."""

from __future__ import annotations

import json
import math
import os
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
        self._step = Gauge("moe_step", "steps that the monitor has seen", registry=self.registry)
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
            self._server, _ = start_http_server(port, address, self.registry)
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


class Figure:
    """A PNG that is drawn anew at every reading: of each layer the load of every expert over the steps, and its course."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        require("matplotlib", "3.9", "Figure")
        self.path = Path(path)
        self._maps = HeatMaps()
        self._course: dict[str, list[tuple[int, float, float]]] = {}

    def write(self, reading: Reading) -> None:
        self._maps.extend(reading)
        for layer in reading:
            values = (layer.scalars["load_max_over_mean"], layer.scalars["load_entropy"])
            self._course.setdefault(layer.name, []).append((reading.step, *values))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(f".{self.path.name}")
        self._draw(reading).savefig(beside, format="png", dpi=120)
        beside.replace(self.path)

    def _draw(self, reading: Reading) -> Any:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
        from matplotlib.ticker import MaxNLocator

        layers = reading.layers
        canvas = Canvas(figsize=(11, 0.6 + 2 * len(layers)), layout="constrained")
        FigureCanvasAgg(canvas)
        all_axes = canvas.subplots(len(layers), 2, squeeze=False, width_ratios=(3, 2), sharex="col")
        for (left, right), layer in zip(all_axes, layers, strict=True):
            heat = self._maps[layer.name]
            if heat.columns:
                extent = (0.5, len(heat.columns) * heat.stride + 0.5, len(heat.columns[0]) - 0.5, -0.5)
                style: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "cmap": _MAP}
                picture = left.imshow(heat.image.numpy(), vmin=0, vmax=_HOTTEST, extent=extent, **style)
                canvas.colorbar(picture, ax=left, label="load, 1 = mean")
            left.set_title(layer.name or "model", loc="left", fontsize="small")
            left.set_ylabel("expert")
            left.yaxis.set_major_locator(MaxNLocator(integer=True))
            steps, hottest, entropy = zip(*self._course[layer.name], strict=True)
            right.plot(steps, hottest, color="C3", label="max / mean load")
            right.plot(steps, entropy, color="C0", label="entropy of the load")
            right.set_ylim(bottom=0)
            right.spines[["top", "right"]].set_visible(False)
        all_axes[0, 1].legend(frameon=False, fontsize="small")
        for axes in all_axes[-1]:
            axes.set_xlabel("step")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return canvas

    def close(self) -> None:
        pass


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
