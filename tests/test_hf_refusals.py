"""Experts chosen by name, and what is refused, with its reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from blocksparse_moe import patch_huggingface, register_huggingface
from blocksparse_moe.integrations import huggingface
from blocksparse_moe.integrations.huggingface import UnsupportedModelError

from .support import DEVICE

transformers = pytest.importorskip("transformers", minversion="5.9")
from transformers import MixtralForCausalLM  # noqa: E402
from transformers.integrations import moe  # noqa: E402

from .mixtral_support import (  # noqa: E402
    LENGTH,
    SIZES,
    assert_close,
    config,
    experts_of,
    mixtral,
    step,
    tokens,
)


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers as it is before this package has registered itself."""
    names = moe.ExpertsInterface._global_mapping
    registered = names.pop(huggingface.NAME, None)
    yield
    names.pop(huggingface.NAME, None)
    if registered is not None:
        names[huggingface.NAME] = registered


# -------------------------------------------------------------------- the name


def test_register(unregistered):
    with pytest.raises(ValueError, match="blocksparse"):
        MixtralForCausalLM._from_config(config(experts_implementation=None), experts_implementation="blocksparse")
    register_huggingface()
    registered = dict(moe.ExpertsInterface._global_mapping)
    register_huggingface()
    assert dict(moe.ExpertsInterface._global_mapping) == registered
    assert "blocksparse" in moe.ALL_EXPERTS_FUNCTIONS


def test_the_name_in_a_config(calls):
    register_huggingface()
    model = MixtralForCausalLM._from_config(config(), experts_implementation="blocksparse").to(DEVICE)
    assert model.config._experts_implementation == "blocksparse"
    ours = step(model)
    assert calls == ["auto"] * 2
    model.set_experts_implementation("eager")
    assert_close(ours, step(model))
    model.set_experts_implementation("blocksparse")
    step(model)
    assert calls == ["auto"] * 4


def test_an_old_transformers_is_refused(monkeypatch, unregistered):
    from importlib import metadata

    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "5.8.1" if name == "transformers" else version(name))
    with pytest.raises(ImportError, match=r"needs transformers >= 5\.9; found transformers 5\.8\.1"):
        patch_huggingface(nn.Linear(2, 2))
    assert "blocksparse" not in moe.ALL_EXPERTS_FUNCTIONS


# -------------------------------------------------------------------- what is refused


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, **LENGTH, intermediate_size=20))


def qwen2(**options) -> nn.Module:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    sizes = dict(intermediate_size=20, moe_intermediate_size=12, shared_expert_intermediate_size=12)
    return Qwen2MoeForCausalLM._from_config(
        Qwen2MoeConfig(**SIZES, **LENGTH, **sizes, num_experts=4, num_experts_per_tok=2), **options
    )


def qwen3(**options) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = dict(intermediate_size=20, moe_intermediate_size=12, head_dim=12)
    return Qwen3MoeForCausalLM._from_config(
        Qwen3MoeConfig(**SIZES, **LENGTH, **sizes, num_experts=4, num_experts_per_tok=2), **options
    )


def switch() -> nn.Module:
    from transformers import SwitchTransformersConfig, SwitchTransformersEncoderModel

    sizes = dict(vocab_size=48, d_model=24, d_kv=12, d_ff=20, num_layers=2, num_sparse_encoder_layers=1, num_heads=2)
    return SwitchTransformersEncoderModel(SwitchTransformersConfig(**sizes, num_experts=4))


@pytest.mark.case("Q4")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (llama, "LlamaForCausalLM has no mixture-of-experts layer"),
        (switch, "SwitchTransformersEncoderModel has experts .*: SwitchTransformersExperts does not dispatch through"),
        (lambda: nn.Linear(2, 2), "Linear has no mixture-of-experts layer"),
    ],
    ids=["dense", "Switch", "not a model"],
)
def test_other_models_are_refused_and_left_alone(make, message):
    model = make()
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(UnsupportedModelError, match=f"patch_huggingface: {message}"):
        patch_huggingface(model)
    assert [vars(module) for module in model.modules()] == before
    assert isinstance(UnsupportedModelError("x"), NotImplementedError)


