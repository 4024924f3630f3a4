"""Mixtral with its experts computed here: equal to transformers' eager experts, in every situation that a model meets."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from blocksparse_moe import patch_huggingface, register_huggingface, unpatch_huggingface
from blocksparse_moe.integrations import huggingface
from blocksparse_moe.integrations.huggingface import UnsupportedModelError, experts
from blocksparse_moe_kernels import Topology, reference
from blocksparse_moe_kernels.activations import FUNCTIONS

from .support import DEVICE, HAS_CUDA, each_backend_slowly

transformers = pytest.importorskip("transformers", minversion="5.9")
from transformers import MixtralConfig, MixtralForCausalLM  # noqa: E402
from transformers.activations import ACT2FN  # noqa: E402
from transformers.integrations import moe  # noqa: E402

SIZES = dict(vocab_size=48, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
LENGTH = dict(max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None)
NUM_EXPERTS = 5


def config(**changes) -> MixtralConfig:
    sizes = dict(intermediate_size=20, num_local_experts=NUM_EXPERTS, num_experts_per_tok=2)
    return MixtralConfig(**{**SIZES, **LENGTH, **sizes, "experts_implementation": "eager", **changes})


def mixtral(**changes) -> MixtralForCausalLM:
    """A tiny model whose activations are of size one, so that experts matter in logits and gradients."""
    model = MixtralForCausalLM(config(**changes)).to(DEVICE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
            else:
                nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ == "MixtralExperts"]


def tokens() -> Tensor:
    return torch.randint(2, SIZES["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def step(model: nn.Module, call: Callable | None = None, **options) -> dict[str, Tensor]:
    """One training step: what the model returns, and the gradient of every parameter."""
    model.zero_grad()
    ids = tokens()
    out = (model if call is None else call)(input_ids=ids, labels=ids, **options)
    out.loss.backward()
    results = {name: out[name].detach() for name in ("logits", "loss", "aux_loss") if out.get(name) is not None}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        results[name] = parameter.grad
    return results


def assert_close(ours: dict[str, Tensor], others: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """The largest difference of each tensor, relative to its largest element."""
    assert ours.keys() == others.keys()
    for name, value in ours.items():
        assert value.dtype == others[name].dtype
        difference = (value - others[name]).abs().max() / others[name].abs().max()
        assert difference <= tolerance, f"{name}: relative difference {difference:.2e}"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Backends of the expert MLPs that this package computed for a model, in order."""
    made: list[str] = []

    def counted(*args, backend: str, **named) -> Tensor:
        made.append(backend)
        return expert_mlp(*args, backend=backend, **named)

    expert_mlp = experts.expert_mlp
    monkeypatch.setattr(experts, "expert_mlp", counted)
    return made


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers as it is before this package has registered itself."""
    names = moe.ExpertsInterface._global_mapping
    registered = names.pop(huggingface.NAME, None)
    yield
    names.pop(huggingface.NAME, None)
    if registered is not None:
        names[huggingface.NAME] = registered


# -------------------------------------------------------------------- the same numbers


@pytest.mark.case("Q1")
@each_backend_slowly
def test_agrees_with_eager(backend, calls):
    model = mixtral()
    expected = step(model, output_router_logits=True)
    assert expected["aux_loss"] > 0
    with patch_huggingface(model, backend=backend):
        ours = step(model, output_router_logits=True)
    assert calls == [backend] * 2
    assert_close(ours, expected)
    assert expected["logits"].abs().max() > 1


ACTIVATIONS = [
    ("silu", "swiglu"),
    ("swish", "swiglu"),
    ("gelu", "geglu"),
    ("gelu_python", "geglu"),
    ("gelu_pytorch_tanh", "geglu_tanh"),
    ("relu", "reglu"),
    ("relu2", "relu2_glu"),
]


@pytest.mark.parametrize(("hidden_act", "name"), [pair for pair in ACTIVATIONS if pair[0] in ACT2FN])
def test_activations(hidden_act, name, calls):
    model = mixtral(hidden_act=hidden_act)
    expected = step(model)
    handle = patch_huggingface(model)
    assert [layer.activation for layer in handle.layers] == [name, name]
    assert_close(step(model), expected)
    assert len(calls) == 2


@pytest.mark.parametrize("hidden_act", ["tanh", "quick_gelu", "leaky_relu"])
def test_an_activation_that_is_not_known_runs_in_torch(hidden_act, calls):
    model = mixtral(hidden_act=hidden_act)
    expected = step(model)
    handle = patch_huggingface(model)
    assert [layer.activation for layer in handle.layers] == [None, None]
    assert handle.report.count("its own gate in torch") == 2
    assert_close(step(model), expected)
    assert not calls


def test_an_activation_of_a_known_class_with_other_settings():
    """nn.GELU(approximate="tanh") is not nn.GELU()."""
    model = mixtral()
    for module in experts_of(model):
        module.act_fn = nn.GELU(approximate="tanh")
    expected = step(model)
    assert [layer.activation for layer in patch_huggingface(model).layers] == ["geglu_tanh"] * 2
    assert_close(step(model), expected)


def test_an_activation_that_only_has_a_known_name():
    class SiLU(nn.SiLU):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.clamp(max=0.5))

    model = mixtral()
    for module in experts_of(model):
        module.act_fn = SiLU()
    expected = step(model)
    assert [layer.activation for layer in patch_huggingface(model).layers] == [None, None]
    assert_close(step(model), expected)


@pytest.mark.parametrize("name", sorted(experts._FUNCTIONS))
def test_the_table_of_functions_is_true(name):
    module_name, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module_name), attribute, None)
    if found is None:
        pytest.skip(f"the installed transformers has no {attribute}")
    act_fn = found() if isinstance(found, type) else found
    x = torch.linspace(-40, 40, 1001)
    torch.testing.assert_close(FUNCTIONS[experts._FUNCTIONS[name]].value(x), act_fn(x))
    assert experts.function_name(act_fn) == experts._FUNCTIONS[name]


def test_an_activation_that_is_replaced_after_the_patch():
    model = mixtral()
    patch_huggingface(model)
    for module in experts_of(model):
        module.act_fn = nn.Tanh()
    ours = step(model)
    model.set_experts_implementation("eager")
    for module in experts_of(model):
        module.config = model.config
    assert_close(ours, step(model))


@pytest.mark.parametrize("how", ["hook", "forward"])
@pytest.mark.parametrize("when", ["before the patch", "after the patch", "by name"])
def test_what_is_put_over_an_activation_counts(how, when):
    def change(model):
        for module in experts_of(model):
            if how == "hook":
                module.act_fn.register_forward_hook(lambda module, inputs, output: output * 2)
            else:
                module.act_fn.forward = torch.tanh

    model = mixtral()
    changed = copy.deepcopy(model)
    change(changed)
    expected = step(changed)
    if when == "by name":
        register_huggingface()
        change(model)
        model.set_experts_implementation("blocksparse")
    else:
        (change if when == "before the patch" else patch_huggingface)(model)
        (patch_huggingface if when == "before the patch" else change)(model)
    assert_close(step(model), expected)


def test_a_gate_on_the_instance_runs_itself():
    """It may be replaced by another one of the same name."""

    def gate(factor):
        def gate(pre):
            first, second = pre.chunk(2, dim=-1)
            return factor * nn.functional.silu(first) * second

        return gate

    model = mixtral()
    for module in experts_of(model):
        module._apply_gate = gate(1.0)
    handle = patch_huggingface(model)
    assert {layer.activation for layer in handle.layers} == {None}
    for module in experts_of(model):
        module._apply_gate = gate(3.0)
    ours = step(model)
    handle.restore()
    model.set_experts_implementation("grouped_mm")  # Mixtral's eager experts do not ask `_apply_gate`
    assert_close(step(model), ours)


def test_a_copy_is_restored_without_a_handle(calls):
    model = mixtral()
    handle = patch_huggingface(model)
    patch_huggingface(model, backend="torch")
    other = copy.deepcopy(model)
    handle.restore()
    step(other)
    assert len(calls) == 2
    unpatch_huggingface(other)
    unpatch_huggingface(model)
    other.set_experts_implementation("eager")
    step(other)
    assert len(calls) == 2
    assert vars(experts_of(other)[0]).keys() == vars(experts_of(mixtral())[0]).keys()
    with pytest.raises(TypeError, match="unpatch_huggingface: model must be of type Module"):
        unpatch_huggingface("mixtral")


def test_a_gate_that_changed_its_numbers_is_not_fused():
    """The class is one that is known; what it computes is not what it was."""
    model = mixtral()
    for module in experts_of(model):
        module.act_fn.forward = lambda x: nn.functional.silu(x) * 1.01
    expected = step(model)
    assert [layer.activation for layer in patch_huggingface(model).layers] == [None, None]
    assert_close(step(model), expected)


def test_an_expert_without_tokens():
    """Gates a, -a, b, -b and 0: the best two are never the last."""
    model = mixtral()
    with torch.no_grad():
        for layer in model.model.layers:
            gate = next(parameter for name, parameter in layer.named_parameters() if name.endswith("gate.weight"))
            gate[1], gate[3], gate[4] = -gate[0], -gate[2], 0
    expected = step(model)
    patch_huggingface(model)
    ours = step(model)
    assert_close(ours, expected)
    unused = [value[4] for name, value in ours.items() if name.endswith(("gate_up_proj", "down_proj"))]
    assert len(unused) == 4
    assert not any(grad.any() for grad in unused)


def routed(module: nn.Module, ids: list[list[int]], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of an experts module."""
    T, K = len(ids), len(ids[0]) if ids else 2
    x = torch.randn(T, SIZES["hidden_size"], device=DEVICE, dtype=dtype).requires_grad_()
    weights = torch.rand(T, K, device=DEVICE).requires_grad_()
    return x, torch.tensor(ids, dtype=torch.int64, device=DEVICE).view(T, K), weights


