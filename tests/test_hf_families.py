"""Every Hugging Face family with its experts computed elsewhere: equal to transformers' eager experts.

The bed is proved first: a function of plain torch takes the place of this package, and must agree with every family; with one
fault in it, it must not.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocksparse_moe import patch_huggingface
from blocksparse_moe.integrations.huggingface import UnsupportedModelError
from blocksparse_moe_kernels import Topology

from .support import DEVICE, HAS_CUDA, assert_within_budget

transformers = pytest.importorskip("transformers", minversion="5.9")
from transformers.integrations import moe  # noqa: E402

from .hf_families import FAMILIES, QUICK, UNBUILT, build, experts_classes, experts_of, folders, inputs, missing, slow_but_for  # noqa: E402

DECORATED = [name for name, family in FAMILIES.items() if family.experts is None]
"""The families that the experts interface serves."""


@pytest.fixture
def model(name: str) -> nn.Module:
    if (reason := missing(FAMILIES[name])) is not None:
        pytest.skip(reason)
    return build(name, DEVICE)


# -------------------------------------------------------------------- two runs of one model


def step(model: nn.Module, given: dict[str, Any]) -> dict[str, Tensor | None]:
    """One training step: what the model returns, and the gradient of every parameter."""
    model.zero_grad()
    out = model(**given)
    result = out.logits if "logits" in out else out.last_hidden_state
    loss = out.get("loss")
    if loss is None:
        loss = (result * torch.randn(result.shape, generator=torch.Generator().manual_seed(3)).to(result)).sum()
    loss.backward()
    results = {"result": result.detach(), "loss": loss.detach()}
    if out.get("aux_loss") is not None:
        results["aux_loss"] = out.aux_loss.detach()
    return results | {name: parameter.grad for name, parameter in model.named_parameters()}


def difference(ours: Tensor, other: Tensor, scale: float = 0.0) -> float:
    """The largest difference relative to the largest element, or to `scale` where all elements are smaller than that."""
    return ((ours - other).abs().max() / other.abs().max().clamp(min=scale or torch.finfo(other.dtype).tiny)).item()


def assert_same_step(ours: dict[str, Tensor | None], others: dict[str, Tensor | None], tolerance: float = 1e-5) -> None:
    """Gradients that are zero in exact arithmetic, such as that of a key's bias, are noise: measured by the largest tensor."""
    assert ours.keys() == others.keys()
    noise = 1e-4 * max(value.abs().max().item() for value in others.values() if value is not None)
    for name, value in ours.items():
        other = others[name]
        if other is None:
            assert value is None or not value.any(), f"{name} has a gradient; eager gives none"
            continue
        assert value is not None, f"{name} has no gradient"
        assert value.dtype == other.dtype
        assert (error := difference(value, other, noise)) <= tolerance, f"{name}: relative difference {error:.2e}"


def assert_agrees_with_eager(
    model: nn.Module,
    name: str,
    given: dict[str, Any],
    ours: dict[str, Tensor | None],
    eagers: dict[str, Tensor | None],
    others: Callable[[nn.Module], AbstractContextManager],
) -> None:
    """`ours`, of a step inside `others(model)`, are eager's to fp32's precision.

    Where gradients are small differences of sums, whose rounding depends on the processor and the number of threads, fp32 says
    nothing: they agree in fp64, a billion times as closely.
    """
    if name in ILL_CONDITIONED:
        exact = copy.deepcopy(model).double()
        expected = step(exact, given)
        with others(exact):
            assert_same_step(step(exact, given), expected, tolerance=1e-12)
        ours, eagers = ({key: value for key, value in results.items() if not _cancels(key)} for results in (ours, eagers))
    assert_same_step(ours, eagers)


ILL_CONDITIONED = {"deepseek_v4", "hy_v4", "hy_v4_vl"}
"""A norm follows their hyper-connections, so that most of these parameters' gradients cancels: eager's change by 1e-4 with the
number of threads."""


def _cancels(parameter: str) -> bool:
    return "hc_head." in parameter or "_hc." in parameter


# -------------------------------------------------------------------- the bed


