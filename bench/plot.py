"""Pictures of a CSV file of results: share of the roof, the roofline, time over T, time over skew."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from pathlib import Path

from blocksparse_moe_kernels.versions import require

from .report import Result

require("matplotlib", "3.9", "python -m bench plot")

from matplotlib import colormaps  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import ScalarFormatter  # noqa: E402


def plot(results: Sequence[Result], directory: Path) -> list[Path]:
    """Draw what the results have figures for, one file a picture, into `directory`; the paths of the files."""
    timed = [result for result in results if result.ms is not None]
    directory.mkdir(parents=True, exist_ok=True)
    paths = []

    def draw(kind: str, about: tuple, draw_into: Callable[[Axes, list[Result], dict], None], chosen: list[Result]) -> None:
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        draw_into(axes, chosen, _colours(timed))
        axes.set_title(" · ".join(map(str, about)), loc="left")
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
        path = directory / (re.sub(r"[^\w.-]+", "_", "-".join((kind, *map(str, about)))) + ".png")
        figure.savefig(path, dpi=150)
        paths.append(path)

    for about, chosen in _groups(timed, lambda r: (r.op, r.stage, r.routing, r.dtype, r.mode)):
        if shares := [result for result in chosen if result.kind != "roof" and result.share_of_roof is not None]:
            draw("roof", about, _bars, shares)
    for about, chosen in _groups(timed, lambda r: (r.device, r.dtype, r.mode)):
        if any(result.tflops and result.gb_per_s for result in chosen):
            draw("roofline", about, _roofline, chosen)
    for about, chosen in _groups(timed, lambda r: (r.op, r.stage, r.routing, r.dtype, r.mode, _layer(r))):
        if len({result.T for result in chosen}) > 1:
            draw("tokens", about, _over_tokens, chosen)
    by_a_law = [result for result in timed if _skew(result) is not None]
    for about, chosen in _groups(by_a_law, lambda r: (r.op, r.stage, r.shape, r.dtype, r.mode)):
        if len({result.routing for result in chosen}) > 1:
            draw("skew", about, _over_skew, chosen)
    return paths


def _groups(results: Iterable[Result], key: Callable[[Result], tuple]) -> Iterable[tuple[tuple, list[Result]]]:
    groups: dict[tuple, list[Result]] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result)
    return groups.items()


def _layer(result: Result) -> str:
    """The shape without its tokens."""
    return f"H={result.H} F={result.F} E={result.E} K={result.K}"


def _skew(result: Result) -> float | None:
    """Exponent of the routing, 0 of a balanced one; None where no law spread the tokens."""
    if result.routing.startswith("zipf "):
        return float(result.routing.removeprefix("zipf "))
    return 0.0 if result.routing == "balanced" else None


def _colours(results: Iterable[Result]) -> dict[str, tuple]:
    """A colour for each variant, the same in all pictures; roofs are grey."""
    names = dict.fromkeys(result.variant for result in results if result.kind != "roof")
    return {name: colormaps["tab20"](index % 20) for index, name in enumerate(names)}


def _bars(axes: Axes, results: list[Result], colours: dict[str, tuple]) -> None:
    shapes = list(dict.fromkeys(result.shape for result in results))
    variants = list(dict.fromkeys(result.variant for result in results))
    width = 0.8 / max(1, len(variants))
    for index, variant in enumerate(variants):
        shares = {result.shape: 100 * result.share_of_roof for result in results if result.variant == variant}
        places = [shapes.index(shape) - 0.4 + width * (index + 0.5) for shape in shares]
        axes.bar(places, list(shares.values()), width, label=variant, color=colours[variant])
    axes.axhline(100, color="gray", linestyle="--", linewidth=1)
    axes.set_xticks(range(len(shapes)), shapes, rotation=15 if len(shapes) > 3 else 0)
    axes.set_ylabel("share of the roof, %")


def _roofline(axes: Axes, results: list[Result], colours: dict[str, tuple]) -> None:
    """Work over bytes against speed (Williams, Waterman and Patterson, 2009); the roofs are the fastest that were measured."""
    points = [result for result in results if result.tflops and result.gb_per_s and result.kind != "roof"]
    for (variant,), chosen in _groups(points, lambda result: (result.variant,)):
        intensity = [1e3 * result.tflops / result.gb_per_s for result in chosen]
        speed = [result.tflops for result in chosen]
        axes.plot(intensity, speed, "o", markersize=4, label=variant, color=colours[variant])
    roofs = [result for result in results if result.kind == "roof"]
    dense, copied = (max((getattr(r, name) or 0 for r in roofs), default=0) for name in ("tflops", "gb_per_s"))
    if dense:
        axes.axhline(dense, color="gray", linestyle="--", linewidth=1, label="dense products")
    if copied:
        axes.axline((1, copied / 1e3), (2, 2 * copied / 1e3), color="gray", linestyle=":", linewidth=1, label="copy")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOP per byte of operands and results")
    axes.set_ylabel("TFLOP/s")
    axes.grid(alpha=0.3)


def _over_tokens(axes: Axes, results: list[Result], colours: dict[str, tuple]) -> None:
    _lines(axes, results, colours, lambda result: result.T)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sorted({result.T for result in results}))
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("tokens")


def _over_skew(axes: Axes, results: list[Result], colours: dict[str, tuple]) -> None:
    _lines(axes, results, colours, _skew)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("Zipf exponent of the routing; 0 is balanced")


def _lines(axes: Axes, results: list[Result], colours: dict[str, tuple], x: Callable[[Result], float]) -> None:
    dashes = cycle(("--", ":", "-."))
    for (variant,), line in _groups(results, lambda result: (result.variant,)):
        points = sorted((x(result), result.ms) for result in line)
        style = {"color": colours[variant]} if variant in colours else {"color": "gray", "linestyle": next(dashes)}
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=variant, **style)
    axes.set_ylabel("ms")
    axes.grid(alpha=0.3)