@pytest.mark.case("U2")
@each_backend_slowly
def test_ids_that_are_not_here(backend):
    """E and -1, as plans of expert parallelism send them, contribute nothing and get exactly no gradient."""
    model = mixtral()
    (module, *_) = experts_of(model)
    patch_huggingface(model, backend=backend)
    x, ids, weights = routed(module, [[0, NUM_EXPERTS], [-1, 3], [NUM_EXPERTS, -1], [3, 3], [1, 0]])
    y = module(x, ids, weights)
    y.square().sum().backward()
    dropped = (ids < 0) | (ids >= NUM_EXPERTS)
    assert not weights.grad[dropped].any()
    assert (weights.grad[~dropped] != 0).all()
    assert not y[2].any() and not x.grad[2].any()

    leaves = [tensor.detach().double().requires_grad_() for tensor in (x, module.gate_up_proj, module.down_proj, weights)]
    expected = reference.expert_mlp(leaves[0], Topology.from_ids(ids, NUM_EXPERTS), *leaves[1:])
    grads = torch.autograd.grad(expected.square().sum(), leaves)
    ours = (x.grad, module.gate_up_proj.grad, module.down_proj.grad, weights.grad)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    for our, oracle in zip(ours, grads, strict=True):
        torch.testing.assert_close(our.double(), oracle, rtol=1e-5, atol=1e-5)


