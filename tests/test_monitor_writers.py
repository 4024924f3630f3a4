"""What writers make of readings, read back by others; alarms; and the pictures looked at as numbers."""

from __future__ import annotations

import json
import logging
import math
import urllib.request

import pytest
import torch
from rich.console import Console

from blocksparse_moe import MoEMonitor
from blocksparse_moe.monitor import (
    PER_EXPERT,
    SCALARS,
    Alarm,
    Alert,
    Figure,
    JsonLines,
    LayerReading,
    Prometheus,
    Reading,
    TensorBoard,
    Terminal,
)
from blocksparse_moe.monitor.heat_map import HeatMap

from .test_monitor import make_layer, tokens


def made_reading(step: int = 50, layers: tuple[str, ...] = ("0.mlp", "1.mlp"), **scalars: float) -> Reading:
    """Numbers that differ from each other, one of them NaN."""
    made = []
    for index, name in enumerate(layers):
        values = {metric: step + index + 0.25 * place for place, metric in enumerate(SCALARS)} | {"changed": math.nan}
        experts = {
            metric: torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64) + place for place, metric in enumerate(PER_EXPERT)
        }
        experts["gradient_norm"] = torch.full((3,), math.nan, dtype=torch.float64)
        history = torch.tensor([[6, 3, 0]]).double().expand(4, -1)
        made.append(LayerReading(name, 3, values | scalars, experts, history))
    return Reading(step, tuple(made))


def written(writer, *readings: Reading):
    for reading in readings:
        writer.write(reading)
    writer.close()
    return writer


def test_json_lines(tmp_path):
    path = tmp_path / "runs" / "moe.jsonl"
    written(JsonLines(path), made_reading(50), made_reading(100))
    written(JsonLines(path), made_reading(150))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [50, 100, 150]
    layer = lines[1]["layers"]["1.mlp"]
    assert set(layer) == set(SCALARS) | set(PER_EXPERT)
    assert layer["changed"] is None and layer["gradient_norm"] == [None] * 3 and layer["load"] == [0.5, 0.3, 0.2]
    assert layer["load_max"] == made_reading(100)["1.mlp"].scalars["load_max"]


def test_tensorboard_reads_its_event_file(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written(TensorBoard(tmp_path), made_reading(50), made_reading(54))
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0, "scalars": 0}).Reload()
    scalars = events.Scalars("moe/1.mlp/router_entropy")
    assert [(event.step, event.value) for event in scalars] == [
        (step, made_reading(step)["1.mlp"].scalars["router_entropy"]) for step in (50, 54)
    ]
    tags = events.Tags()
    assert "moe/0.mlp/changed" not in tags["scalars"] and "moe/0.mlp/gradient_norm_max" not in tags["scalars"]
    assert events.Scalars("moe/0.mlp/weight_norm_max")[0].value == pytest.approx(0.5 + list(PER_EXPERT).index("weight_norm"))
    image = events.Images("moe/0.mlp/load")[-1]
    assert image.step == 54 and image.encoded_image_string.startswith(b"\x89PNG")
    assert image.height >= 3 and image.width >= 8


