"""dMoE as a module: parameters, state dicts, copies, the meta device, what it says of itself, and what it refuses."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from blocksparse_moe import RouterConfig, dMoE

from .moe_support import SMALL, UNEQUAL, build, run
from .support import DEVICE, HAS_CUDA

pytestmark = pytest.mark.usefixtures("poisoned_memory")


# -------------------------------------------------------------------- the module


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        (SMALL, {"gate_up_proj": (3, 12, 8), "down_proj": (3, 8, 6)}),
        (
            replace(SMALL, bias=True),
            {
                "gate_up_proj": (3, 12, 8),
                "down_proj": (3, 8, 6),
                "gate_up_proj_bias": (3, 12),
                "down_proj_bias": (3, 8),
            },
        ),
        (
            replace(SMALL, activation="relu2", bias=True),
            {"up_proj": (3, 6, 8), "down_proj": (3, 8, 6), "up_proj_bias": (3, 6), "down_proj_bias": (3, 8)},
        ),
        (
            UNEQUAL,
            {"gate_up_proj": (28, 8), "down_proj": (14, 8), "gate_up_proj_bias": (28,), "down_proj_bias": (3, 8)},
        ),
        (replace(SMALL, ffn_hidden_size=[6, 6, 6]), {"gate_up_proj": (3, 12, 8), "down_proj": (3, 8, 6)}),
    ],
    ids=["gated", "bias", "not gated", "unequal", "equal, given as a list"],
)
def test_state_dict(config, shapes):
    layer, other = build(config), build(config)
    state = layer.state_dict()
    expected = {"router.weight": (3, 8), **{f"experts.{name}": shape for name, shape in shapes.items()}}
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == expected
    x = torch.randn(5, 8, device=DEVICE)
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(copy.deepcopy(state))
    assert torch.equal(other(x), layer(x))


def test_deepcopy():
    layer, x = build(SMALL), torch.randn(5, 8, device=DEVICE)
    y = layer(x)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), y)
    twin(x).sum().backward()
    assert all(parameter.grad is None for parameter in layer.parameters())
    with torch.no_grad():
        twin.experts.down_proj.zero_()
    assert torch.equal(layer(x), y)
    assert not twin(x).any()


@pytest.mark.case("J2")
@pytest.mark.parametrize("config", [replace(SMALL, hidden_size=64, bias=True), UNEQUAL], ids=["equal", "unequal"])
def test_meta_device(config):
    config = replace(config, init_std=0.05)
    layer = dMoE(config, device="meta", dtype=torch.float32)
    assert {parameter.device.type for parameter in layer.parameters()} == {"meta"}
    assert "backend torch (the default on meta)" in layer.backend_report()
    layer = layer.to_empty(device=DEVICE)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(torch.nan)
    layer.reset_parameters()
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        else:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.5), name
            assert parameter.mean().abs() < 0.02, name
    assert all(value.isfinite().all() for value in run(layer, torch.randn(5, config.hidden_size, device=DEVICE)).values())


def test_forward_on_the_meta_device():
    layer = dMoE(SMALL, device="meta")
    y, routing = layer(torch.empty(5, 8, device="meta"), return_routing=True)
    assert y.shape == (5, 8) and y.device.type == "meta"
    assert routing.weights.shape == (5, 2)


def test_two_layers_start_differently():
    """Experts of one layer, and layers, are drawn independently; the same seed gives the same layer."""
    torch.manual_seed(3)
    first, second = dMoE(SMALL, device=DEVICE), dMoE(SMALL, device=DEVICE)
    torch.manual_seed(3)
    again = dMoE(SMALL, device=DEVICE)
    assert torch.equal(first.experts.down_proj, again.experts.down_proj)
    assert not torch.equal(first.experts.down_proj, second.experts.down_proj)
    assert not torch.equal(first.experts.down_proj[0], first.experts.down_proj[1])


def test_extra_repr():
    text = repr(dMoE(SMALL, device="meta"))
    assert "(router): Router(8 -> top 2 of 3, normalize=True)" in text
    assert "(experts): Experts(3 experts, H=8, F=6 x 3, swiglu, bias=False, backend='auto')" in text
    assert "F=[5, 2, 7], geglu, bias=True, backend='torch'" in repr(dMoE(UNEQUAL, device="meta", backend="torch"))


def test_backend_report():
    first, other, te = build(SMALL, "torch").backend_report().splitlines()
    assert first.startswith("backend torch (asked for)")
    assert f"torch {torch.__version__}" in first
    assert other == "  triton: possible, not chosen"
    assert te.startswith("  te: needs ") or te == "  te: possible, not chosen"
    first, other, _ = build(SMALL, "torch", torch.float64).backend_report().splitlines()
    assert other == "  triton: computes in fp32, fp16 and bf16; got torch.float64"
    chosen = "triton (the default on CUDA)" if HAS_CUDA else "torch (the default on cpu)"
    assert build(SMALL, "auto").backend_report().startswith(f"backend {chosen}")


# -------------------------------------------------------------------- errors


@pytest.mark.parametrize("shape", [(3, 7), (7,), (2, 8, 1)], ids=str)
def test_the_last_dimension_must_be_the_hidden_size(shape):
    with pytest.raises(ValueError, match=r"dMoE: the input must be \[\.\.\., 8\]; got \[" + str(shape[0])):
        build(SMALL)(torch.randn(shape, device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_the_input_must_be_floating(dtype):
    with pytest.raises(TypeError, match=f"must have a floating dtype; got {dtype}"):
        build(SMALL)(torch.ones(3, 8, dtype=dtype, device=DEVICE))


def test_a_scalar_is_no_hidden_state():
    with pytest.raises(ValueError, match=r"dMoE: the input must be \[\.\.\., 8\]; got \[\]"):
        build(SMALL)(torch.tensor(1.0, device=DEVICE))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(router=RouterConfig(4)), "MoEConfig: top_k=4 experts per token, but there are only 3 experts"),
        (dict(activation="swish"), "activation: 'swish' is not known; choose one of swiglu, geglu"),
        (dict(ffn_hidden_size=(5, 2)), "ffn_hidden_size names 2 experts; num_experts is 3"),
        (dict(ffn_hidden_size=()), "ffn_hidden_size names 0 experts; num_experts is 3"),
        (dict(ffn_hidden_size=(5, 2, 0)), "MoEConfig: ffn_hidden_size must be at least 1; got 0"),
        (dict(ffn_hidden_size=0), "MoEConfig: ffn_hidden_size must be at least 1; got 0"),
        (dict(ffn_hidden_size=-3), "MoEConfig: ffn_hidden_size must be at least 1; got -3"),
        (dict(hidden_size=0), "MoEConfig: hidden_size must be at least 1; got 0"),
        (dict(num_experts=0), "MoEConfig: num_experts must be at least 1; got 0"),
    ],
    ids=str,
)
def test_a_config_says_what_is_wrong(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in ("hidden_size", "ffn_hidden_size", "num_experts") for value in ("64", 6.0, None, True)]
    + [("ffn_hidden_size", [2.9, 3.9, 4.9])],
    ids=str,
)
def test_sizes_of_a_config_are_integers(name, value):
    """A string is a sequence too, and a number with a fraction would be cut off."""
    with pytest.raises(TypeError, match=f"MoEConfig: {name} must be an integer; got"):
        replace(SMALL, **{name: value})


def test_the_router_of_a_config_is_a_config():
    with pytest.raises(TypeError, match=r"MoEConfig: router must be of type RouterConfig; got int\. Give RouterConfig"):
        replace(SMALL, router=2)


def test_experts_on_another_device_are_refused():
    layer = build(SMALL)
    layer.experts.to("meta")
    with pytest.raises(ValueError, match=r"expert_mlp: the topology is on .* and up_proj on meta"):
        layer(torch.randn(3, 8, device=DEVICE))


def test_an_unknown_backend_is_refused_at_construction():
    with pytest.raises(ValueError, match="backend: 'cuda' is not known; choose one of auto, triton, torch"):
        dMoE(SMALL, backend="cuda")


def test_a_backend_that_was_asked_for_never_falls_back():
    layer = build(SMALL, "triton", torch.float64)
    with pytest.raises(NotImplementedError, match="backend 'triton' computes in fp32, fp16 and bf16; got torch"):
        layer(torch.randn(3, 8, device=DEVICE, dtype=torch.float64))
    first, _, other, _ = layer.backend_report().splitlines()
    assert first.startswith("nothing runs here: backend 'triton' computes in fp32, fp16 and bf16; got torch.float64")
    assert other == "  torch: possible, not chosen"
    layer = dMoE(SMALL, device="meta", backend="triton")
    with pytest.raises(NotImplementedError, match="backend 'triton' needs a CUDA device; the tensors are on meta"):
        layer(torch.empty(3, 8, device="meta"))
