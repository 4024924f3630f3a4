"""Monitors of every family of transformers, patched and not."""

from __future__ import annotations

import math

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn

from blocksparse_moe import MoEMonitor, patch_huggingface
from blocksparse_moe.monitor import SCALARS

from .support import DEVICE

transformers = pytest.importorskip("transformers", minversion="5.9")

from .hf_families import FAMILIES, build, experts_of, inputs, missing, slow_but_for  # noqa: E402

SINCE = {"deepseek_v2": "5.17", "longcat_flash": "5.24"}
"""Before that the gate's module is never called, or returns no logits."""
NO_LOGITS = ("ernie4_5_vl_moe", *(name for name, since in SINCE.items() if Version(transformers.__version__) < Version(since)))
BLOCKS = ("jetmoe", "llama4")
UNCHANGING = ("deepseek_v4", "zaya", *NO_LOGITS)
"""Families whose gate wants more than tokens and biases."""


def ids_of(model: nn.Module, name: str) -> dict[str, list[Tensor]]:
    """Will hold the ids that reach each experts module in the next forward passes."""
    seen: dict[str, list[Tensor]] = {}

    def keep(module: nn.Module, args: tuple, kwargs: dict, *, name: str) -> None:
        values = {**dict(enumerate(args)), **kwargs}
        seen.setdefault(name, []).append(next(v for v in values.values() if v is not None and not v.is_floating_point()))

    for path, module in experts_of(model, name).items():
        module.register_forward_pre_hook(lambda m, a, k, path=path: keep(m, a, k, name=path), with_kwargs=True)
    return seen


@pytest.mark.parametrize("name", slow_but_for(("mixtral", "llama4"), FAMILIES))
def test_sees_every_family(name):
    if (reason := missing(FAMILIES[name])) is not None:
        pytest.skip(reason)
    model = build(name, DEVICE)
    given = inputs(model, name)
    seen = {} if name in BLOCKS else ids_of(model, name)
    with MoEMonitor(model, training_only=False, interval=1) as monitor:
        for _ in range(2):
            out = model(**given)
        monitor.step()
        before = monitor.read()
    assert len(before.layers) == FAMILIES[name].layers
    for layer in before:
        total = layer.history[0]
        if name not in BLOCKS:
            ids = torch.cat([one.flatten() for one in seen[layer.name]]).cpu()
            assert total.tolist() == [(ids == expert).sum() for expert in range(len(total))]
        assert total.sum() > 0 and layer.scalars["drop_rate"] == 0
        unknown = {metric for metric in SCALARS if math.isnan(layer.scalars[metric])} - {"changed"}
        if name not in NO_LOGITS:
            assert unknown == ({"load_balancing_loss"} if name == "zaya" else set())  # ZAYA's gate has a class for no expert
        chosen = total[: layer.num_experts] > 0
        if name not in BLOCKS:
            assert torch.equal(layer.experts["output_norm"].isfinite(), chosen)
        assert layer.experts["weight_norm"].isfinite().all()
    recorded = out.get("router_logits")
    if recorded is not None and name not in NO_LOGITS and len(recorded) == len(before.layers):
        for logits, layer in zip(recorded, before, strict=True):
            assert layer.scalars["logit_max"] == pytest.approx(logits.abs().max().item(), rel=1e-5)

    with patch_huggingface(model), MoEMonitor(model, training_only=False, interval=1) as monitor:
        for _ in range(2):
            model(**given)
        monitor.step()
        for layer, other in zip(monitor.read(), before, strict=True):
            assert layer.name == other.name and torch.equal(layer.history, other.history)
            torch.testing.assert_close(
                layer.experts["output_norm"], other.experts["output_norm"], rtol=1e-4, atol=1e-6, equal_nan=True
            )
            assert math.isnan(layer.scalars["changed"])
            torch.testing.assert_close(layer.scalars["z_loss"], other.scalars["z_loss"], rtol=1e-4, atol=1e-6, equal_nan=True)
        model(**given)
        changes = [layer.scalars["changed"] for layer in monitor.read()]
        assert name in UNCHANGING or changes == [0.0] * len(changes)


def test_trains_and_measures_gradients():
    model = build("mixtral", DEVICE).train()
    with patch_huggingface(model), MoEMonitor(model, interval=1) as monitor:
        for _ in range(2):
            model(**inputs(model, "mixtral")).loss.backward()
            monitor.step()
        for layer in monitor.read():
            experts = model.get_submodule(layer.name)
            gradient = torch.stack([w.grad.flatten(1).norm(dim=1) for w in (experts.gate_up_proj, experts.down_proj)]).norm(
                dim=0
            )
            torch.testing.assert_close(layer.experts["gradient_norm"].float(), gradient.cpu(), rtol=1e-4, atol=1e-7)
            assert layer.scalars["changed"] == 0


@pytest.mark.parametrize("name", ["mixtral", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_other_dtypes(name):
    """Under autocast, and cast while it is watched."""
    model = build(name, DEVICE).train()
    embedded = model.get_input_embeddings()(inputs(model, name)["input_ids"]).detach()
    with MoEMonitor(model, interval=1) as monitor:
        for _ in range(2):
            with torch.autocast(DEVICE.type, torch.bfloat16):
                model(inputs_embeds=embedded.bfloat16())
            monitor.step()
        model.bfloat16()
        for _ in range(2):
            model(**inputs(model, name))
            monitor.step()
    assert all(math.isfinite(layer.scalars["changed"]) for layer in monitor.read())


@pytest.mark.slow
def test_nothing_is_drawn():
    """PhiMoE's gate draws random numbers in training."""
    if (reason := missing(FAMILIES["phimoe"])) is not None:
        pytest.skip(reason)
    model = build("phimoe", DEVICE).train()
    given, states, monitor = inputs(model, "phimoe"), [], None
    for _ in range(2):
        torch.manual_seed(0)
        for _ in range(2):
            model(**given)
        states.append(torch.cuda.get_rng_state() if DEVICE.type == "cuda" else torch.get_rng_state())
        monitor = MoEMonitor(model, interval=1) if monitor is None else monitor
    assert torch.equal(*states)
    assert monitor.read().layers[0].scalars["tokens"] > 0


@pytest.mark.slow
def test_offloaded_weights(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = build("mixtral", DEVICE)
    given = inputs(model, "mixtral")
    accelerate.disk_offload(model, tmp_path, execution_device=DEVICE)
    monitor = MoEMonitor(model, training_only=False)
    with torch.no_grad():
        model(**given)
    monitor.step()
    for layer in monitor.read():
        assert layer.scalars["tokens"] == 14 and layer.experts["output_norm"].isfinite().any()


def test_a_dense_model_is_refused():
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with pytest.raises(ValueError, match="LlamaForCausalLM has no dMoE"):
        MoEMonitor(transformers.LlamaForCausalLM(config))