def plain(module: Any, hidden_states: Tensor, expert_ids: Tensor, weights: Tensor, *, fault: str = "none") -> Tensor:
    """The forward of any decorated experts module, one expert after another, with every flag of the interface."""

    def linear(x: Tensor, name: str, expert: int) -> Tensor:
        weight = getattr(module, name)[expert]
        y = x @ (weight if module.is_transposed else weight.mT)
        return y + getattr(module, f"{name}_bias")[expert] if module.has_bias and fault != "no bias" else y

    def activate(x: Tensor) -> Tensor:
        if fault == "silu gate":
            gate, up = x.chunk(2, dim=-1)
            return nn.functional.silu(gate) * up
        return module._apply_gate(x) if module.has_gate else module.act_fn(x)

    up_proj = "gate_up_proj" if module.has_gate else "up_proj"
    total = torch.zeros_like(hidden_states)
    for expert in range(len(module.down_proj)):
        token, slot = (expert_ids == expert).nonzero(as_tuple=True)
        y = linear(activate(linear(hidden_states[token], up_proj, expert)), "down_proj", expert)
        if getattr(module, "has_post_expert_norm", False) and fault != "no norm":
            y = module.post_expert_norm(y)
        total = total.index_add(0, token, (y * weights[token, slot, None]).to(total.dtype))
    return total


@contextmanager
def computed_by(model: nn.Module, function: Callable[..., Tensor]) -> Iterator[None]:
    """The decorated experts of the model computed by `function`."""
    moe.ALL_EXPERTS_FUNCTIONS.register("test_bed", function)
    model.set_experts_implementation("test_bed")
    try:
        yield
    finally:
        model.set_experts_implementation("eager")
        del moe.ExpertsInterface._global_mapping["test_bed"]


@pytest.mark.parametrize("name", slow_but_for(QUICK, DECORATED))
def test_plain_experts_agree_with_eager(name, model):
    given, experts, reached = inputs(model, name), experts_of(model, name), []

    def counted(module: nn.Module, *args: Tensor) -> Tensor:
        reached.append(module)
        return plain(module, *args)

    expected = step(model, given)
    with computed_by(model, counted):
        others = step(model, given)
    assert set(reached) == set(experts.values())
    assert_agrees_with_eager(model, name, given, others, expected, partial(computed_by, function=plain))
    assert len(experts) == FAMILIES[name].layers
    for path, module in experts.items():
        for parameter, _ in module.named_parameters():
            assert expected[f"{path}.{parameter}"].any(), f"{path}.{parameter} has no part in the result"


FAULTS = {
    "no bias": ["gpt_oss", "openai_privacy_filter"],
    "no norm": ["muse_spark"],
    "silu gate": [
        "deepseek_v4",
        "diffusion_gemma",
        "gemma4",
        "glm5_next",
        "gpt_oss",
        "hy_v4",
        "hy_v4_vl",
        "inkling2",
        "inkling2_loop",
        "minimax_m3_vl",
        "openai_privacy_filter",
    ],
}


CLAMPED = "gate_limit={limit}, up_limit={limit}"
GATES = {
    "deepseek_v4": f"swiglu({CLAMPED})",
    "diffusion_gemma": "geglu_tanh",
    "glm5_next": f"swiglu({CLAMPED})",
    "gpt_oss": f"swiglu(interleaved, alpha=1.702, {CLAMPED}, up_offset=1.0)",
    "hy_v4": f"swiglu({CLAMPED})",
    "inkling2": None,
    "minimax_m3_vl": f"swiglu(alpha=1.702, {CLAMPED}, up_offset=1.0)",
    "muse_spark": None,
    "nemotron_h": "relu2",
    "openai_privacy_filter": f"swiglu(alpha=1.702, {CLAMPED}, up_offset=1.0)",
    "step3p7": "swiglu(gate_limit=1.278464542761074, up_limit=1.0)",  # silu(1.278...) = 1
}
"""What runs inside the kernels; None where the gate, or a norm behind it, does not."""