def test_tensorboard_takes_an_open_writer(tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as summary:
        written(TensorBoard(summary), made_reading())
        summary.add_scalar("still open", 1.0, 0)


def test_prometheus_reads_its_page():
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    writer = Prometheus(0)
    writer.write(made_reading(100))
    page = urllib.request.urlopen(f"http://127.0.0.1:{writer.port}/metrics", timeout=10).read().decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert families["moe_step"].samples[0].value == 100
    found = {sample.labels["layer"]: sample.value for sample in families["moe_confidence"].samples}
    assert found == {name: made_reading(100)[name].scalars["confidence"] for name in ("0.mlp", "1.mlp")}
    assert families["moe_confidence"].documentation == SCALARS["confidence"]
    load = {(s.labels["layer"], s.labels["expert"]): s.value for s in families["moe_expert_load"].samples}
    assert load["0.mlp", "2"] == pytest.approx(0.2) and len(load) == 6
    assert math.isnan(families["moe_changed"].samples[0].value)
    writer.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{writer.port}/metrics", timeout=2)


def test_two_prometheus_writers_do_not_collide():
    pytest.importorskip("prometheus_client")
    for _ in range(2):
        written(Prometheus(), made_reading())


def test_figure(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    path = tmp_path / "new" / "moe.png"
    written(Figure(path), made_reading(4), made_reading(8))
    image = pyplot.imread(path)
    assert image.shape[0] > 200 and image.shape[1] > 500 and image.std() > 0.05
    assert [found.name for found in path.parent.iterdir()] == ["moe.png"]


def test_terminal():
    console = Console(width=140, record=True, force_terminal=True)
    written(Terminal(console), made_reading(50, load_max_over_mean=3.25), made_reading(100))
    text = console.export_text()
    assert "step 100" in text and "1.mlp" in text and "3.25" in text


@pytest.mark.parametrize("width", [40, 80, 100, 140])
def test_prints_itself(width):
    """Names and numbers are whole; what does not fit is left out."""
    console = Console(width=width, record=True)
    console.print(made_reading(50, load_max_over_mean=3.25, confidence=0.75))
    text = console.export_text()
    assert "step 50" in text and "1.mlp" in text and "▃" in text and "3.25" in text and "…" not in text
    assert ("0.75" in text) == (width > 60)


def test_a_writer_that_is_not_installed_says_so(monkeypatch):
    from blocksparse_moe_kernels import versions

    def missing(name: str) -> str:
        raise versions.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions.metadata, "version", missing)
    for make in (lambda: TensorBoard("x"), Prometheus, lambda: Figure("x")):
        with pytest.raises(ImportError, match="pip install"):
            make()


# -------------------------------------------------------------------- heat maps


def test_heat_map_takes_every_step_once_and_stays_small():
    heat = HeatMap(limit=8)
    for end in (3, 5, 12):
        rows = torch.arange(1, end + 1).double()[:, None] * torch.tensor([1.0, 1.0]) + torch.tensor([1.0, -1.0])
        heat.extend(end, LayerReading("", 2, {}, {}, rows[-10:]))
    step = torch.arange(1, 13).double()
    assert heat.stride == 2 and len(heat.columns) == 6
    assert torch.allclose(heat.image[0], ((step + 1) / step).view(-1, 2).mean(dim=1))


def test_heat_map_that_begins_late_misses_steps_and_begins_again():
    heat, rows = HeatMap(), torch.ones(4, 2)
    heat.extend(104, LayerReading("", 2, {}, {}, rows))
    assert (heat.before, heat.end, len(heat.columns)) == (100, 104, 4)
    heat.extend(110, LayerReading("", 2, {}, {}, rows))
    assert heat.end == 110 and heat.image[0].isnan().tolist() == [False] * 4 + [True] * 2 + [False] * 4
    heat.extend(3, LayerReading("", 2, {}, {}, rows[:3]))
    assert (heat.before, heat.end) == (0, 3)


def test_heat_map_of_no_tokens():
    heat = HeatMap()
    heat.extend(1, LayerReading("", 2, {}, {}, torch.zeros(1, 2)))
    assert heat.image.isnan().all()


# -------------------------------------------------------------------- alarms


def alerts_of(alarm: Alarm, *readings: Reading) -> list[Alert]:
    found: list[Alert] = []
    alarm.callback = found.append
    for reading in readings:
        alarm.check(reading)
    return found


def test_alarm_of_a_layer():
    (alert,) = alerts_of(Alarm("drop_rate", above=0.1), made_reading(layers=("a",), drop_rate=0.25))
    assert alert == Alert(50, "a", "drop_rate", 0.25, 0.1)
    assert str(alert) == "step 50, layer 'a': drop_rate is 0.25, above 0.1"
    for quiet in (0.1, 0.0, math.nan):
        assert not alerts_of(Alarm("drop_rate", above=0.1), made_reading(drop_rate=quiet))


def test_alarm_of_experts():
    (alert,) = alerts_of(Alarm("load", below=0.35), made_reading(layers=("a",)))
    assert (alert.experts, alert.value) == ((1, 2), pytest.approx(0.2))
    assert "load of experts 1, 2 is 0.2, below 0.35" in str(alert)
    assert not alerts_of(Alarm("gradient_norm", above=0), made_reading())


def test_alarm_with_patience():
    bad, good = made_reading(layers=("a",), drop_rate=0.5), made_reading(layers=("a",), drop_rate=0)
    assert len(alerts_of(Alarm("drop_rate", above=0.1, patience=2), bad, good, bad, bad, bad)) == 2


def test_alarm_logs(caplog):
    with caplog.at_level(logging.WARNING, logger="blocksparse_moe.monitor"):
        Alarm("drop_rate", above=0.1).check(made_reading(layers=("a",), drop_rate=0.25))
    assert "drop_rate is 0.25" in caplog.text


def test_an_alarm_counts_for_each_monitor():
    alerts: list[Alert] = []
    alarm = Alarm("tokens", above=0, patience=2, callback=alerts.append)
    for _ in range(2):
        layer = make_layer()
        monitor = MoEMonitor(layer, alarms=[alarm], write_every=1)
        layer(tokens(4))
        monitor.step()
    assert not alerts


def test_prometheus_port_in_use_and_its_own_registry():
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    first = Prometheus(0, registry=registry)
    with pytest.raises(OSError, match=f"cannot serve 127.0.0.1:{first.port}.*Port 0 takes a free one"):
        Prometheus(first.port)
    first.close()
    Prometheus(0, registry=registry).close()


def test_alarm_refuses():
    for given in (dict(above="8"), dict(below=math.nan), dict(above=1, callback=3)):
        with pytest.raises(TypeError, match="Alarm: "):
            Alarm("load", **given)
    with pytest.raises(ValueError, match=r"metric must be one of .*'load_min'"):
        Alarm("loud", above=1)
    with pytest.raises(ValueError, match="has no bound"):
        Alarm("load")


def test_monitor_writes_and_checks_every_so_many_steps(tmp_path):
    layer, alerts = make_layer(), []
    alarm = Alarm("tokens", above=0, callback=alerts.append)
    with MoEMonitor(layer, writers=[JsonLines(tmp_path / "moe.jsonl")], alarms=[alarm], write_every=2) as monitor:
        for step in range(5):
            layer(tokens(4, step))
            monitor.step()
    lines = [json.loads(line) for line in (tmp_path / "moe.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [alert.step for alert in alerts] == [2, 4]
    assert [line["layers"][""]["tokens"] for line in lines] == [8, 16]
