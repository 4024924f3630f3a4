"""A run: inputs, check, time, report; one op on one shape and routing after the other."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from .check import disagreement, largest_error
from .inputs import Case, make_case
from .lineup import Choice
from .ops import OPS
from .report import CsvFile, Result, print_table
from .shapes import Shape
from .timing import Timing, captured, count_launches, measure, peak_extra_bytes
from .variants import Task, Variant, first_line


@dataclass(frozen=True)
class Plan:
    """What to measure, and how long.

    Attributes:
        lineups: op, shape and skew (0: balanced) of each table.
        seconds: length of a variant's window; windows: how many each gets.
        graph: time CUDA graphs of the calls.
        title: what stands above the tables.
    """

    lineups: Sequence[tuple[str, Shape, float]]
    dtype: torch.dtype
    device: torch.device
    choice: Choice
    seconds: float
    windows: int
    graph: bool = False
    title: str = ""


def run(plan: Plan, console: Console, file: CsvFile | None = None) -> list[Result]:
    """Measure, print and write; the results of every variant, failed ones included.

    Raises:
        ValueError: an op cannot be had of a shape or routing, or not in the memory that there is.
    """
    if plan.title:
        console.print(plan.title)
    results: list[Result] = []
    for op, shape, skew in plan.lineups:
        try:
            results += _line_up(op, shape, skew, plan, console, file)
        except RuntimeError as error:
            if not _is_about_memory(error):
                raise
            raise ValueError(f"{op}, {shape.name}: {first_line(error)}. Give fewer tokens or smaller sizes.") from error
        _free(plan.device)
    return results


def _line_up(op: str, shape: Shape, skew: float, plan: Plan, console: Console, file: CsvFile | None) -> list[Result]:
    with console.status(f"{op}, {shape.name}: inputs"):
        case = make_case(shape, skew, dtype=plan.dtype, device=plan.device)
        tasks = OPS[op](case, plan.choice)
    table: list[Result] = []
    for task in tasks:
        with console.status(f"{op}, {shape.name}, {case.routing}, {task.stage}"):
            lines = run_task(task, case, seconds=plan.seconds, windows=plan.windows, graph=plan.graph)
        table += lines
        if file is not None:
            file.write(lines)
    print_table(console, table)
    for name, reason in tasks[0].left_out.items():
        console.print(f"left out: {name} ({reason})", style="dim", highlight=False)
    return table


def _is_about_memory(error: RuntimeError) -> bool:
    """Of a GPU, or of a CPU, where torch has no error of its own for it."""
    return isinstance(error, torch.OutOfMemoryError) or "alloc" in str(error) or "Storage size" in str(error)


def run_task(task: Task, case: Case, *, seconds: float, windows: int, graph: bool = False) -> list[Result]:
    """Check every variant, then time those that passed; with `graph` it is replays of CUDA graphs that are checked and timed.

    Memory is that of calls without a graph, as a replay allocates nothing.
    """
    eager = {variant.name: variant.run for variant in task.variants}
    if graph:
        variants = tuple(replace(variant, run=captured(variant.run, case.device)) for variant in task.variants)
        task = replace(task, variants=variants)
    checks = _check(task, case.dtype)
    _free(case.device)
    timed = [variant for variant in task.variants if checks[variant.name].fault is None]
    peaks = {variant.name: peak_extra_bytes(eager[variant.name], case.device) for variant in timed}
    launches = {variant.name: count_launches(variant.run, case.device) for variant in timed}
    timings = measure({variant.name: variant.run for variant in timed}, case.device, seconds=seconds, windows=windows)
    roof = max((timings[variant.name].ms for variant in timed if variant.kind == "roof"), default=None)
    peer = min((timings[variant.name].ms for variant in timed if variant.kind == "peer"), default=None)
    return [
        _result(
            task, case, variant, checks[variant.name], timings.get(variant.name), peaks.get(variant.name),
            launches.get(variant.name), roof, peer, graph,
        )
        for variant in task.variants
    ]  # fmt: skip


class _Check(NamedTuple):
    """What is wrong with a variant, None for one whose results are right and for roofs; and the error, if it is a figure."""

    fault: str | None
    error: float | None = None


def _check(task: Task, dtype: torch.dtype) -> dict[str, _Check]:
    expected = task.expected()
    return {
        variant.name: _Check(None) if variant.kind == "roof" else _check_variant(variant, expected, dtype)
        for variant in task.variants
    }


def _check_variant(variant: Variant, expected: tuple[Tensor, ...], dtype: torch.dtype) -> _Check:
    try:
        results = variant.comparable(variant.run())
    except Exception as error:  # out of memory, or anything that a peer cannot do: the others go on
        if variant.kind == "ours" and not isinstance(error, RuntimeError):
            raise
        return _Check(first_line(error))
    if variant.expected is not None:
        expected = variant.expected()[: len(results)]
    fault = disagreement(results, expected, dtype, variant.tolerance)
    measured = fault is None and variant.tolerance is not None
    return _Check(fault, largest_error(results, expected) if measured else None)


def _result(
    task: Task,
    case: Case,
    variant: Variant,
    checked: _Check,
    timing: Timing | None,
    peak: int | None,
    launches: int | None,
    roof_ms: float | None,
    peer_ms: float | None,
    graph: bool,
) -> Result:
    shape = case.shape
    check = "roof" if variant.kind == "roof" else "ok" if checked.fault is None else f"FAILED: {checked.fault}"
    ms = None if timing is None else timing.ms
    binds = variant.kind != "roof" or ms == roof_ms

    def per_ms(amount: float | None) -> float | None:
        return None if not amount or ms is None else amount / ms

    return Result(
        shape=shape.name,
        T=shape.T,
        H=shape.H,
        F=shape.F,
        E=shape.E,
        K=shape.K,
        routing=task.routing or case.routing,
        op=task.op,
        stage=task.stage,
        variant=variant.name,
        kind=variant.kind,
        check=check,
        ms=ms,
        spread=None if timing is None else timing.spread,
        tflops=None if variant.moved else per_ms(task.flops / 1e9),
        gb_per_s=per_ms((variant.moved if variant.kind == "roof" else task.bytes) / 1e6),
        share_of_roof=per_ms(roof_ms) if binds else None,
        over_fastest_peer=None if variant.kind == "roof" else per_ms(peer_ms),
        peak_extra_gb=None if peak is None else peak / 1e9,
        launches=launches,
        dtype=str(case.dtype).removeprefix("torch."),
        device=device_name(case.device),
        versions=versions(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        mode="CUDA graph" if graph else "eager",
        error=checked.error,
    )


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


@cache
def versions() -> str:
    installed = {distribution.name for distribution in metadata.distributions()}
    named = [
        f"{name} {metadata.version(name)}" for name in ("triton", "transformers", "transformer-engine") if name in installed
    ]
    return ", ".join([f"torch {torch.__version__}", *named])


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