@pytest.mark.parametrize("make", [qwen2, qwen3])
def test_the_name_in_the_config_of_another_family(make, calls):
    register_huggingface()
    torch.manual_seed(0)
    expected = make(experts_implementation="eager")(tokens().cpu()).logits
    torch.manual_seed(0)
    model = make(experts_implementation="blocksparse")
    torch.testing.assert_close(model(tokens().cpu()).logits, expected)
    assert len(calls) == 2


def test_not_strict_leaves_alone_what_cannot_be_computed():
    model = mixtral()
    first, second = experts_of(model)
    second.gate_up_proj = nn.Parameter(second.gate_up_proj.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match="quantised"):
        patch_huggingface(model)
    handle = patch_huggingface(model, strict=False)
    assert [layer.name for layer in handle.layers] == ["model.layers.0.mlp.experts"]
    assert [layer.name for layer in handle.skipped] == ["model.layers.1.mlp.experts"]
    assert "model.layers.1.mlp.experts: left alone, its weights are torch.float8_e4m3fn, a quantised format" in handle.report
    assert first.config is not model.config and second.config is model.config
    first.gate_up_proj = second.gate_up_proj
    with pytest.raises(UnsupportedModelError, match="quantised"):
        patch_huggingface(model, strict=False)


def test_not_strict_leaves_alone_what_has_no_precision(monkeypatch):
    model = mixtral()
    first, second = experts_of(model)
    monkeypatch.setattr(second, "_apply_gate", lambda pre: second.act_fn(pre.chunk(2, dim=-1)[0].clamp(max=0.5)), raising=False)
    with pytest.raises(
        UnsupportedModelError, match=r"cannot be computed here \(model.layers.1.mlp.experts: its gate is its own"
    ):
        patch_huggingface(model, precision="mxfp8")
    assert first.config is model.config
    handle = patch_huggingface(model, precision="mxfp8", strict=False)
    assert [layer.name for layer in handle.layers] == ["model.layers.0.mlp.experts"]
    assert "model.layers.1.mlp.experts: left alone, its gate is its own and runs between two products" in handle.report
    assert first.config is not model.config and second.config is model.config


def test_not_strict_leaves_alone_what_the_backend_refuses():
    model = mixtral()
    first, second = experts_of(model)
    second.double()
    with pytest.raises(NotImplementedError, match=r"'triton' computes in .* got torch.float64\. The nearest that runs here is"):
        patch_huggingface(model, backend="triton")
    handle = patch_huggingface(model, backend="triton", strict=False)
    assert [layer.name for layer in handle.layers] == ["model.layers.0.mlp.experts"]
    assert "layers.1.mlp.experts: left alone, backend 'triton' computes in fp32, fp16 and bf16; got" in handle.report
    first.double()
    with pytest.raises(UnsupportedModelError, match=r"has experts that cannot be computed here .*backend 'triton' computes in"):
        patch_huggingface(model, backend="triton", strict=False)


def test_not_strict_leaves_alone_what_is_of_another_dtype():
    model = mixtral().bfloat16()
    model.model.layers[0].mlp.experts.double()
    with pytest.raises(ValueError, match=r"the experts compute in torch\.float64"):
        patch_huggingface(model, precision="bf16")
    handle = patch_huggingface(model, precision="bf16", strict=False)
    assert [layer.name for layer in handle.skipped] == ["model.layers.0.mlp.experts"] and handle.layers
    handle.restore()


