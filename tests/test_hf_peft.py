"""PEFT on a patched model: adapters in attention, adapters on the stacked weights of experts, merging."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from blocksparse_moe import MoEConfig, dMoE, patch_huggingface
from blocksparse_moe.integrations.huggingface import UnsupportedModelError
from blocksparse_moe_kernels import torch_products

from .support import DEVICE

pytest.importorskip("transformers", minversion="5.9")
peft = pytest.importorskip("peft")

from .hf_families import build, inputs, slow_but_for  # noqa: E402
from .test_hf_families import assert_same_step, step  # noqa: E402

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
families = pytest.mark.parametrize("name", slow_but_for(["mixtral"], ["mixtral", "qwen3_moe", "gpt_oss"]))


def with_lora(model: nn.Module, **options) -> nn.Module:
    """The model with adapters that are not zero."""
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=4, **options))
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.fixture
def weight_gradients(monkeypatch) -> list[torch.Size]:
    """Shapes of the weight gradients that this package computed."""
    made: list[torch.Size] = []
    product = torch_products.dsd_transposed

    def counted(*args, **named) -> Tensor:
        result = product(*args, **named)
        made.append(result.shape)
        return result

    monkeypatch.setattr(torch_products, "dsd_transposed", counted)
    return made


@families
def test_frozen_experts_cost_no_weight_gradient(name, weight_gradients):
    model = with_lora(build(name, DEVICE), target_modules=["q_proj", "v_proj"])
    given = inputs(model, name)
    expected = step(model, given)
    assert sum(value is not None for value in expected.values()) > 4
    with patch_huggingface(model, backend="torch"):
        assert_same_step(step(model, given), expected)
    assert weight_gradients == []


@families
@pytest.mark.parametrize("order", ["patched first", "adapters first"])
def test_adapters_on_the_weights_of_experts(name, order, weight_gradients):
    options = dict(target_modules=["q_proj"], target_parameters=EXPERTS)
    given = inputs(build(name, DEVICE), name)
    expected = step(with_lora(build(name, DEVICE), **options), given)
    assert sum("experts" in key and value is not None and bool(value.any()) for key, value in expected.items()) >= 4
    model = build(name, DEVICE)
    if order == "patched first":
        patch_huggingface(model, backend="torch")
    model = with_lora(model, **options)
    if order == "adapters first":
        patch_huggingface(model, backend="torch")
    assert_same_step(step(model, given), expected)
    assert weight_gradients, "of the adapters, through the weights"


@families
def test_merged_adapters(name):
    model = with_lora(build(name, DEVICE), target_modules=["q_proj"], target_parameters=EXPERTS)
    given = inputs(model, name)

    def logits(of: Callable) -> Tensor:
        with torch.no_grad():
            return of(**given).logits

    expected = logits(model)
    with patch_huggingface(model, backend="torch"):
        merged = model.merge_and_unload()
        torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)


STACKED = {
    "jetmoe": ["mlp.input_linear.weight", "mlp.output_linear.weight"],
    "llama4": ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STACKED)
@pytest.mark.parametrize("patched_first", [True, False])
def test_adapters_on_stacked_weights_that_a_part_holds_are_refused(name, patched_first):
    """PEFT's wrapper acts when that part is called, and the weight that is read beside it has no adapter."""
    model = build(name, DEVICE)
    given = inputs(model, name)
    if patched_first:
        patch_huggingface(model)
    wrapped = with_lora(model, target_modules=[], target_parameters=STACKED[name])
    with pytest.raises(UnsupportedModelError, match="is wrapped by PEFT's ParamWrapper"):
        if patched_first:
            wrapped(**given)
        else:
            patch_huggingface(wrapped)


@pytest.mark.slow
def test_lora_of_a_dmoe():
    torch.manual_seed(0)
    model, x = nn.Sequential(dMoE(MoEConfig(8, 12, 4, init_std=0.5), device=DEVICE)), torch.randn(5, 8, device=DEVICE)
    before = model(x).detach()
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["0.experts.gate_up_proj", "0.experts.down_proj"])
    tuned = peft.get_peft_model(model, config)
    torch.testing.assert_close(tuned(x), before)  # adapters begin as nil
    trained = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    for parameter in trained:
        torch.nn.init.normal_(parameter, std=0.1)
    y = tuned(x)
    y.sum().backward()
    assert len(trained) == 4 and all(parameter.grad.any() for parameter in trained)
    torch.testing.assert_close(tuned.merge_and_unload()(x), y)
    assert not torch.allclose(y, before)
