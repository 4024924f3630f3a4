"""How the demo shows what it found: the terminal, loss.png and load.png."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.color import Color
from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.style import Style
from rich.table import Table
from rich.text import Text as Line
from torch import Tensor

from .results import BOUND, EAGER, FIRST_STEPS, GROUPED_MM, OURS, Check, Curve, Results, versions
from .settings import Settings, Text

COLOURS = {EAGER: "#9aa0a6", GROUPED_MM: "#e8710a", OURS: "#1a73e8"}
LEVELS = "▁▂▃▄▅▆▇█"
SHADES = " ░▒▓█"
WIDEST = 100
MAP = "viridis"


class Report:
    """Shows a demo on a console while it runs and when it is done, and writes its files."""

    def __init__(self, console: Console) -> None:
        self.console = console
        if console.width > WIDEST:
            console.width = WIDEST
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(None),
            MofNCompleteColumn(),
            TextColumn("[bold]loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )

    def say(self, message: str) -> None:
        self.console.print(message, markup=False, highlight=False, soft_wrap=True)

    # ---------------------------------------------------------------- while it runs

    def start(self, settings: Settings, text: Text, parameters: int, backend: str) -> None:
        device = settings.torch_device
        found = versions(device)
        facts = {
            "model": f"Mixtral, {parameters:,} parameters, {settings.experts} experts, top {settings.top_k}, {settings.dtype}",
            "text": f"{text.source}, {len(text.data):,} bytes",
            "batches": f"{settings.batch_size} × {settings.sequence_length} bytes, seed {settings.seed}",
            "device": f"{device} ({found.pop('device')})",
            "experts": backend,
            "versions": ", ".join(f"{name} {version}" for name, version in found.items()),
        }
        table = Table.grid(padding=(0, 2))
        for name, fact in facts.items():
            table.add_row(Line(name, style="dim"), Line(fact))
        title = "The same training three times: eager, grouped_mm, blocksparse"
        self.console.print(Panel(table, title=title, title_align="left", box=box.ROUNDED))
        self._task = self._progress.add_task("training", total=settings.steps, loss="")
        self._progress.start()

    def step(self, curves: dict[str, Curve]) -> None:
        self._progress.update(self._task, advance=1, loss=f"{curves[OURS].losses[-1]:.3f}")

    def stop(self) -> None:
        self._progress.stop()

    # ---------------------------------------------------------------- when it is done

    def show(self, results: Results) -> None:
        """Losses and speed, differences and checks, load, sample."""
        if results.interrupted:
            self.say(f"Ended by Ctrl-C after {results.steps} of {results.settings.steps} steps; this is what there is.")
        for section in (_curves(results), _checks(results), self._loads(results), _sample(results)):
            self.console.print(Padding(section, (1, 0, 0, 0)))

    def write(self, results: Results) -> None:
        """metrics.json, loss.png and load.png."""
        folder = results.settings.output
        (folder / "metrics.json").write_text(results.to_json(), encoding="utf-8")
        _loss_figure(results).savefig(folder / "loss.png", dpi=150)
        _load_figure(results).savefig(folder / "load.png", dpi=150)

    def _loads(self, results: Results) -> Group:
        """Heat maps in the terminal, one a layer: experts down, steps across."""
        loads = _relative_loads(results)
        room = max(1, self.console.width - 26)
        top = loads.max().item()
        lines = [Line("Load of every expert, step by step", style="bold")]
        for layer, load in enumerate(loads):
            lines.append(Line(f"layer {layer}", style="dim"))
            for expert, cells in enumerate(F.adaptive_avg_pool1d(load, room)):
                cells = [self._cell(value / top) for value in cells.tolist()]
                lines.append(Line.assemble(f"expert {expert:<3}  ", *cells, (f"  {load[expert].mean():5.2f} × mean", "dim")))
        mean = results.slots // results.loads[..., 0].numel() // results.steps
        scale = [self._cell(share / 23) for share in range(24)]
        lines.append(Line.assemble(("no row ", "dim"), *scale, (f" {top:.1f} × the mean load of {mean} rows", "dim")))
        return Group(*lines)

    def _cell(self, share: float) -> Line:
        """`share` of the largest load as a colour, or as a shade where the terminal has no colours."""
        if self.console.color_system is None:
            return Line(SHADES[round(share * (len(SHADES) - 1))])
        red, green, blue, _ = colormaps[MAP](share, bytes=True)
        return Line("█", style=Style(color=Color.from_rgb(int(red), int(green), int(blue))))


def _curves(results: Results) -> Table:
    table = Table(title="Losses and speed", title_style="bold", title_justify="left", box=box.SIMPLE_HEAD, expand=True)
    for name in ("experts", "first", "loss", "last"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens/s", "to eager"):
        table.add_column(name, no_wrap=True, justify="right")
    tokens = results.settings.tokens
    for name, curve in results.curves.items():
        title = Line(name, style=COLOURS[name])
        if curve.obstacle:
            table.add_row(title, "", "cannot run here")
            continue
        speed = curve.tokens_per_second(tokens)
        ratio = speed / results.curves[EAGER].tokens_per_second(tokens)
        ends = f"{curve.losses[0]:.4f}", f"{curve.losses[-1]:.4f}"
        sparkline = Line(_sparkline(curve.losses), style=COLOURS[name])
        table.add_row(title, ends[0], sparkline, ends[1], f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}", f"{ratio:.2f} ×")
    return table


def _sparkline(values: list[float], width: int = 20) -> str:
    pooled = F.adaptive_avg_pool1d(torch.tensor([values]), min(width, len(values)))[0]
    low, high = pooled.min(), pooled.max()
    levels = (pooled - low) / (high - low).clamp(min=1e-12) * (len(LEVELS) - 1)
    return "".join(LEVELS[round(level)] for level in levels.nan_to_num().tolist())


def _checks(results: Results) -> Table:
    """Largest relative differences to eager, grouped_mm's beside ours, and whether ours are what is promised."""
    table = Table(
        title="Largest relative differences to eager",
        title_style="bold",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        expand=True,
    )
    table.add_column("")
    for name in ("grouped_mm", "blocksparse", "at most"):
        table.add_column(name, justify="right")
    table.add_column("holds")
    grouped = results.curves[GROUPED_MM]
    theirs: list[float] = []
    if grouped.obstacle is None:
        losses = results.differences(GROUPED_MM)
        theirs = [
            grouped.gradient_difference,
            max(losses[:FIRST_STEPS]),
            *([max(losses[FIRST_STEPS:])] if losses[FIRST_STEPS:] else []),
        ]
    for index, check in enumerate(results.checks):
        other = f"{theirs[index]:.1e}" if index < len(theirs) else ""
        if check.name == "dropped rows":
            table.add_row(f"dropped rows of {results.slots:,}", "", f"{check.value:,}", "0", _verdict(check))
        else:
            bound = "" if check.bound is None else f"{check.bound:.1e}"
            table.add_row(check.name, other, f"{check.value:.1e}", bound, _verdict(check))
    return table


