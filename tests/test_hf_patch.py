"""What a patch is: its handle and report, copies, nesting; and the life of a patched model, from saving to jitter."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import Tensor

from blocksparse_moe import patch_huggingface

from .support import DEVICE, HAS_CUDA, each_backend_slowly

transformers = pytest.importorskip("transformers", minversion="5.9")
from transformers import MixtralForCausalLM  # noqa: E402

from .mixtral_support import (  # noqa: E402
    assert_close,
    config,
    experts_of,
    mixtral,
    named_experts,
    step,
    tokens,
)

# -------------------------------------------------------------------- the handle


def test_the_report_names_every_layer():
    model = mixtral()
    handle = patch_huggingface(model)
    backend = "triton (the default on CUDA)" if HAS_CUDA else "torch (the default on cpu)"
    lines = handle.report.splitlines()
    assert len(lines) == len(handle.layers) == 2
    for line, (name, _) in zip(lines, named_experts(model), strict=True):
        assert line == f"{name}: MixtralExperts, swiglu fused, backend {backend}"
    assert "backend torch (asked for)" in patch_huggingface(model, backend="torch").report
    bare = patch_huggingface(experts_of(mixtral())[0])
    assert bare.report == f"the module itself: MixtralExperts, swiglu fused, backend {backend}"


def test_restore_and_context_manager(calls):
    model = mixtral()
    before = [dict(vars(module)) for module in experts_of(model)]
    keys, expected = list(model.state_dict()), step(model)
    handle = patch_huggingface(model)
    assert list(model.state_dict()) == keys
    step(model)
    assert len(calls) == 2
    handle.restore()
    assert [vars(module) for module in experts_of(model)] == before
    assert all(module.config is model.config for module in experts_of(model))
    assert all(torch.equal(value, expected[name]) for name, value in step(model).items())
    handle.restore()
    assert len(calls) == 2

    with patch_huggingface(model) as inside:
        assert len(inside.layers) == 2
        step(model)
    step(model)
    assert len(calls) == 4
    with pytest.raises(KeyError), patch_huggingface(model):
        raise KeyError
    step(model)
    assert len(calls) == 4


@pytest.mark.case("Q5")
def test_patching_twice_is_patching_once(calls):
    model = mixtral()
    before = [dict(vars(module)) for module in experts_of(model)]
    keys = list(model.state_dict())
    first = patch_huggingface(model)
    patched = [dict(vars(module)) for module in experts_of(model)]
    with patch_huggingface(model) as second:
        assert [vars(module) for module in experts_of(model)] == patched
        assert second.report == first.report
    assert [vars(module) for module in experts_of(model)] == patched
    assert list(model.state_dict()) == keys
    step(model)
    assert len(calls) == 2
    first.restore()
    assert [vars(module) for module in experts_of(model)] == before


def test_patches_nest(calls):
    """Each handle restores the state before it; an outer one takes those inside along."""
    model = mixtral()
    before = [dict(vars(module)) for module in experts_of(model)]
    outer = patch_huggingface(model, backend="torch")
    once = step(model)
    with patch_huggingface(model, backend="auto") as inner:
        assert_close(step(model), once)
    assert_close(step(model), once)
    assert calls == ["torch"] * 2 + ["auto"] * 2 + ["torch"] * 2
    inner.restore()
    step(model)
    assert calls[6:] == ["torch"] * 2, "restored twice is restored once"
    inner = patch_huggingface(model, backend="auto")
    for handle in (outer, inner, outer):
        handle.restore()
        assert [vars(module) for module in experts_of(model)] == before


def test_models_that_share_a_config_stay_independent(calls):
    shared = config()
    patched, other = MixtralForCausalLM(shared).to(DEVICE), MixtralForCausalLM(shared).to(DEVICE)
    patch_huggingface(patched)
    other(tokens())
    assert calls == []
    assert shared._experts_implementation == "eager"
    assert other.config._experts_implementation == "eager"
    patched(tokens())
    assert len(calls) == 2
    later = MixtralForCausalLM(shared).to(DEVICE)
    later(tokens())
    assert len(calls) == 2


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_copies_of_a_patched_model(duplicate, calls):
    model = mixtral()
    handle = patch_huggingface(model, backend="torch")
    twin = duplicate(model)
    expected = step(model)
    handle.restore()
    calls.clear()
    assert_close(step(twin), expected)
    assert calls == ["torch"] * 2
    step(model)
    assert len(calls) == 2
    patch_huggingface(twin, backend="auto").restore()
    step(twin)
    assert calls[2:] == ["torch"] * 2, "a copy is as it was before a handle of its own"


def test_an_unpatched_copy_of_a_restored_model(calls):
    model = mixtral()
    patch_huggingface(model).restore()
    copy.deepcopy(model)(tokens())
    assert calls == []


# -------------------------------------------------------------------- the life of a model


@pytest.mark.case("Q3")
def test_save_and_reload(tmp_path, calls):
    model = mixtral()
    keys = set(model.state_dict())
    patch_huggingface(model)
    assert set(model.state_dict()) == keys
    expected = model(tokens()).logits
    model.save_pretrained(tmp_path)
    assert "blocksparse" not in (tmp_path / "config.json").read_text()
    calls.clear()
    reloaded = MixtralForCausalLM.from_pretrained(tmp_path, experts_implementation="blocksparse").to(DEVICE)
    assert torch.equal(reloaded(tokens()).logits, expected)
    assert len(calls) == 2
    eager = MixtralForCausalLM.from_pretrained(tmp_path, experts_implementation="eager").to(DEVICE)
    torch.testing.assert_close(eager(tokens()).logits, expected, rtol=1e-5, atol=1e-5)
    assert len(calls) == 2


def test_greedy_generation(calls):
    model = mixtral().eval()
    generate = partial(model.generate, tokens(), attention_mask=torch.ones_like(tokens()), max_new_tokens=6, do_sample=False)
    expected = generate()
    with patch_huggingface(model):
        assert torch.equal(generate(), expected)
    assert expected.shape == (2, 15)
    assert len(calls) == 6 * 2  # prefill and every decoded token, in both layers


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_gradient_checkpointing(use_reentrant, calls):
    model = mixtral().train()
    expected = step(model)
    with patch_huggingface(model):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        if use_reentrant:
            model.enable_input_require_grads()
        ours = step(model)
    assert len(calls) == 4, "every layer runs again in the backward"
    assert_close(ours, expected)


@pytest.mark.slow
def test_compile(calls):
    torch.compiler.reset()
    model = mixtral()
    patch_huggingface(model)
    expected = step(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(step(model, compiled), expected)


@each_backend_slowly
def test_autocast(backend):
    dtype = torch.float16 if backend == "triton" and not HAS_CUDA else torch.bfloat16
    model = mixtral()
    exact = step(model)

    def narrow() -> dict[str, Tensor]:
        with torch.autocast(DEVICE.type, dtype=dtype):
            return step(model)

    expected = narrow()
    patch_huggingface(model, backend=backend)
    ours = narrow()
    for name, value in ours.items():
        assert value.dtype == expected[name].dtype
        scale = exact[name].abs().max()
        error, eager_error = ((result[name] - exact[name]).abs().max() / scale for result in (ours, expected))
        assert error <= 2 * (eager_error + torch.finfo(dtype).eps), f"{name}: {error:.2e}, eager's own {eager_error:.2e}"


def test_jitter(calls):
    """Mixtral's jitter multiplies the hidden states in place, before the experts."""
    model = mixtral(router_jitter_noise=0.1).train()
    torch.manual_seed(5)
    expected = step(model)
    patch_huggingface(model)
    torch.manual_seed(5)
    assert_close(step(model), expected)


def test_frozen_experts():
    """As when only attention is fine-tuned."""
    model = mixtral()
    for module in experts_of(model):
        module.requires_grad_(False)
    model.zero_grad()
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    patch_huggingface(model)
    model.zero_grad()
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    ours = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert_close(ours, expected)