@pytest.mark.parametrize(
    "options", [dict(precision="mxfp8"), dict(backend="te"), dict(precision="mxfp8", strict=False)], ids=str
)
def test_partitioned_weights_are_looked_at_later(options):
    """As sharded training leaves them: flat, and empty until they are gathered."""
    model = mixtral()
    for layer in model.model.layers:
        for parameter in layer.mlp.experts.parameters():
            parameter.data = torch.empty(0)
    handle = patch_huggingface(model, **options)
    assert "chosen when its partitioned weights are gathered" in handle.report and not handle.skipped
    handle.restore()


def test_a_flag_of_a_newer_transformers_is_refused(monkeypatch):
    """A release may add a flag that changes what experts compute, as 5.21 did: harmless at its default only."""
    decorator = moe.use_experts_implementation

    def newer(experts_class=None, *, has_scale: bool = False, is_concatenated: bool = True, is_transposed: bool = False,
              has_bias: bool = False, has_gate: bool = True, has_post_expert_norm: bool = False):  # fmt: skip
        return decorator(experts_class)

    monkeypatch.setattr(moe, "use_experts_implementation", newer)
    model = mixtral()
    for module in experts_of(model):
        module.has_scale = False
    patch_huggingface(model).restore()
    experts_of(model)[0].has_scale = True
    with pytest.raises(UnsupportedModelError, match="has_scale"):
        patch_huggingface(model)


@pytest.mark.parametrize("where", ["class", "module"])
def test_a_gate_of_its_own_runs_in_torch(monkeypatch, where, calls):
    model = mixtral()

    def gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=0.5)) * up

    module = experts_of(model)[0]
    before = step(model)
    if where == "class":
        monkeypatch.setattr(type(module), "_apply_gate", gate)
    else:
        module._apply_gate = gate.__get__(module)
    # eager experts do not call it: what they should compute is that of transformers' own other implementation
    model.set_experts_implementation("grouped_mm")
    expected = step(model)
    assert (expected["logits"] - before["logits"]).abs().max() > 1e-2
    handle = patch_huggingface(model)
    assert handle.layers[0].activation is None
    assert_close(step(model), expected)


def test_quantised_weights_are_refused():
    model = mixtral()
    (module, *_) = experts_of(model)
    module.gate_up_proj = nn.Parameter(module.gate_up_proj.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=r"its weights are torch\.float8_e4m3fn, a quantised format"):
        patch_huggingface(model)


@pytest.mark.parametrize("model", ["mixtral", None], ids=str)
def test_what_is_no_module_is_refused(model):
    with pytest.raises(TypeError, match=r"patch_huggingface: model must be of type Module; got .*\. Load it first"):
        patch_huggingface(model)


def test_backends_by_name():
    model = mixtral()
    with pytest.raises(ValueError, match="backend: 'fast' is not known; choose one of auto, triton, torch"):
        patch_huggingface(model, backend="fast")
    refused = (
        r"backend 'triton' computes in fp32, fp16 and bf16; got torch.float64\. The nearest that runs here is backend='auto'"
    )
    with pytest.raises(NotImplementedError, match=refused):
        patch_huggingface(model.double(), backend="triton")
    assert all(module.config is model.config for module in experts_of(model))


def test_bf16_of_a_model_in_fp32_and_in_fp64():
    model = mixtral()
    with patch_huggingface(model, precision="bf16") as handle:
        assert "backend none but under autocast" in handle.report
    with pytest.raises(ValueError, match=r"the experts compute in torch.float64\. Cast the layer, as by .bfloat16\(\)\.$"):
        patch_huggingface(model.double(), precision="bf16")


def test_derived_experts_classes_are_known():
    """PEFT and torch.nn.utils.parametrize replace the class of a module by one that is derived from it."""
    model = mixtral()
    expected = step(model)

    class Identity(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight

    (module, *_) = experts_of(model)
    nn.utils.parametrize.register_parametrization(module, "down_proj", Identity())
    assert type(module).__name__ != "MixtralExperts"
    patch_huggingface(model)
    ours = step(model)
    ours = {name.replace("parametrizations.", "").replace(".original", ""): value for name, value in ours.items()}
    assert_close(ours, expected)