def test_no_tokens():
    model = mixtral()
    (module, *_) = experts_of(model)
    patch_huggingface(model)
    x, ids, weights = routed(module, [])
    y = module(x, ids, weights)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad.shape == x.shape and weights.grad.shape == weights.shape
    assert not module.gate_up_proj.grad.any() and not module.down_proj.grad.any()


@pytest.mark.parametrize(
    "names", [("top_k_index", "top_k_weights"), ("router_indices", "routing_weights"), (None, "routing_weights")], ids=str
)
def test_arguments_by_keyword(names):
    model = mixtral()
    (module, *_) = experts_of(model)
    patch_huggingface(model)
    x, ids, weights = routed(module, [[0, 1], [4, 2]])
    expected = module(x, ids, weights)
    id_name, weight_name = names
    positional = [ids] if id_name is None else []
    named = {weight_name: weights} if id_name is None else {id_name: ids, weight_name: weights}
    assert torch.equal(module(x, *positional, **named), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_result_has_the_dtype_of_the_hidden_states(dtype):
    model = mixtral()
    (module, *_) = experts_of(model)
    patch_huggingface(model)
    x, ids, weights = routed(module, [[0, 1], [4, 2]], dtype)
    y = module(x, ids, weights)
    assert y.dtype == dtype
    assert torch.equal(y, module(x.float(), ids, weights).to(dtype))
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert module(x, ids, weights).dtype == dtype
        assert module(x.float(), ids, weights).dtype == torch.float32
    module.to(dtype)
    assert module(x, ids, weights).dtype == dtype
    assert module(x.float(), ids, weights).dtype == torch.float32


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


def named_experts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if type(module).__name__ == "MixtralExperts"]


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
    with pytest.raises(NotImplementedError, match="backend 'triton' computes in fp32, fp16 and bf16"):
        patch_huggingface(model.double(), backend="triton")
    assert all(module.config is model.config for module in experts_of(model))


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


# -------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_real_sizes(dtype):
    sizes = dict(hidden_size=1024, intermediate_size=1792, num_local_experts=16, num_attention_heads=8, num_key_value_heads=2)
    model = mixtral(**sizes, num_experts_per_tok=4, vocab_size=512)
    (module, *_) = experts_of(model)
    x = torch.randn(4096, 1024, device=DEVICE).to(dtype)
    ids = torch.rand(4096, 16, device=DEVICE).topk(4).indices
    weights, grad = torch.rand(4096, 4, device=DEVICE), torch.randn(4096, 1024, device=DEVICE)
    module.to(dtype)

    def run(precision: torch.dtype) -> dict[str, Tensor]:
        module.to(precision).zero_grad()
        leaves = [tensor.detach().to(precision).requires_grad_() for tensor in (x, weights)]
        y = module(leaves[0], ids, leaves[1])
        y.backward(grad.to(precision))
        grads = {"x": leaves[0].grad, "weights": leaves[1].grad, "up": module.gate_up_proj.grad, "down": module.down_proj.grad}
        return {"y": y.detach(), **grads}

    eager, exact = run(dtype), run(torch.float64)
    patch_huggingface(model.to(dtype), backend="triton")
    ours = run(dtype)
    for name, value in ours.items():
        error, eager_error = ((result[name].double() - exact[name]).abs().max() for result in (ours, eager))
        rounding = torch.finfo(dtype).eps * exact[name].abs().max()
        assert error <= 2 * (eager_error + rounding), f"{name}: {error:.2e}, eager's own {eager_error:.2e}"
        assert value.dtype == dtype