def _verdict(check: Check) -> Line:
    if check.bound is None:
        return Line(check.note, style="dim")
    return Line("yes", style="green") if check.holds else Line("NO", style="bold red")


def _sample(results: Results) -> Panel:
    line = Line.assemble((results.prompt, "dim"), results.sample)
    title = "The trained model writes on [dim](dim: what it was given)[/]"
    return Panel(line, title=title, title_align="left", box=box.ROUNDED)


def _relative_loads(results: Results) -> Tensor:
    """[layers, E, steps], 1 where an expert has the mean load."""
    loads = results.loads.double()
    return loads / loads.mean(dim=1, keepdim=True)


def _loss_figure(results: Results) -> Figure:
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    styles: dict[str, dict[str, Any]] = {
        EAGER: {"linewidth": 6, "alpha": 0.5},
        GROUPED_MM: {"linewidth": 3},
        OURS: {"linewidth": 1.2},
    }
    for name, curve in results.curves.items():
        if curve.obstacle:
            continue
        steps = range(1, results.steps + 1)
        top.plot(steps, curve.losses, color=COLOURS[name], label=name, **styles[name])
        if name != EAGER:
            differences = [difference or math.nan for difference in results.differences(name)]
            bottom.plot(steps, differences, ".-", color=COLOURS[name], markersize=3, linewidth=1)
    top.set_ylabel("loss, nats per byte")
    top.legend(frameon=False)
    bottom.axhline(BOUND, color="black", linewidth=0.8, linestyle=":")
    bottom.annotate(
        f"{BOUND:g}", (1, BOUND), xycoords=("axes fraction", "data"), xytext=(-4, 3), textcoords="offset points", ha="right"
    )
    bottom.set_yscale("log")
    bottom.set_ylabel("difference to eager, relative\n(no point where equal)")
    bottom.set_xlabel("step")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"One training, three implementations of the experts ({results.settings.dtype})")
    return figure


def _load_figure(results: Results) -> Figure:
    loads = _relative_loads(results)
    layers, experts, steps = loads.shape
    figure = Figure(figsize=(8, 0.8 + layers * max(1.8, 0.22 * experts)), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(layers, 1, sharex=True, squeeze=False)[:, 0]
    for layer, (axes, load) in enumerate(zip(all_axes, loads, strict=True)):
        extent = (0.5, steps + 0.5, experts - 0.5, -0.5)
        image = axes.imshow(
            load.numpy(), aspect="auto", interpolation="nearest", cmap=MAP, vmin=0, vmax=loads.max().item(), extent=extent
        )
        axes.set_ylabel(f"layer {layer}: expert")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    all_axes[-1].set_xlabel("step")
    all_axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=list(all_axes), label="load, 1 = mean")
    figure.suptitle(f"Load of every expert; {results.dropped:,} of {results.slots:,} rows dropped")
    return figure
