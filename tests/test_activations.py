"""Names of activations and their parameters; what they compute against a few lines of torch, gradients through autograd."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocksparse_moe import Topology, expert_mlp
from blocksparse_moe_kernels import ACTIVATIONS, Activation, get_activation

from .support import DEVICE, each_backend_slowly

positive = st.floats(1e-3, 1e3)
limits = st.none() | positive
gated = st.builds(
    Activation,
    st.sampled_from(["silu", "gelu", "relu2"]),
    st.just(True),
    st.booleans(),
    positive,
    limits,
    limits,
    st.floats(-2, 2),
)
plain = st.builds(
    Activation, function=st.sampled_from(["silu", "gelu_tanh"]), gated=st.just(False), alpha=positive, gate_limit=limits
)


@given(gated | plain)
def test_every_activation_has_a_name_that_is_read_again(activation):
    assert get_activation(str(activation)) == activation


def test_names():
    assert {name: str(activation) for name, activation in ACTIVATIONS.items()} == {name: name for name in ACTIVATIONS}
    found = get_activation("swiglu( interleaved,alpha = 1.702, gate_limit=7 , up_limit=7,up_offset=1)")
    assert found == Activation("silu", True, True, 1.702, 7.0, 7.0, 1.0)
    assert get_activation("swiglu()") == get_activation("swiglu")
    assert (found.halves, found.weight_halves) == (2, 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("swish", "'swish' is not known; choose one of swiglu"),
        (None, "'None' is not known"),
        ("swiglu(limit=7)", "'limit=7' in 'swiglu"),
        ("swiglu(gate_limit=-1)", "positive numbers for alpha, gate_limit"),
        ("swiglu(gate_limit=inf)", "is not understood"),
        ("swiglu(alpha)", "is not understood"),
        ("swiglu(alpha=1.7", "is not known"),
        ("swish(alpha=1)", "is not known"),
        ("silu(interleaved)", "has no up-projection"),
        ("gelu(up_offset=1)", "has no up-projection"),
    ],
)
def test_names_that_are_none(name, message):
    with pytest.raises(ValueError) as error:
        get_activation(name)
    assert message in str(error.value)


def gpt_oss(pre, limit, alpha):
    gate, up = pre[..., ::2].clamp(max=limit), pre[..., 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def test_values():
    pre = 10 * torch.randn(50, 8, dtype=torch.float64)
    named = get_activation("swiglu(alpha=1.702, gate_limit=7, up_limit=7, up_offset=1, interleaved)")
    torch.testing.assert_close(named(pre), gpt_oss(pre, 7.0, 1.702))
    gate, up = pre.chunk(2, -1)
    expected = torch.nn.functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10)
    torch.testing.assert_close(get_activation("swiglu(gate_limit=10, up_limit=10)")(pre), expected)


@each_backend_slowly
def test_gradients_at_the_limits(backend):
    """One expert that hands its columns on, so that they lie below, at and beyond the limits."""
    values = torch.tensor([-9.0, -7.0, -1.0, 0.0, 1.0, 7.0, 9.0, math.nextafter(7, 8)], device=DEVICE)
    gate, up = torch.meshgrid(values, values, indexing="ij")
    x = torch.stack((gate.flatten(), up.flatten()), 1).requires_grad_()  # [64, 2]
    up_proj, down_proj = torch.eye(2, device=DEVICE)[None], torch.ones(1, 2, 1, device=DEVICE)
    topology = Topology.from_ids(torch.zeros(64, 1, dtype=torch.int64, device=DEVICE), 1)
    name = "swiglu(alpha=1.702, gate_limit=7, up_limit=7, up_offset=1, interleaved)"
    y = expert_mlp(x, topology, up_proj, down_proj, activation=name, backend=backend)
    (grad,) = torch.autograd.grad(y[:, 0].sum(), x)
    again = x.detach().double().requires_grad_()
    expected = gpt_oss(again, 7.0, 1.702)
    (expected_grad,) = torch.autograd.grad(expected.sum(), again)
    torch.testing.assert_close(y, expected.float().expand(-1, 2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad, expected_grad.float(), rtol=1e-5, atol=1e-5)
    assert not grad[gate.flatten() > 7, 0].any() and not grad[up.flatten().abs() > 7, 1].any()


@each_backend_slowly
@pytest.mark.parametrize("bias", [False, True])
def test_halves_that_lie_in_turn_are_one_matrix(backend, bias):
    """[E, 2, F, H] of an interleaved weight gives what its copy in halves gives, bias and gradients included."""
    E, F, H, T = 3, 8, 16, 20
    w = torch.randn(E, 2 * F, H, device=DEVICE) / 4
    down = torch.randn(E, H, F, device=DEVICE)
    added = torch.randn(E, 2 * F, device=DEVICE, requires_grad=True) if bias else None
    x, ids = torch.randn(T, H, device=DEVICE), torch.randint(0, E, (T, 2), device=DEVICE)
    results = []
    for copied in (False, True):
        leaf = w.clone().requires_grad_()
        halves = leaf.unflatten(1, (F, 2)).transpose(1, 2)
        halves = halves.reshape(E, 2 * F, H) if copied else halves
        y = expert_mlp(x, Topology.from_ids(ids, E), halves, down, up_proj_bias=added, backend=backend)
        results.append((y, *torch.autograd.grad(y.sum(), (leaf, added) if bias else (leaf,))))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
