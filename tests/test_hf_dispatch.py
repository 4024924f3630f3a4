"""A patch counts what will really run: modules whose forward is somebody else's are refused, and copies run elsewhere."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers", minversion="5.9")

from blocksparse_moe import patch_huggingface, supports
from blocksparse_moe.integrations.huggingface import UnsupportedModelError

from .hf_families import FAMILIES, build, experts_of, inputs, missing


def refused(model, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        patch_huggingface(model)
    assert not supports(model)


def family(name: str):
    if reason := missing(FAMILIES[name]):
        pytest.skip(reason)
    return build(name)


def nothing(self, hidden_states, *_):
    return torch.zeros_like(hidden_states)


def test_a_derived_class_with_a_forward_of_its_own():
    model = family("mixtral")
    for experts in experts_of(model, "mixtral").values():
        experts.__class__ = type("Mine", (type(experts),), {"forward": nothing})
    refused(model, "the forward of this Mine was replaced by something else")


def test_a_derived_class_without_one():
    """As parametrizations and FSDP2 derive."""
    model = family("mixtral")
    for experts in experts_of(model, "mixtral").values():
        experts.__class__ = type("Derived", (type(experts),), {})
    assert len(patch_huggingface(model).layers) == len(experts_of(model, "mixtral"))


@pytest.mark.parametrize("place", ["instance", "class"])
def test_a_forward_that_was_put_there(place, monkeypatch):
    model = family("mixtral")
    for experts in experts_of(model, "mixtral").values():
        if place == "instance":
            experts.forward = lambda x, *_: torch.zeros_like(x)
        else:
            monkeypatch.setattr(type(experts), "forward", nothing)
    refused(model, "the forward of this MixtralExperts was replaced by something else")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["derived", "class", "part"])
def test_an_adapter_overrides_nobody(place, monkeypatch):
    model = family("llama4")
    for module in model.modules():
        if type(module).__name__ != "Llama4TextMoe":
            continue
        if place == "derived":
            module.__class__ = type("Mine", (type(module),), {"forward": nothing})
        elif place == "class":
            monkeypatch.setattr(type(module), "forward", nothing)
        else:
            module.experts.forward = lambda x: 0 * x
    whose = {"derived": "this Mine", "class": "this Llama4TextMoe", "part": "its experts"}[place]
    refused(model, f"the forward of {whose} was replaced by something else")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "llama4"])
def test_a_pickled_model_runs_in_another_process(name, tmp_path):
    model = family(name).eval()
    ids = inputs(model, name)["input_ids"]
    patch_huggingface(model)
    torch.save(model, tmp_path / "model.pt")  # before transformers hangs hooks into it, which cannot be pickled
    with torch.no_grad():
        torch.save((ids, model.model(ids).last_hidden_state), tmp_path / "expected.pt")
    code = (
        "import sys, torch\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "ids, expected = torch.load(sys.argv[2], weights_only=False)\n"
        "with torch.no_grad(): found = model.model(ids).last_hidden_state\n"
        "assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)\n"
        "import blocksparse_moe\n"
        "blocksparse_moe.unpatch_huggingface(model)\n"
        "with torch.no_grad(): model.model(ids)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "model.pt"), str(tmp_path / "expected.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_gradient_of_second_order_says_what_to_do():
    model = family("mixtral")
    model.set_attn_implementation("eager")  # the other ones have no second order either
    given = inputs(model, "mixtral")
    embedded = model.get_input_embeddings()(given["input_ids"]).detach().requires_grad_()
    handle = patch_huggingface(model)
    loss = model(inputs_embeds=embedded).logits.square().mean()
    (grad,) = torch.autograd.grad(loss, embedded, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"of a patched model call handle.restore\(\)"):
        grad.square().sum().backward()
    assert repr(handle) == f"PatchHandle\n{handle.report}"
