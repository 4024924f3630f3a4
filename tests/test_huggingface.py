"""Mixtral with its experts computed here: equal to transformers' eager experts."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from torch import Tensor, nn

from blocksparse_moe import patch_huggingface, register_huggingface, unpatch_huggingface
from blocksparse_moe.integrations.huggingface import experts
from blocksparse_moe_kernels import Topology, reference
from blocksparse_moe_kernels.activations import FUNCTIONS

from .support import DEVICE, each_backend_slowly

transformers = pytest.importorskip("transformers", minversion="5.9")
from transformers.activations import ACT2FN  # noqa: E402

from .mixtral_support import (  # noqa: E402
    NUM_EXPERTS,
    assert_close,
    experts_of,
    mixtral,
    routed,
    step,
)

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
