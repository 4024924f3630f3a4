"""What people do with a model, patched against unpatched, on six families that differ in router, layout and gate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from blocksparse_moe import patch_huggingface, register_huggingface

from .support import DEVICE

transformers = pytest.importorskip("transformers", minversion="5.9")

from .hf_families import build, inputs, slow_but_for  # noqa: E402
from .test_hf_families import assert_same_step, step  # noqa: E402

families = pytest.mark.parametrize(
    "name", slow_but_for(["mixtral"], ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe", "glm4_moe"])
)


@pytest.fixture
def model(name: str) -> nn.Module:
    return build(name, DEVICE)


def same(model: nn.Module, run: Callable[[], Tensor | dict[str, Tensor | None]]) -> None:
    """`run` gives the same on the model as it is and on the patched one."""
    expected = run()
    with patch_huggingface(model, backend="torch"):
        found = run()
    if isinstance(found, Tensor) and not found.is_floating_point():
        assert torch.equal(found, expected)
    elif isinstance(found, Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    else:
        assert_same_step(found, expected)


@families
@pytest.mark.parametrize(
    "options", [dict(do_sample=False), dict(do_sample=True, top_k=0), dict(num_beams=3)], ids=["greedy", "sampled", "beams"]
)
def test_generation(name, options, model):
    """Prefill and one-token steps through the cache."""
    prompt = inputs(model, name)["input_ids"]
    model.config.output_router_logits = False  # before 5.17, the balancing loss fails beside a cache

    def run() -> Tensor:
        torch.manual_seed(7)
        return model.generate(input_ids=prompt, max_new_tokens=6, min_new_tokens=6, use_cache=True, **options)

    assert run().shape == (2, prompt.shape[1] + 6)
    same(model, run)


@families
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(name, use_reentrant, model):
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    same(model, lambda: step(model, inputs(model, name)))


@families
def test_save_and_load(name, model, tmp_path: Path):
    given = inputs(model, name)
    expected, keys = model(**given).logits, list(model.state_dict())
    with patch_huggingface(model, backend="torch"):
        model.save_pretrained(tmp_path)
        assert list(model.state_dict()) == keys
    loaded = type(model).from_pretrained(tmp_path, experts_implementation="eager").to(DEVICE).eval()
    assert loaded.config.to_dict().keys() == model.config.to_dict().keys()
    torch.testing.assert_close(loaded(**given).logits, expected)
    same(loaded, lambda: loaded(**given).logits)


@families
def test_resized_embeddings(name, model):
    given = inputs(model, name)
    with patch_huggingface(model, backend="torch"):
        model.resize_token_embeddings(53)
        patched = model(**given).logits
    assert patched.shape[-1] == 53
    torch.testing.assert_close(patched, model(**given).logits, rtol=1e-5, atol=1e-5)


@families
def test_left_padding(name, model):
    given = inputs(model, name)
    mask = torch.ones_like(given["input_ids"])
    mask[0, :3] = 0
    same(model, lambda: step(model, {**given, "attention_mask": mask}))


@families
def test_packed_sequences(name, model):
    ids = inputs(model, name)["input_ids"].view(1, -1)
    positions = torch.arange(7, device=DEVICE).repeat(2)[None]
    same(model, lambda: step(model, {"input_ids": ids, "labels": ids, "position_ids": positions}))


@families
def test_autocast(name, model):
    given = inputs(model, name)

    def run() -> Tensor:
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            return model(**given).loss

    expected = run()
    with patch_huggingface(model, backend="torch"):
        torch.testing.assert_close(run(), expected, rtol=2e-2, atol=0)


@pytest.mark.slow
@families
def test_compile(name, model):
    given = inputs(model, name)
    expected = step(model, given)
    with patch_huggingface(model, backend="torch"):
        compiled = torch.compile(model, backend="aot_eager")
        found = step(compiled, given)
    assert_same_step({key.removeprefix("_orig_mod."): value for key, value in found.items()}, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_compile_by_name_alone(name, model):
    """Without a patch: as `from_pretrained(..., experts_implementation="blocksparse")` has it."""
    given = inputs(model, name)
    expected = step(model, given)
    register_huggingface()
    model.set_experts_implementation("blocksparse")
    torch.compiler.reset()
    found = step(torch.compile(model, backend="aot_eager"), given)
    assert_same_step({key.removeprefix("_orig_mod."): value for key, value in found.items()}, expected)


@pytest.mark.slow
@families
@pytest.mark.parametrize("first", ["patch", "offload"])
def test_offloaded_weights(name, first, model, tmp_path: Path):
    """accelerate keeps them on the disk and brings those of a module in when it runs: at the patch they are on meta."""
    accelerate = pytest.importorskip("accelerate")
    given = inputs(model, name)
    with torch.no_grad():
        expected = model(**given).logits
        if first == "patch":
            patch_huggingface(model)
        accelerate.disk_offload(model, tmp_path, execution_device=DEVICE)
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        if first == "offload":
            assert "backend auto (chosen where it runs; its weights are on meta now)" in patch_huggingface(model).report
        torch.testing.assert_close(model(**given).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama4", "jetmoe"])
def test_hooks_over_a_patch_outlive_it(name, model):
    """accelerate's, put over the forward of an adapter: they stay when the patch goes, and leave a whole model when they go."""
    hooks = pytest.importorskip("accelerate.hooks")
    given, calls = inputs(model, name), []

    class Counting(hooks.ModelHook):
        def pre_forward(self, module, *args, **named):
            calls.append(module)
            return args, named

    expected = step(model, given)
    handle = patch_huggingface(model)
    patched = [module for module in model.modules() if "forward" in vars(module)]
    for module in patched:
        hooks.add_hook_to_module(module, Counting())
    assert_same_step(step(model, given), expected)
    handle.restore()
    assert_same_step(step(model, given), expected)
    assert len(calls) == 2 * len(patched) > 0
    for module in patched:
        hooks.remove_hook_from_module(module)
    assert_same_step(step(model, given), expected)
