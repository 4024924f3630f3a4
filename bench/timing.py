"""Timing, fairly: every variant gets sustained windows of its own, in rotated order, and medians are compared.

A power-capped card slows down under load and is fast after a rest: calls of one window run back to back, windows follow each
other without a pause, and the first one is thrown away.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TypeVar

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_SAMPLE_SECONDS = 1e-3
"""Calls shorter than this are timed several at once, so that reading the clock costs nothing."""

Work = Callable[[], object]
Results = TypeVar("Results")


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: the median, and half the distance of the quartiles over it, which one sample does not have."""

    ms: float
    spread: float | None


def measure(works: dict[str, Work], device: torch.device, *, seconds: float, windows: int) -> dict[str, Timing]:
    """Time `works` against each other: `windows` windows of about `seconds` for each."""
    clock = _cuda_window if device.type == "cuda" else _host_window
    plans = {name: _plan(work, device, seconds) for name, work in works.items()}
    samples: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for name in names[:1]:
        clock(works[name], *plans[name])
    for window in range(windows):
        turn = window % max(1, len(names))
        for name in names[turn:] + names[:turn]:
            samples[name] += clock(works[name], *plans[name])
    return {name: _summary(times) for name, times in samples.items()}


def captured(work: Callable[[], Results], device: torch.device) -> Callable[[], Results]:
    """`work` as a CUDA graph: the first call captures it, every call replays it and returns the same tensors.

    RuntimeError at the first call if it cannot be captured because it waits for the GPU. That is found out beforehand: a
    capture that breaks off may leave the allocator in it.
    """

    @cache
    def capture() -> tuple[torch.cuda.CUDAGraph, Results]:
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):  # what is compiled, tuned or allocated once is so before the capture
            work()
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                work()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.graph(graph):
            results = work()
        return graph, results

    def replay() -> Results:
        graph, results = capture()
        graph.replay()
        return results

    return replay


def peak_extra_bytes(work: Work, device: torch.device) -> int | None:
    """What `work` allocates beyond its inputs at its peak, results included; None on a CPU."""
    if device.type != "cuda":
        return None
    work()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def count_launches(work: Work, device: torch.device) -> int | None:
    """Kernels that one call launches, copies and fills by the driver aside; None on a CPU."""
    if device.type != "cuda":
        return None
    work()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        work()
        torch.cuda.synchronize(device)
    on_device = [event.name for event in trace.events() if event.device_type == DeviceType.CUDA]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in on_device)


def _plan(work: Work, device: torch.device, seconds: float) -> tuple[int, int]:
    """(samples in a window, calls in a sample), from a warm call."""
    for _ in range(2):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        estimate = time.perf_counter() - start
    calls = math.ceil(_SAMPLE_SECONDS / estimate)
    return max(1, round(seconds / (estimate * calls))), calls


def _host_window(work: Work, samples: int, calls: int) -> list[float]:
    times = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        times.append(1e3 * (time.perf_counter() - start) / calls)
    return times


def _cuda_window(work: Work, samples: int, calls: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(samples + 1)]
    events[0].record()
    for event in events[1:]:
        for _ in range(calls):
            work()
        event.record()
    events[-1].synchronize()
    return [start.elapsed_time(end) / calls for start, end in pairwise(events)]


def _summary(times: list[float]) -> Timing:
    median = statistics.median(times)
    if len(times) < 2:
        return Timing(median, None)
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return Timing(median, (high - low) / 2 / median)
