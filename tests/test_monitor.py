"""What a monitor counts, against the same computed from what the routers return."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blocksparse_moe import MoEConfig, MoEMonitor, RouterConfig, RouterOutput, dMoE
from blocksparse_moe.monitor import PER_EXPERT, SCALARS, Alarm, JsonLines, LayerReading
from blocksparse_moe.router import load_balancing_loss, z_loss

from .support import DEVICE, HAS_CUDA

H, F = 8, 12


def make_layer(num_experts: int = 6, router: RouterConfig | None = None, **changes) -> dMoE:
    torch.manual_seed(0)
    config = MoEConfig(H, F, num_experts, router=router or RouterConfig(2), init_std=0.5, **changes)
    return dMoE(config, device=DEVICE)


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, H, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def joined(routings: list[RouterOutput]) -> RouterOutput:
    """Of all their tokens."""
    logits, weights, ids = (torch.cat([getattr(r, name) for r in routings]) for name in ("logits", "weights", "expert_ids"))
    return RouterOutput(logits, weights, ids, routings[0].score)


def expected(routing: RouterOutput, num_experts: int) -> dict[str, float]:
    """The metrics by their definitions, one at a time."""
    ids, E = routing.expert_ids.cpu(), num_experts
    C = routing.logits.shape[1]
    counts = torch.tensor([(ids == expert).sum().item() for expert in range(C)], dtype=torch.float64)
    own = counts[:E] / counts[:E].sum()
    p = routing.probabilities.double().cpu()
    return {
        "tokens": len(ids),
        "load_min": (counts[:E] / counts.sum()).min().item(),
        "load_max": (counts[:E] / counts.sum()).max().item(),
        "load_max_over_mean": (own.max() * E).item(),
        "load_entropy": -sum(x * math.log(x) for x in own.tolist() if x > 0) / math.log(E) if E > 1 else 1,
        "cold_experts": (own < 0.3 / E).sum().item(),
        "drop_rate": (ids < 0).double().mean().item(),
        "logit_norm": routing.logits.norm(dim=1).mean().item(),
        "logit_max": routing.logits.abs().max().item(),
        "router_entropy": -(p * p.clamp(min=1e-300).log()).sum(dim=1).mean().item(),
        "confidence": p.max(dim=1).values.mean().item(),
        "load_balancing_loss": load_balancing_loss(routing).item(),
        "z_loss": z_loss(routing).item(),
    }


def assert_reads(layer: LayerReading, routing: RouterOutput) -> None:
    for name, value in expected(routing, layer.num_experts).items():
        assert layer.scalars[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    counts = routing.tokens_per_expert.double().cpu()
    assert torch.equal(layer.experts["load"], counts / counts.sum())


ROUTERS = [
    RouterConfig(2),
    RouterConfig(3, score="sigmoid", correction_bias=True),
    RouterConfig(2, score="sqrt_softplus", normalize=False),
    RouterConfig(2, capacity_factor=1.0),
    RouterConfig(2, num_identity_experts=2, num_null_experts=1),
    RouterConfig(3, top_p=0.6),
]


@given(st.sampled_from(ROUTERS), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 2), st.booleans())
def test_agrees_with_what_routers_return(router, sizes, window, step_first):
    layer = make_layer(router=router)
    monitor = MoEMonitor(layer, window=window, interval=3)
    steps = []
    if step_first:
        monitor.step()
        steps.append([])
    for index, size in enumerate(sizes):
        steps.append([layer(tokens(size, 10 * index + half), return_routing=True)[1] for half in range(2)])
        monitor.step()
    assert_reads(monitor.read()[""], joined([routing for step in steps[-window:] for routing in step]))
    history = monitor.read()[""].history
    assert history.shape == (min(window, len(steps)), 6 + router.num_cheap_experts)
    for row, step in zip(history, steps[-window:], strict=True):
        assert row.tolist() == (joined(step).tokens_per_expert.tolist() if step else [0] * len(row))


def test_what_came_since_the_last_step_is_read_too():
    layer = make_layer()
    monitor = MoEMonitor(layer, window=2)
    _, first = layer(tokens(5), return_routing=True)
    assert_reads(monitor.read()[""], first)
    monitor.step()
    _, second = layer(tokens(7, 1), return_routing=True)
    assert_reads(monitor.read()[""], joined([first, second]))


def test_moving_average():
    layer = make_layer()
    monitor = MoEMonitor(layer, ema=0.75)
    counts = []
    for step in range(3):
        counts.append(layer(tokens(6 + step, step), return_routing=True)[1].tokens_per_expert.double().cpu())
        monitor.step()
    average = sum(0.75 ** (2 - step) * count for step, count in enumerate(counts))
    assert torch.allclose(monitor.read(over="ema")[""].experts["load"], average / average.sum())


def test_moving_average_is_that_of_a_step_and_forgets_what_was_not_finite():
    layer = make_layer()
    monitor = MoEMonitor(layer, window=3)
    for _ in range(3):
        layer(tokens(10))
        monitor.step()
    window, average = monitor.read()[""].scalars, monitor.read(over="ema")[""].scalars
    assert (window["tokens"], average["tokens"]) == (30, pytest.approx(10))
    for name in ("logit_max", "logit_norm", "z_loss", "load_balancing_loss", "confidence"):
        assert average[name] == pytest.approx(window[name], rel=1e-5)
    x = tokens(10)
    x[0] = torch.nan
    for _ in range(20):
        layer(x)
        monitor.step()
    for name, value in (average | {"skipped_steps": 3}).items():
        assert monitor.read(over="ema")[""].scalars[name] == pytest.approx(value, nan_ok=True), name


def test_a_step_that_is_not_finite_does_not_hide_the_others():
    layer, alerts = make_layer(), []
    alarms = [Alarm("skipped_steps", above=0, callback=alerts.append), Alarm("logit_max", above=0, callback=alerts.append)]
    monitor = MoEMonitor(layer, window=5, interval=9, write_every=1, alarms=alarms)
    for step in range(4):
        x = tokens(10, step)
        if step == 2:
            x[0] = torch.nan
        layer(x)
        monitor.step()
    monitor.close()
    finite = MoEMonitor(layer, window=5, interval=9)
    for step in (0, 1, 3):
        layer(tokens(10, step))
        finite.step()
    expected = finite.read()[""].scalars | {"skipped_steps": 1}
    assert monitor.read()[""].scalars == pytest.approx(expected, nan_ok=True)
    assert [alert.step for alert in alerts if alert.metric == "skipped_steps"] == [3, 4]
    assert [alert.step for alert in alerts if alert.metric == "logit_max"] == [1, 2, 3, 4]


def test_large_logits_are_finite():
    layer = make_layer()
    monitor, x = MoEMonitor(layer), tokens(10)
    x[0] *= 1e20
    layer(x)
    scalars = monitor.read()[""].scalars
    assert scalars["skipped_steps"] == 0 and scalars["logit_max"] > 1e18
    assert all(math.isfinite(scalars[name]) for name in ("logit_norm", "z_loss", "load_balancing_loss"))


def test_nothing_seen_is_nan_and_no_error():
    reading = MoEMonitor(make_layer()).read()[""]
    assert set(reading.scalars) == set(SCALARS) and set(reading.experts) == set(PER_EXPERT)
    assert all(math.isnan(value) for name, value in reading.scalars.items() if name not in ("tokens", "skipped_steps"))


def test_no_tokens_at_all():
    layer = make_layer()
    monitor = MoEMonitor(layer)
    layer(tokens(0))
    monitor.step()
    assert monitor.read()[""].scalars["tokens"] == 0 and math.isnan(monitor.read()[""].scalars["confidence"])


def test_not_finite_logits_are_seen():
    layer = make_layer()
    monitor = MoEMonitor(layer)
    x = tokens(4)
    x[1] = torch.nan
    layer(x)
    assert math.isnan(monitor.read()[""].scalars["logit_max"]) and math.isnan(monitor.read()[""].scalars["router_entropy"])


def test_closed_experts_do_not_hide_the_others():
    layer = make_layer(router=RouterConfig(2, expert_dropout=0.5))
    monitor = MoEMonitor(layer)
    for seed in range(4):
        layer(tokens(4, seed))
    reading = monitor.read()[""].scalars
    assert all(math.isfinite(reading[name]) for name in ("logit_norm", "logit_max", "router_entropy", "z_loss"))


def test_evaluation_is_not_counted_unless_asked_for():
    layer = make_layer()
    monitor, always = MoEMonitor(layer), MoEMonitor(layer, training_only=False)
    layer.eval()
    layer(tokens(5))
    layer.train()
    layer(tokens(3))
    assert (monitor.read()[""].scalars["tokens"], always.read()[""].scalars["tokens"]) == (3, 8)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_passes_are_counted_once(reentrant):
    layer = make_layer()
    monitor = MoEMonitor(layer)
    x = tokens(5).requires_grad_()
    checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert monitor.read()[""].scalars["tokens"] == 5
    assert x.grad is not None


def test_results_and_gradients_are_those_without_a_monitor():
    layer, x = make_layer(), tokens(9)

    def results() -> list[Tensor]:
        layer.zero_grad()
        torch.manual_seed(1)
        y = layer(x)
        y.square().sum().backward()
        return [y, *(parameter.grad for parameter in layer.parameters())]

    without = results()
    with MoEMonitor(layer):
        watched = results()
    assert all(torch.equal(one, other) for one, other in zip(without, watched, strict=True))


# -------------------------------------------------------------------- at intervals


@pytest.mark.parametrize("widths", [F, (4, 12, 8, 5)])
def test_norms_of_weights_and_gradients(widths):
    torch.manual_seed(0)
    layer = dMoE(MoEConfig(H, widths, 4, router=RouterConfig(2), init_std=0.5, bias=True), device=DEVICE)
    monitor = MoEMonitor(layer)
    x = tokens(30)
    layer(x).square().sum().backward()
    monitor.step()
    reading = monitor.read()[""]
    offsets = torch.tensor([0, *([widths] * 4 if isinstance(widths, int) else widths)]).cumsum(0).tolist()
    flat = {name: parameter for name, parameter in layer.experts.named_parameters()}
    for metric, values in (("weight_norm", flat), ("gradient_norm", {name: p.grad for name, p in flat.items()})):
        for expert, (start, end) in enumerate(itertools.pairwise(offsets)):
            parts = [
                value[expert] if isinstance(widths, int) or name == "down_proj_bias"
                else value[(2 if name.startswith("gate") else 1) * start : (2 if name.startswith("gate") else 1) * end]
                for name, value in values.items()
            ]  # fmt: skip
            norm = torch.cat([part.flatten() for part in parts]).norm().item()
            assert reading.experts[metric][expert].item() == pytest.approx(norm, rel=1e-5)
    assert reading.scalars["gate_norm"] == pytest.approx(layer.router.weight.norm().item(), rel=1e-6)


def test_norms_of_outputs_are_those_of_each_expert_alone():
    layer = make_layer()
    monitor, x = MoEMonitor(layer, sample=7), tokens(20)
    _, routing = layer(x, return_routing=True)
    norms = monitor.read()[""].experts["output_norm"]
    for expert in range(6):
        chose = [token for token in range(7) if expert in routing.expert_ids[token]]
        if not chose:
            assert math.isnan(norms[expert])
            continue
        up, down = layer.experts.gate_up_proj[expert], layer.experts.down_proj[expert]
        gate, value = (x[chose] @ up.T).chunk(2, dim=1)
        outputs = (nn.functional.silu(gate) * value) @ down.T
        assert norms[expert].item() == pytest.approx(outputs.norm(dim=1).mean().item(), rel=1e-4)


def test_changed_experts_are_those_of_the_same_tokens():
    layer = make_layer()
    monitor = MoEMonitor(layer, interval=2, sample=8)
    layer(tokens(12))
    monitor.step()
    assert math.isnan(monitor.read()[""].scalars["changed"])
    layer(tokens(12, 1))
    monitor.step()
    layer.eval()
    before = layer.router(tokens(12)).logits[:8].argmax(dim=1)
    with torch.no_grad():
        layer.router.weight.add_(torch.randn(layer.router.weight.shape).to(DEVICE))
    changed = (layer.router(tokens(12)).logits[:8].argmax(dim=1) != before).double().mean().item()
    layer.train()
    assert 0 < changed < 1
    layer(tokens(12, 2))
    monitor.step()
    assert monitor.read()[""].scalars["changed"] == changed


def test_measured_once_an_interval(monkeypatch):
    layer = make_layer()
    monitor = MoEMonitor(layer, interval=3)
    calls = []
    probe = type(monitor.layers[0].layer).outputs_of
    monkeypatch.setattr(type(monitor.layers[0].layer), "outputs_of", lambda *args: calls.append(monitor.steps) or probe(*args))
    for _ in range(7):
        layer(tokens(4)), layer(tokens(4))
        monitor.step()
    assert calls == [0, 3, 6]


# -------------------------------------------------------------------- around it


def test_several_layers_by_name():
    model = nn.Sequential(make_layer(4), nn.Linear(H, H, device=DEVICE), make_layer(6))
    monitor = MoEMonitor(model)
    model(tokens(5))
    reading = monitor.read()
    assert [(layer.name, layer.num_experts) for layer in reading] == [("0", 4), ("2", 6)]
    with pytest.raises(KeyError, match="no layer '1'; there are '0', '2'"):
        reading["1"]


def test_refuses_what_has_no_moe_layer():
    with pytest.raises(ValueError, match="Linear has no dMoE"):
        MoEMonitor(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="MoEMonitor: model"):
        MoEMonitor("model")


@pytest.mark.parametrize("name", ["window", "interval", "sample", "write_every"])
def test_refuses_what_is_no_count(name):
    with pytest.raises(ValueError, match=f"MoEMonitor: {name} must be at least 1"):
        MoEMonitor(make_layer(), **{name: 0})


def test_close_takes_the_hooks_off():
    layer = make_layer()
    with MoEMonitor(layer) as monitor:
        layer(tokens(5))
    layer(tokens(5))
    assert monitor.read()[""].scalars["tokens"] == 5


def test_copies_are_not_watched():
    layer = make_layer()
    monitor = MoEMonitor(layer)
    saved = io.BytesIO()
    torch.save(layer, saved)
    saved.seek(0)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(saved, weights_only=False)):
        assert torch.equal(other(tokens(5)), other(tokens(5)))
    assert monitor.read()[""].scalars["tokens"] == 0
    assert not any("monitor" in name for name in layer.state_dict())


def test_layer_that_moves():
    layer = make_layer().to("cpu")
    monitor = MoEMonitor(layer)
    layer(tokens(5).cpu())
    layer.to(DEVICE)
    layer(tokens(5))
    monitor.step()
    assert monitor.read()[""].scalars["tokens"] == 10


def test_made_on_meta():
    layer = dMoE(MoEConfig(H, F, 6), device="meta")
    monitor = MoEMonitor(layer)
    assert monitor.read()[""].scalars["tokens"] == 0
    monitor.step()
    layer.to_empty(device=DEVICE)
    layer.reset_parameters()
    layer(tokens(7))
    assert monitor.read()[""].scalars["tokens"] == 7


def test_losses_are_those_of_the_router_under_noise():
    layer = make_layer(router=RouterConfig(2, noise=1.0, expert_dropout=0.4))
    monitor = MoEMonitor(layer)
    _, routing = layer(tokens(40), return_routing=True)
    found = monitor.read()[""].scalars
    assert found["z_loss"] == pytest.approx(routing.z_loss.item(), rel=1e-5)
    assert found["load_balancing_loss"] == pytest.approx(routing.load_balancing_loss.item(), rel=1e-5)


def test_all_slots_dropped_or_to_identity_experts():
    layer = make_layer(router=RouterConfig(2, token_dropout=0.999999, num_identity_experts=2))
    monitor = MoEMonitor(layer)
    layer(tokens(20))
    assert monitor.read()[""].scalars["load_balancing_loss"] == 0 and monitor.read()[""].scalars["drop_rate"] == 1
    layer = make_layer(router=RouterConfig(2, num_identity_experts=2))
    monitor = MoEMonitor(layer)
    layer(tokens(20), expert_ids=torch.tensor([6, 7], device=DEVICE).expand(20, 2))
    found = monitor.read()[""].scalars
    assert (found["cold_experts"], found["load_max_over_mean"], found["drop_rate"]) == (6, 0, 0)


def test_an_empty_micro_batch_leaves_the_measurement_to_the_next():
    layer = make_layer()
    monitor = MoEMonitor(layer)
    layer(tokens(0))
    layer(tokens(20))
    assert monitor.read()[""].experts["output_norm"].isfinite().any()


def test_goes_on_from_a_step():
    layer = make_layer()
    monitor = MoEMonitor(layer, window=4, first_step=1003, interval=2, ema=0.5)
    for step in range(3):
        layer(tokens(4, step))
        monitor.step()
    reading = monitor.read()
    assert reading.step == 1006 and reading[""].history.shape == (3, 6) and (reading[""].history.sum(dim=1) == 8).all()
    assert monitor.read("ema")[""].scalars["tokens"] == pytest.approx(4)


def test_a_writer_that_fails_does_not_keep_others_open():
    class Fails(JsonLines):
        def __init__(self):
            self.closed = False

        def close(self):
            self.closed = True
            raise RuntimeError("no disk")

    first, second = Fails(), Fails()
    monitor = MoEMonitor(make_layer(), writers=[first, second])
    with pytest.raises(RuntimeError):
        monitor.close()
    assert first.closed and second.closed and monitor.writers == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(writers="runs"), "writers must be a list"),
        (dict(writers=["runs"]), "writers must be a list"),
        (dict(alarms=Alarm("load", below=0)), "alarms must be a list"),
        (dict(training_only="no"), "training_only must be of type bool"),
    ],
)
def test_refuses_what_is_of_another_type(given, message):
    with pytest.raises(TypeError, match=message):
        MoEMonitor(make_layer(), **given)


def test_refuses_a_window_that_leaves_steps_out(tmp_path):
    with pytest.raises(ValueError, match="a window of 10 steps would leave some out"):
        MoEMonitor(make_layer(), window=10, writers=[JsonLines(tmp_path / "x")])


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA GPU")
def test_never_waits_for_the_device():
    layer = make_layer()
    monitor = MoEMonitor(layer, interval=2)
    x = tokens(64)
    layer(x).sum().backward()
    monitor.step()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(4):
            layer(x).sum().backward()
            monitor.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert monitor.read()[""].scalars["tokens"] == 5 * 64