@pytest.mark.parametrize("name", slow_but_for(["gpt_oss", "step3p7"], GATES))
def test_what_is_fused(name, model):
    limits = {
        float(getattr(module, "limit", getattr(module, "swiglu_limit", 0))) for module in experts_of(model, name).values()
    }
    expected = {GATES[name] and GATES[name].format(limit=limit) for limit in limits}
    assert {layer.activation for layer in patch_huggingface(model).layers} == expected


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0.5, 100.0, 20000.0])
@pytest.mark.parametrize("name", ["gpt_oss", "step3p7"])
def test_a_limit_however_large(name, limit, model):
    """A probe that never reaches it would take the gate for one without."""
    for module in experts_of(model, name).values():
        module.limit = limit
    handle = patch_huggingface(model)
    assert all(f"up_limit={limit}" in str(layer.activation) for layer in handle.layers)


@pytest.mark.parametrize("name", ["gpt_oss", "step3p7"])
def test_a_limit_that_changes_after_the_patch(name, model):
    given = inputs(model, name)
    handle = patch_huggingface(model)
    for module in experts_of(model, name).values():
        module.limit *= 0.5
    ours = step(model, given)
    before = {layer.activation for layer in handle.layers}
    assert {layer.activation for layer in patch_huggingface(model).layers}.isdisjoint(before)
    assert_same_step(step(model, given), ours)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fault"), [(name, fault) for fault, names in FAULTS.items() for name in names])
def test_a_fault_shows(name, fault, model):
    expected = step(model, inputs(model, name))
    with computed_by(model, partial(plain, fault=fault)):
        ours = step(model, inputs(model, name))
    assert difference(ours["result"], expected["result"]) > 1e-2


@pytest.mark.parametrize("name", slow_but_for(QUICK, FAMILIES))
def test_experts_matter(name, model):
    expected = step(model, inputs(model, name))
    experts = experts_of(model, name)
    assert len(experts) == FAMILIES[name].layers
    for module in experts.values():
        for parameter in module.parameters():
            nn.init.zeros_(parameter)
    assert difference(step(model, inputs(model, name))["result"], expected["result"]) > 0.05


@pytest.mark.slow
def test_every_class_of_experts_is_in_a_tiny_model():
    """A family that a release of transformers adds has a row, or a reason in `UNBUILT`."""
    assert folders().keys() <= {family.folder or name for name, family in FAMILIES.items()} | UNBUILT.keys()
    names = [name for name in DECORATED if missing(FAMILIES[name]) is None]
    assert {type(module) for name in names for module in experts_of(build(name), name).values()} == experts_classes()


# -------------------------------------------------------------------- experts alone


def run_alone(module: nn.Module, expert_ids: Tensor, kept: Tensor | None = None) -> dict[str, Tensor | None]:
    """An experts module called directly: its result, and every gradient. Slots that are not `kept` have the weight zero."""
    generator = torch.Generator().manual_seed(4)
    up = module.gate_up_proj if module.has_gate else module.up_proj
    num_tokens, hidden_size = len(expert_ids), up.shape[1 if module.is_transposed else 2]
    x, grad = torch.randn(2, num_tokens, hidden_size, generator=generator).to(up)
    x.requires_grad_()
    weights = torch.rand(expert_ids.shape, generator=generator).to(up).requires_grad_()
    module.zero_grad()
    y = module(x, expert_ids, weights if kept is None else weights * kept)
    y.backward(grad)
    assert y.dtype == x.dtype
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad} | {
        key: value.grad for key, value in module.named_parameters()
    }


def assert_experts_agree(model: nn.Module, name: str, others: Callable[[], AbstractContextManager]) -> None:
    """Experts inside `others()` agree with eager ones: one gets no token, one a token twice, and some ids are not here."""
    for module in {type(module): module for module in experts_of(model, name).values()}.values():
        num_experts = len(module.down_proj)
        ids = torch.randint(num_experts - 1, (11, 3), generator=torch.Generator().manual_seed(5)).to(DEVICE)
        ids[0] = 2
        kept = (torch.rand(ids.shape, generator=torch.Generator().manual_seed(6)) < 0.8).to(DEVICE)
        assert not kept.all()
        expected, expected_kept = run_alone(module, ids), run_alone(module, ids, kept)
        with others():
            assert_same_step(run_alone(module, ids), expected)
            for absent in (num_experts, num_experts + 100, -1):
                ours = run_alone(module, ids.where(kept, absent))
                assert_same_step(ours, expected_kept)
                assert not ours["weights"][~kept].any()
                assert not ours["down_proj"][-1].any()


