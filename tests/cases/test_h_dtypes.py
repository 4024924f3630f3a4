"""Group H: autocast, low-precision modules, and weights whose dtype is not that of the input."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from tests.cases.helpers import gradients, layer, low_precision, relative_error
from tests.support import DEVICE, HAS_CUDA, each_backend_slowly

H, FFN, E, K, T = (1024, 512, 16, 4, 2048) if HAS_CUDA else (24, 16, 4, 2, 7)


@pytest.mark.case("H1")
@each_backend_slowly
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_fp32_layer_under_autocast(backend, bias):
    """transformers 43828, megablocks PR 111 and 14: under autocast a custom function receives mixed dtypes and fails."""
    dtype = low_precision(backend)
    moe = layer(H, FFN, E, K, backend=backend, dtype=torch.float32, bias=bias)
    x = torch.randn(T, H, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE.type, dtype):
        y = moe(x)
        assert y.dtype == dtype
        loss = y.float().square().sum()
    loss.backward()
    assert x.grad.dtype == torch.float32 and x.grad.any()
    for name, grad in gradients(moe).items():
        assert grad.dtype == torch.float32 and grad.any(), name
    with torch.no_grad(), torch.autocast(DEVICE.type, dtype):
        assert torch.equal(moe(x), y)
    assert relative_error(y, moe(x)) < 0.05


@pytest.mark.case("H1")
@each_backend_slowly
def test_low_precision_input_under_autocast(backend):
    """megablocks PR 14: the input was cast by an earlier autocast op, the weights were not."""
    dtype = low_precision(backend)
    moe = layer(H, FFN, E, K, backend=backend, dtype=torch.float32)
    x = torch.randn(T, H, device=DEVICE, dtype=dtype, requires_grad=True)
    with torch.autocast(DEVICE.type, dtype):
        y = moe(x)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, moe.experts.down_proj.grad.dtype) == (dtype, dtype, torch.float32)


@pytest.mark.case("H2")
@each_backend_slowly
def test_fp32_weights_and_low_precision_input(backend):
    """NeMo Automodel PR 1913, 3828: fp32 weights meet low-precision activations. Computed in fp32, returned as they came."""
    dtype = low_precision(backend)
    moe = layer(H, FFN, E, K, backend=backend, dtype=torch.float32)
    x = torch.randn(T, H, device=DEVICE, dtype=dtype, requires_grad=True)
    y = moe(x)
    assert y.dtype == dtype
    assert torch.equal(y, moe(x.float()).to(dtype))
    y.sum().backward()
    assert x.grad.dtype == dtype and x.grad.any()
    assert all(grad.dtype == torch.float32 and grad.any() for grad in gradients(moe).values())


@pytest.mark.case("H2")
@each_backend_slowly
def test_low_precision_weights_and_fp32_input(backend):
    """NeMo Automodel PR 3828: the reverse."""
    dtype = low_precision(backend)
    moe = layer(H, FFN, E, K, backend=backend, dtype=dtype)
    x = torch.randn(T, H, device=DEVICE, requires_grad=True)
    y = moe(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == torch.float32
    assert all(grad.dtype == dtype and grad.any() for grad in gradients(moe).values())


@pytest.mark.case("H3")
@pytest.mark.parametrize(
    ("backend", "cast"),
    [("torch", "bfloat16"), ("torch", "half"), ("triton", "half"), pytest.param("triton", "bfloat16", marks=pytest.mark.gpu)],
)
def test_module_cast_to_low_precision(backend, cast):
    """fms-acceleration PR 69, Megatron PR 669: in a pure fp16 or bf16 model the router, built in fp32, crashes."""
    moe = getattr(layer(H, FFN, E, K, backend=backend, dtype=torch.float32, bias=True), cast)()
    x = getattr(torch.randn(T, H, device=DEVICE), cast)().requires_grad_()
    y = moe(x)
    y.sum().backward()
    assert y.dtype == x.dtype == x.grad.dtype
    assert y.isfinite().all() and y.any()
    assert all(grad.dtype == x.dtype and grad.isfinite().all() for grad in gradients(moe).values())


@pytest.mark.case("H4")
@each_backend_slowly
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_router_computes_in_fp32(backend, autocast):
    """DeepSpeed 7747: a framework casts the router to bf16; routing then fails or loses precision."""
    dtype = low_precision(backend)
    moe = layer(H, FFN, E, K, backend=backend, dtype=dtype)
    fp32_router = copy.deepcopy(moe)
    fp32_router.router.float()
    x = torch.randn(T, H, device=DEVICE, dtype=dtype)
    exact = F.linear(x.double(), moe.router.weight.double())
    for module in (moe, fp32_router):
        with torch.autocast(DEVICE.type, dtype, enabled=autocast):
            _, routing = module(x, return_routing=True)
        assert routing.logits.dtype == routing.weights.dtype == torch.float32
        assert relative_error(routing.logits, exact) < 1e-5
        torch.testing.assert_close(routing.weights.sum(dim=1), torch.ones(T, device=DEVICE), rtol=0, atol=1e-6)
