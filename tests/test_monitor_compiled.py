"""What a monitor counts of compiled layers."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from blocksparse_moe import MoEMonitor

from .test_monitor import assert_reads, joined, make_layer, tokens


@pytest.mark.slow
def test_a_monitor_does_not_make_compiled_code_be_compiled_again():
    layer = make_layer()
    MoEMonitor(layer, interval=2)
    monitor = MoEMonitor(layer, interval=2)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(tokens(16)).sum().backward()
    monitor.step()
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in range(4):
            compiled(tokens(16, step)).sum().backward()
            monitor.step()
    assert math.isfinite(monitor.read()[""].scalars["changed"])


@pytest.mark.slow
@pytest.mark.case("N8")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recompute_of_compiled_code_is_not_counted(use_reentrant):
    layer = make_layer()
    monitor, compiled = MoEMonitor(layer), torch.compile(layer, backend="aot_eager")
    for step in range(3):
        checkpoint(compiled, tokens(5, step).requires_grad_(), use_reentrant=use_reentrant).sum().backward()
        assert monitor.read()[""].scalars["tokens"] == 5 * (step + 1)
    assert monitor.layers[0].counters.now[: layer.config.num_experts].sum() == 30


@pytest.mark.slow
def test_compiled():
    layer = make_layer()
    monitor = MoEMonitor(layer, interval=2)
    compiled = torch.compile(layer, fullgraph=True)
    routings = []
    for step in range(4):
        y, routing = compiled(tokens(16, step), return_routing=True)
        y.sum().backward()
        routings.append(routing)
        monitor.step()
    reading = monitor.read()[""]
    assert_reads(reading, joined(routings))
    assert math.isfinite(reading.scalars["changed"]) and reading.experts["output_norm"].isfinite().any()
