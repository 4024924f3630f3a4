"""What a run says: one `Result` a variant, as a table for people and as a line of CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.table import Table

EQUAL = 0.04
"""Times closer than this are called equal."""


@dataclass(frozen=True)
class Result:
    """One line. Figures are None where the check failed, and where they do not apply.

    Attributes:
        shape, T, H, F, E, K, routing, op, stage, variant, kind: what ran.
        check: "ok", "FAILED: " and why, or "roof", which has nothing to check.
        ms: median of one call; spread: half the distance of its quartiles, relative.
        tflops: useful work over time; gb_per_s: bytes of operands and results over time. Roofs have one of the two.
        share_of_roof: time of the roof in the same run over this one's. Of several roofs the slowest is meant, which binds;
            None for the others.
        over_fastest_peer: time of the fastest peer in the same run over this one's; more than 1 is faster than all peers. Roofs
            have none.
        peak_extra_gb: memory beyond the inputs, results included (1 GB is 1e9 bytes).
        launches: kernels of one call.
        dtype, device, versions, date: where and when.
        mode: "eager", or "CUDA graph" for replays of one. Files from before there were two do not have it.
        error: relative error of the whole of the worst result, of variants whose error is a figure of its own.
    """

    shape: str
    T: int
    H: int
    F: int
    E: int
    K: int
    routing: str
    op: str
    stage: str
    variant: str
    kind: str
    check: str
    ms: float | None
    spread: float | None
    tflops: float | None
    gb_per_s: float | None
    share_of_roof: float | None
    over_fastest_peer: float | None
    peak_extra_gb: float | None
    launches: int | None
    dtype: str
    device: str
    versions: str
    date: str
    mode: str = "eager"
    error: float | None = None

    @property
    def failed(self) -> bool:
        return self.check.startswith("FAILED")


class CsvFile:
    """Results as CSV, written as they come, so that an interrupted run leaves what it had."""

    def __init__(self, path: Path) -> None:
        """FileExistsError if the file is there: an earlier run is what a later one is compared with."""
        self._path = path
        self._file: TextIO = path.open("x", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, [field.name for field in fields(Result)])
        self._writer.writeheader()
        self._is_empty = True

    def write(self, results: Iterable[Result]) -> None:
        self._writer.writerows(asdict(result) for result in results)
        self._file.flush()
        self._is_empty = False

    def __enter__(self) -> CsvFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._is_empty:
            self._path.unlink()


def read_csv(path: Path) -> list[Result]:
    """The results of a file that `CsvFile` wrote; ValueError for any other."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            lines, columns = list(reader), reader.fieldnames or ()
        if lacking := [field.name for field in fields(Result) if field.default is MISSING and field.name not in columns]:
            raise ValueError(f"it has no column {', '.join(lacking[:3])}{' and others' if len(lacking) > 3 else ''}")
        return [
            Result(**{field.name: _parse(line[field.name], str(field.type)) for field in fields(Result) if field.name in line})
            for line in lines
        ]
    except (TypeError, ValueError, csv.Error) as error:
        raise ValueError(f"{path} is no table of results by this version of the benchmarks: {error}.") from error


def _parse(text: str, kind: str) -> str | int | float | None:
    """The value of a field that is annotated as `kind`."""
    if kind.endswith("| None") and text == "":
        return None
    return {"str": str, "int": int, "float": float}[kind.removesuffix(" | None")](text)


def print_table(console: Console, results: Sequence[Result]) -> None:
    """The results of one op on one shape and routing; columns without a figure are left out."""
    first = results[0]
    sizes = f"T={first.T} H={first.H} F={first.F} E={first.E} K={first.K}"
    shape = sizes if "," in first.shape else f"{first.shape} ({sizes})"
    title = [first.op, shape, first.routing, first.dtype, *([first.mode] if first.mode != "eager" else [])]
    table = Table(title=" · ".join(title), title_justify="left")
    figures = [column for column in _COLUMNS if any(column.value(result) is not None for result in results)]
    table.add_column("stage", no_wrap=True)
    table.add_column("variant", no_wrap=True)
    for column in figures:
        table.add_column(column.header, justify="right", no_wrap=True)
    for stage, lines in groupby(results, key=lambda result: result.stage):
        for index, result in enumerate(lines):
            name = f"[bold]{result.variant}[/]" if result.kind == "ours" else result.variant
            cells = ["[red]FAILED[/]", *[""] * (len(figures) - 1)] if result.failed else [c.cell(result) for c in figures]
            table.add_row(stage if index == 0 else "", name, *cells)
        table.add_section()
    console.print(table)
    for line in _over_each_peer(results):
        console.print(line, highlight=False)
    for result in results:
        if result.failed:
            console.print(f"[red]{result.stage}, {result.variant}: {escape(result.check)}[/]", soft_wrap=True)


def _over_each_peer(results: Sequence[Result]) -> Iterator[str]:
    """For each stage, how many times as fast as each of the peers the fastest variant of ours is."""
    for stage, lines in groupby(results, key=lambda result: result.stage):
        timed = sorted((result for result in lines if result.ms is not None), key=lambda result: result.ms or 0)
        ours, peers = ([result for result in timed if result.kind == kind] for kind in ("ours", "peer"))
        if ours and peers:
            ratios = ", ".join(f"{peer.ms / ours[0].ms:.2f} × {peer.variant}" for peer in peers)  # type: ignore[operator]
            yield f"{stage}: {ours[0].variant} is {ratios}"


@dataclass(frozen=True)
class _Column:
    header: str
    attribute: str
    scale: float = 1.0
    suffix: str = ""

    def value(self, result: Result) -> float | None:
        return getattr(result, self.attribute)

    def cell(self, result: Result) -> str:
        value = self.value(result)
        return "" if value is None else figure(value * self.scale) + self.suffix


@dataclass(frozen=True)
class _Ratio(_Column):
    def cell(self, result: Result) -> str:
        value = self.value(result)
        if value is None:
            return ""
        return f"{value:.2f}{' ≈' if abs(value - 1) < EQUAL else '  '}"


_COLUMNS = (
    _Column("ms", "ms"),
    _Column("±", "spread", 100, " %"),
    _Column("TFLOP/s", "tflops"),
    _Column("GB/s", "gb_per_s"),
    _Column("roof", "share_of_roof", 100, " %"),
    _Ratio("× peer", "over_fastest_peer"),
    _Column("peak GB", "peak_extra_gb"),
    _Column("launches", "launches"),
    _Column("error", "error", 100, " %"),
)


def figure(value: float) -> str:
    """Three digits, never an exponent."""
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.{2 if abs(value) < 10 else 1}f}" if abs(value) >= 0.1 or value == 0 else f"{value:.3g}"