@pytest.mark.parametrize("name", slow_but_for(QUICK, DECORATED))
def test_plain_experts_agree_alone(name, model):
    assert_experts_agree(model, name, partial(computed_by, model, plain))


# -------------------------------------------------------------------- this package


@pytest.mark.case("Q2")
@pytest.mark.parametrize("name", slow_but_for(QUICK, FAMILIES))
def test_patched_experts_agree_with_eager(name, model, monkeypatch):
    given, experts, reached, sorted_rows = inputs(model, name), experts_of(model, name), [], []
    for module in experts.values():
        module.register_forward_hook(lambda module, *_: reached.append(module))
    expected = step(model, given)
    assert set(reached) == set(experts.values())
    eager_calls = len(reached)
    from_ids = Topology.from_ids
    monkeypatch.setattr(Topology, "from_ids", lambda *args, **named: sorted_rows.append(args) or from_ids(*args, **named))
    with patch_huggingface(model, backend="torch") as handle:
        assert len(handle.layers) == len(experts)
        ours = step(model, given)
    assert len(sorted_rows) == eager_calls, "each call of experts is one of this package"
    assert_agrees_with_eager(model, name, given, ours, expected, partial(patch_huggingface, backend="torch"))
    sorted_rows.clear()
    assert_same_step(step(model, given), expected)
    assert not sorted_rows, "a restored model is as it was"


@pytest.mark.parametrize("name", slow_but_for(QUICK, DECORATED))
def test_patched_experts_agree_alone(name, model):
    assert_experts_agree(model, name, partial(patch_huggingface, model, backend="torch"))


COMPUTED_IN_FP32 = {"openai_privacy_filter"}
"""Eager experts that leave the dtype of their weights, which no other implementation does: judged by plain torch instead."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", slow_but_for(QUICK, DECORATED))
def test_patched_experts_in_low_precision(name, dtype, model):
    """As exact as eager experts: of all families, with the kernels where there is a GPU."""
    backend = "triton" if HAS_CUDA else "torch"
    for module in {type(module): module for module in experts_of(model, name).values()}.values():
        module.to(dtype)
        ids = torch.randint(len(module.down_proj), (11, 2), generator=torch.Generator().manual_seed(5)).to(DEVICE)
        exact = run_alone(copy.deepcopy(module).double(), ids)
        with computed_by(model, plain) if name in COMPUTED_IN_FP32 else nullcontext():
            eagers = run_alone(module, ids)
        with patch_huggingface(module, backend=backend):
            ours = run_alone(module, ids)
        for key, value in ours.items():
            assert_within_budget(key, value, exact[key], eagers[key], dtype)


@pytest.mark.parametrize("name", slow_but_for(QUICK, sorted(set(FAMILIES) - set(DECORATED))))
def test_adapters_survive_copies_and_leave_nothing_behind(name, model):
    given, before = inputs(model, name), [dict(vars(module)) for module in model.modules()]
    expected = step(build(name, DEVICE), given)  # a model that has run holds hooks of transformers that cannot be pickled
    handle = patch_huggingface(model, backend="torch")
    assert len(handle.layers) == FAMILIES[name].layers
    assert patch_huggingface(model, backend="torch").layers == handle.layers, "patching twice is patching once"
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    handle.restore()
    assert [dict(vars(module)) for module in model.modules()] == before
    for duplicate in copies:
        adapted = [module for module in duplicate.modules() if "forward" in vars(module)]
        assert len(adapted) == FAMILIES[name].layers
        assert all(module.forward.args == (module,) for module in adapted), "a copy computes with its own weights"
        assert_same_step(step(duplicate, given), expected)


@pytest.mark.parametrize("name", ["llama4"])
def test_a_forward_that_somebody_else_replaced_is_refused(name, model):
    module = next(module for module in model.modules() if type(module).__name__ == "Llama4TextMoe")
    module.forward = module.forward
    with pytest.raises(UnsupportedModelError, match="the forward of this Llama4TextMoe was replaced"):
        patch_huggingface(model)
