"""What the backend `te` refuses and reports, and its views of the weights; with a stand-in for Transformer Engine's answers."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from blocksparse_moe import MoEConfig, dMoE
from blocksparse_moe.backends import ExpertSpec, report, select
from blocksparse_moe.backends.execution import Execution
from blocksparse_moe.backends.te.fused import conditions
from blocksparse_moe.backends.te.products import interleave
from blocksparse_moe.backends.te.recipes import RECIPES
from blocksparse_moe.backends.te.weights import stacked_grads, views_of
from blocksparse_moe_kernels import Columns

from .te_stand_in import BLACKWELL, HOPPER, answer

CUDA = torch.device("cuda", 0)


def spec(precision: str | None = None, *, require_fused: bool = False, **changes: object) -> ExpertSpec:
    execution = Execution("te", precision, require_fused)
    plain = ExpertSpec(Columns.equal(128, 4), 256, "swiglu", False, torch.bfloat16, CUDA, execution=execution)
    return replace(plain, **changes)


@pytest.fixture
def on(monkeypatch):
    return partial(answer, monkeypatch)


# -------------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": torch.device("cpu")}, "needs a CUDA device; the tensors are on cpu"),
        ({"columns": Columns.of([1, 2, 3, 4])}, "multiplies experts of one size only"),
        ({"dtype": torch.float64}, "computes in bf16, fp16 and fp32; got torch.float64"),
        ({"recompute": True}, "does not recompute .*transformer_engine.pytorch.checkpoint"),
        ({"contiguous": False}, "takes each expert's matrices contiguous"),
    ],
)
def test_refusals_of_the_layer(on, change, reason):
    on(HOPPER)
    with pytest.raises(NotImplementedError, match=f"backend 'te' {reason}"):
        select(spec(**change))
    auto = replace(spec(**change), execution=Execution())
    assert re.search(rf"\n  te: {reason}", report(auto))


@pytest.mark.parametrize(
    ("precision", "emulated"),
    [("mxfp8", "backend='auto'"), ("nvfp4", "precision='mxfp8', backend='auto'"), ("fp8_block", None)],
)
def test_recipes_of_hopper(on, precision, emulated):
    on(HOPPER)
    if emulated is None:
        assert select(spec(precision))[0].name == "te"
        return
    with pytest.raises(NotImplementedError) as error:
        select(spec(precision))
    reason = str(HOPPER.available[precision]).rstrip(".")
    assert f"cannot compute in {precision} on cuda:0 (compute capability 9.0): {reason}." in str(error.value)
    assert str(error.value).endswith(
        "The nearest that runs here is precision='fp8_block' (te: fp8_block, unfused), "
        f"or {emulated} (triton: mxfp8, emulated)."
    )


@pytest.mark.parametrize(("engine", "backend"), [(HOPPER, "te"), (HOPPER, "auto"), (BLACKWELL, "auto")])
def test_the_conditions_are_told_where_another_backend_runs_or_none(on, engine, backend):
    on(engine)
    asked = replace(spec("mxfp8"), execution=Execution(backend, "mxfp8"))
    text = report(asked)
    assert text.count("grouped MLP; the conditions:") == 1
    assert all(str(condition) in text for condition in conditions(engine, asked))
    assert "the conditions" not in report(replace(asked, execution=Execution("auto", "bf16")))


def test_a_recipe_that_fails_alone_has_its_sibling_named(on):
    on(replace(HOPPER, available=HOPPER.available | {"fp8": "broken"}))
    with pytest.raises(NotImplementedError, match=r"nearest that runs here is precision='fp8_block' \(te: .*\)\.$"):
        select(spec("fp8_current"))


def test_the_nearest_recipe_is_one_that_runs(on):
    on(replace(HOPPER, capability=(8, 0), available=dict.fromkeys(HOPPER.available, "too old.")))
    for precision in set(RECIPES) - {"bf16"}:
        with pytest.raises(NotImplementedError, match=r"that runs here is precision=None \(te: bfloat16, unfused\), or"):
            select(spec(precision))
    on(replace(HOPPER, available=HOPPER.available | {"fp8_block": "CUDA >= 12.9 is needed."}))
    with pytest.raises(NotImplementedError, match=r"nearest that runs here is precision='fp8_current' \(te: .*\)\.$"):
        select(spec("fp8_block"))


def test_a_reason_that_is_empty(on):
    for reason in ("", " ."):
        on(replace(HOPPER, available=HOPPER.available | {"fp8_block": reason}))
        with pytest.raises(NotImplementedError, match=r"\(compute capability 9.0\): Transformer Engine gave no reason\. The"):
            select(spec("fp8_block"))


@pytest.mark.parametrize(("precision", "multiple"), [("fp8_current", 16), ("fp8_block", 16), ("mxfp8", 32)])
def test_sizes_that_a_recipe_cannot_take(on, precision, multiple):
    on(BLACKWELL)
    with pytest.raises(
        NotImplementedError,
        match=rf"with sizes 200: H and F must be multiples of {multiple}\. The nearest that runs here is .*mxfp8, native\)",
    ):
        select(spec(precision, hidden_size=200))
    assert select(spec("bf16", hidden_size=201))[0].name == "te"


def test_bf16_is_bf16(on):
    on(HOPPER)
    with pytest.raises(ValueError, match=r'precision="bf16": the experts compute in torch.float32'):
        select(spec("bf16", dtype=torch.float32))
    assert select(spec(None, dtype=torch.float32))[0].name == "te"


def test_other_backends_leave_fp8_to_it(on):
    on(HOPPER)
    for name in ("torch", "triton"):
        with pytest.raises(
            NotImplementedError, match=rf"backend '{name}' has no fp8_current. .* backend='auto' \(te: fp8_current, unfused\)"
        ):
            select(replace(spec(), execution=Execution(name, "fp8_current")))
    auto = replace(spec(), execution=Execution("auto", "fp8_current"))
    assert select(auto)[0].name == "te"
    on("needs Transformer Engine >= 2.17, which is not installed")
    with pytest.raises(NotImplementedError, match=r"backend 'te' needs Transformer Engine >= 2.17, which is not installed"):
        select(auto)
    assert "nothing runs here" in report(auto)


@pytest.mark.parametrize("precision", ["fp8", "MXFP8", "", "int8"])
def test_unknown_precisions(precision):
    with pytest.raises(ValueError, match=f"precision: '{precision}' is not known; choose one of bf16"):
        dMoE(MoEConfig(8, 8, 2), backend="te", precision=precision)


# -------------------------------------------------------------------- fused or not


def test_every_condition_is_named(on):
    on(BLACKWELL)
    assert all(condition.holds for condition in conditions(BLACKWELL, spec("mxfp8")))
    text = report(spec("mxfp8"))
    assert "fused grouped MLP; the conditions:" in text and "unfused" not in text and "FAILS" not in text
    assert "never run here by this project" in text and "padded to 256" in text
    assert "first weight is copied" in text and "streams" not in text


@pytest.mark.parametrize(("registered", "fails"), [(True, []), (False, ["NVTE_CUTEDSL_FUSED_GROUPED_MLP", "registered"])])
def test_a_variable_that_may_have_come_too_late(on, registered, fails):
    engine = replace(BLACKWELL, imported_before=True, fused_obstacle=None if registered else "not registered")
    failing = [condition for condition in conditions(engine, spec("mxfp8")) if not condition.holds]
    assert len(failing) == len(fails) and all(words in str(one) for words, one in zip(fails, failing, strict=True))
    on(engine)
    assert "set to 1 now, but it was imported before this package could look" in report(spec("mxfp8"))


def test_a_frontend_of_no_version(on):
    (condition,) = (
        one for one in conditions(replace(BLACKWELL, cudnn_frontend="main-abc"), spec("mxfp8")) if "frontend" in one.needs
    )
    assert not condition.holds and "main-abc" in str(condition)


@pytest.mark.parametrize(
    ("precision", "advice"),
    [
        ("mxfp8", "or backend='auto' ({}: mxfp8, emulated)"),
        ("fp8_block", "or precision='mxfp8', backend='auto' ({}: mxfp8, emulated)"),
        (None, "is backend='auto' ({}: bfloat16)"),
    ],
)
def test_what_runs_without_it(on, precision, advice):
    on("needs Transformer Engine >= 2.17, which is not installed")
    for device in (CUDA, torch.device("cpu")):
        name = "triton" if device.type == "cuda" else "torch"
        with pytest.raises(NotImplementedError, match=re.escape(advice.format(name))):
            select(spec(precision, device=device))


@pytest.mark.parametrize(
    ("change", "engine", "words"),
    [
        ({}, {"fused_variable": None}, "NVTE_CUTEDSL_FUSED_GROUPED_MLP=1 .*not set"),
        ({}, {"fused_variable": "0"}, "NVTE_CUTEDSL_FUSED_GROUPED_MLP=1 .*set to 0"),
        ({}, {"capability": (11, 0)}, r"compute capability 10.x \(Blackwell\) \(11.0\)"),
        ({}, {"cudnn_frontend": "1.9.0"}, r"nvidia-cudnn-frontend >= 1.23.0 \(1.9.0\)"),
        ({}, {"cudnn_frontend": None}, "nvidia-cudnn-frontend .*not installed"),
        ({}, {"fused_obstacle": "not registered"}, "is registered by Transformer Engine .*not registered"),
        ({"hidden_size": 288}, {}, "multiples of 64 .*H=288"),
        ({"activation": "geglu"}, {}, "plain swiglu .*geglu"),
        ({"bias": True}, {}, "no biases"),
        ({"dtype": torch.float16}, {}, "computation in bf16 .*float16"),
    ],
)
def test_a_condition_that_fails(on, change, engine, words):
    on(replace(BLACKWELL, **engine))
    text = report(spec("mxfp8", **change))
    assert "unfused grouped MLP; the conditions:" in text
    (failing,) = [line for line in text.splitlines() if "FAILS" in line]
    assert re.search(words, failing)
    with pytest.raises(NotImplementedError, match="would run unfused, and require_fused=True was asked for: FAILS"):
        select(spec("mxfp8", require_fused=True, **change))


def test_a_report_of_hopper(on):
    on(HOPPER)
    text = report(spec("fp8_current"))
    assert text.startswith("backend te (asked for)")
    for words in (
        "Transformer Engine 2.20.2, cuBLASLt 13.1",
        "precision fp8_current: Float8CurrentScaling, rows of each expert padded to 16",
        "unfused grouped MLP: fused are those of mxfp8 only",
        "no CUDA graphs",
        "torch.compile",
    ):
        assert words in text
    assert "FAILS" not in text, "conditions are for whom they concern"


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        (torch.bfloat16, "precision bfloat16: GEMMs in bf16"),
        (torch.float16, "precision float16: GEMMs in fp16"),
        (torch.float32, "precision float32: GEMMs of fp32, which Transformer Engine multiplies in TF32"),
    ],
)
def test_without_a_precision_the_report_names_the_dtype(on, dtype, words):
    on(HOPPER)
    plain = spec(dtype=dtype)
    assert f"  {words}, rows" in report(plain)
    assert select(plain)[0].brief(plain) == f"{str(dtype).removeprefix('torch.')}, unfused"
    with pytest.raises(NotImplementedError, match=rf"FAILS: precision mxfp8 \({str(dtype).removeprefix('torch.')}\)"):
        select(spec(dtype=dtype, require_fused=True))


def test_a_recipe_that_cannot_run_and_a_path_that_is_not_fused(on):
    """Both are said."""
    on(HOPPER)
    with pytest.raises(NotImplementedError, match=r"MXFP8 execution; it would run unfused, .*: FAILS: compute capability 10"):
        select(spec("mxfp8", require_fused=True))


def test_a_report_advises_nothing_that_is_done_already(on):
    on("needs Transformer Engine >= 2.17, which is not installed")
    text = report(replace(spec(), execution=Execution("auto", "mxfp8")))
    assert text.startswith("backend triton") and text.endswith("  te: needs Transformer Engine >= 2.17, which is not installed")


def test_the_order_of_the_fused_kernel():
    weight = torch.arange(2 * 128 * 3).view(2, 128, 3)
    mixed = interleave(weight)
    assert torch.equal(mixed[:, :32], weight[:, :32]) and torch.equal(mixed[:, 32:64], weight[:, 64:96])
    assert torch.equal(mixed[:, 64:96], weight[:, 32:64]) and torch.equal(mixed[:, 96:], weight[:, 96:])


# -------------------------------------------------------------------- weights are views


def test_views_share_memory_and_give_one_gradient():
    stacked = torch.randn(3, 4, 5, requires_grad=True)
    views = views_of(stacked, stacked)
    assert all(view.data_ptr() == stacked[i].data_ptr() for i, view in enumerate(views))
    (views[0].sum() + 2 * views[2].sum()).backward()
    assert torch.equal(stacked.grad, torch.tensor([1.0, 0, 2])[:, None, None].expand(3, 4, 5))


def test_gradients_in_one_piece_are_taken_as_they_are():
    packed = torch.randn(3, 4, 5)
    assert stacked_grads(tuple(packed), packed.shape).data_ptr() == packed.data_ptr()
    apart = [part.clone() for part in packed]
    apart[1] = None
    result = stacked_grads(tuple(apart), packed.shape)
    assert torch.equal(result[0], packed[0]) and (result[1] == 0).all() and torch.equal(result[2], packed[2])
    assert stacked_grads((None, None, None), packed.shape) is None
    swapped = (packed[1], packed[0], packed[2])
    assert torch.equal(stacked_grads(swapped, packed.shape), torch.stack(swapped))
