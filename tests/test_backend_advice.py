"""What a refusal advises runs, and what a report calls possible is: for every backend and precision, and for devices and layers
of all kinds."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from itertools import product

import pytest
import torch

from blocksparse_moe import MoEConfig, RouterConfig, dMoE, products
from blocksparse_moe.backends import BACKENDS, PRECISIONS, ExpertSpec, check_layer, report, select
from blocksparse_moe.backends.execution import Execution
from blocksparse_moe_kernels import Columns

from .te_stand_in import BLACKWELL, HOPPER, answer

ADVICE = "The nearest that runs here is "

ENGINES = {
    "Hopper": HOPPER,
    "Hopper, CUDA 12.8": replace(HOPPER, available=HOPPER.available | {"fp8_block": "CUDA >= 12.9 is needed."}),
    "Ampere": replace(HOPPER, capability=(8, 0), available=dict.fromkeys(HOPPER.available, "")),
    "Blackwell": BLACKWELL,
    "Blackwell, not fused": replace(BLACKWELL, fused_variable=None),
    "GeForce": replace(BLACKWELL, capability=(12, 0), available=BLACKWELL.available | {"mxfp8": "not on sm_120"}),
    "none": "needs Transformer Engine >= 2.17, which is not installed",
}

LAYERS = {
    "plain": {},
    "unequal": {"columns": Columns.of([64, 128])},
    "odd": {"hidden_size": 201},
    "multiples of 16": {"hidden_size": 208},
    "fp32": {"dtype": torch.float32},
    "fp64": {"dtype": torch.float64},
    "fp32, unequal": {"dtype": torch.float32, "columns": Columns.of([64, 128])},
    "recompute": {"recompute": True},
    "strides": {"contiguous": False},
    "recompute, strides, odd": {"recompute": True, "contiguous": False, "hidden_size": 201},
}

EXECUTIONS = [Execution(*options) for options in product(("auto", *BACKENDS), (None, *PRECISIONS), (False, True))]


def advice(message: str) -> list[dict]:
    """The options that a message names, each with what is said to run."""
    _, _, named = message.partition(ADVICE)
    return [
        {name: ast.literal_eval(value) for name, value in re.findall(r"(\w+)=('\w+'|\w+)", options)} | {"runs": runs}
        for options, runs in re.findall(r"(\w+=[^()]+) \(([^()]+)\)", named)
    ]


def followed(spec: ExpertSpec, options: dict) -> ExpertSpec:
    of_layer = {name: options[name] for name in options.keys() & {"recompute"}}
    of_execution = {name: options[name] for name in options.keys() & {"backend", "precision", "require_fused"}}
    return replace(spec, **of_layer, execution=replace(spec.execution, **of_execution))


@pytest.mark.parametrize(
    ("engine", "device"), [*((engine, "cuda:0") for engine in ENGINES), ("Hopper", "cpu"), ("none", "cpu"), ("none", "meta")]
)
def test_advice_runs(monkeypatch, engine, device):
    answer(monkeypatch, ENGINES[engine])
    plain = ExpertSpec(Columns.equal(128, 2), 256, "swiglu", False, torch.bfloat16, torch.device(device))
    refused = 0
    for changes, execution in product(LAYERS.values(), EXECUTIONS):
        spec = replace(plain, **changes, execution=execution)
        try:
            select(spec)
        except NotImplementedError as error:
            found = advice(str(error))
            assert len(found) in (1, 2), error
            assert "emulated" not in found[0]["runs"], "the first one is in earnest"
            for options in found:
                other = followed(spec, options)
                assert other != spec
                backend, _ = select(other)
                assert f"{backend.name}: {backend.brief(other)}" == options["runs"]
        except ValueError as error:
            assert "Cast the layer, as by .bfloat16()" in str(error)
            select(replace(spec, dtype=torch.bfloat16))
        else:
            continue
        refused += 1
    assert refused > 100


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
@pytest.mark.parametrize("engine", ["Hopper", "Blackwell", "none"])
def test_what_a_report_calls_possible_is(monkeypatch, engine, device):
    answer(monkeypatch, ENGINES[engine])
    plain = ExpertSpec(Columns.equal(128, 2), 256, "swiglu", False, torch.bfloat16, torch.device(device))
    for changes, execution in product(LAYERS.values(), EXECUTIONS):
        spec = replace(plain, **changes, execution=execution)
        for name, said in re.findall(r"^  (triton|torch|te): (.*)$", report(spec), re.MULTILINE):
            named = replace(spec, execution=replace(execution, backend=name))
            if said == "possible, not chosen":
                assert select(named)[0].name == name
            else:
                with pytest.raises((NotImplementedError, ValueError), match=re.escape(said)):
                    select(named)


def test_a_layer_is_refused_at_once_if_and_only_if_it_runs_nowhere(monkeypatch):
    plain = ExpertSpec(Columns.equal(128, 2), 256, "swiglu", False, torch.bfloat16, torch.device("cuda:0"))
    layers = [*LAYERS.values(), {"bias": True}, {"activation": "geglu"}, {"hidden_size": 288}]
    asked = [
        replace(plain, **{**changes, "dtype": torch.bfloat16}, execution=one) for changes, one in product(layers, EXECUTIONS)
    ]
    runs = dict.fromkeys(range(len(asked)), False)
    for engine in ENGINES.values():
        answer(monkeypatch, engine)
        for number, spec in enumerate(asked):
            try:
                select(spec)
            except NotImplementedError:
                continue
            runs[number] = True
    for number, spec in enumerate(asked):
        try:
            check_layer(replace(spec, device=torch.device("meta")))
        except NotImplementedError as error:
            assert not runs[number], spec
            assert ADVICE in str(error)
        else:
            assert runs[number], spec


CONFIG = MoEConfig(32, 32, 2, router=RouterConfig(top_k=2))


@pytest.mark.parametrize(
    "config",
    [CONFIG, replace(CONFIG, ffn_hidden_size=(32, 64)), replace(CONFIG, recompute=True)],
    ids=["plain", "unequal", "recompute"],
)
def test_a_layer_that_is_made_as_advised(config):
    """Whether it is refused when it is made or when it is called."""
    x = torch.randn(3, 32)
    for backend, precision, require_fused in product(("auto", "torch", "te"), (None, *PRECISIONS[1:]), (False, True)):
        options = {"backend": backend, "precision": precision, "require_fused": require_fused}
        try:
            dMoE(config, **options)(x)
        except NotImplementedError as error:
            for named in advice(str(error)):
                changed = replace(config, recompute=named.get("recompute", config.recompute))
                assert (
                    dMoE(changed, **options | {name: named[name] for name in options.keys() & named.keys()})(x).shape == x.shape
                )


@pytest.mark.parametrize("precision", [None, "mxfp8"])
def test_a_call_advises_what_the_report_does(monkeypatch, precision):
    """Though the router is the first to refuse."""
    monkeypatch.setattr(products, "_interpreting", lambda: False)
    layer = dMoE(CONFIG, device="cpu", backend="triton", precision=precision)
    with pytest.raises(NotImplementedError) as error:
        layer(torch.randn(3, 32))
    assert f"nothing runs here: {error.value} " in layer.backend_report()
    assert [options["backend"] for options in advice(str(error.value))] == ["auto"] * (1 if precision is None else 2)


def test_what_only_the_router_refuses_is_its_own_refusal(monkeypatch):
    monkeypatch.setattr(products, "_interpreting", lambda: False)
    layer = dMoE(CONFIG, device="cpu", backend="torch")
    layer.router.backend = "triton"
    with pytest.raises(NotImplementedError, match="backend 'triton' needs a CUDA device"):
        layer(torch.randn(3, 32))
