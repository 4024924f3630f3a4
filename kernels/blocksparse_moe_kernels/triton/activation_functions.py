"""`activations.Activation` in Triton, of fp32 tiles: the value, and the value with its derivatives."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..activations import PASSES_AT_LIMIT, Activation

_PASSES_AT_LIMIT = tl.constexpr(PASSES_AT_LIMIT)


def constants(activation: Activation | None) -> dict[str, Any]:
    """What a kernel is compiled with; FUNCTION is None for no activation."""
    if activation is None:
        return {"FUNCTION": None, "INTERLEAVED": False, "ALPHA": 1.0, "GATE_LIMIT": None, "UP_LIMIT": None, "UP_OFFSET": 0.0}
    return {
        "FUNCTION": activation.function, "INTERLEAVED": activation.interleaved, "ALPHA": activation.alpha,
        "GATE_LIMIT": activation.gate_limit, "UP_LIMIT": activation.up_limit, "UP_OFFSET": activation.up_offset,
    }  # fmt: skip


@triton.jit
def is_cut(x, LIMIT: tl.constexpr):
    """Where a limit leaves no gradient."""
    return x > LIMIT if _PASSES_AT_LIMIT else x >= LIMIT


@triton.jit
def activation_value(
    gate, up, GATED: tl.constexpr,
    FUNCTION: tl.constexpr, ALPHA: tl.constexpr, GATE_LIMIT: tl.constexpr, UP_LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
):  # fmt: skip
    """The hidden activation; `up` counts if GATED."""
    hidden, _, _ = activation_value_and_derivatives(gate, up, GATED, FUNCTION, ALPHA, GATE_LIMIT, UP_LIMIT, UP_OFFSET)
    return hidden


@triton.jit
def activation_value_and_derivatives(
    gate, up, GATED: tl.constexpr,
    FUNCTION: tl.constexpr, ALPHA: tl.constexpr, GATE_LIMIT: tl.constexpr, UP_LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
):  # fmt: skip
    """The hidden activation, and its derivatives with respect to gate and up. Comparisons are such that NaN stays NaN."""
    argument = gate
    if GATE_LIMIT is not None:
        argument = tl.where(gate > GATE_LIMIT, GATE_LIMIT, gate)
    if ALPHA != 1.0:
        argument *= ALPHA
    hidden, by_gate = function_value_and_derivative(argument, FUNCTION)
    if ALPHA != 1.0:
        hidden *= 1 / ALPHA
    if GATE_LIMIT is not None:
        by_gate = tl.where(is_cut(gate, GATE_LIMIT), 0.0, by_gate)
    by_up = hidden
    if GATED:
        factor = up
        if UP_LIMIT is not None:
            factor = tl.where(up > UP_LIMIT, UP_LIMIT, tl.where(up < -UP_LIMIT, -UP_LIMIT, up))
            by_up = tl.where(is_cut(tl.abs(up), UP_LIMIT), 0.0, by_up)
        if UP_OFFSET != 0.0:
            factor += UP_OFFSET
        hidden *= factor
        by_gate *= factor
    return hidden, by_gate, by_up


@triton.jit
def function_value_and_derivative(x, FUNCTION: tl.constexpr):
    tl.static_assert(x.dtype == tl.float32)
    if FUNCTION == "silu":
        sigmoid = tl.sigmoid(x)
        value = x * sigmoid
        derivative = sigmoid + value * (1 - sigmoid)
    elif FUNCTION == "gelu":
        cdf = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        value = x * cdf
        derivative = cdf + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif FUNCTION == "gelu_tanh":
        # 0.5 (1 + tanh(z)) = sigmoid(2 z)
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        sigmoid = tl.sigmoid(inner)
        value = x * sigmoid
        derivative = sigmoid + value * (1 - sigmoid) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    elif FUNCTION == "relu":
        value = tl.where(x > 0, x, 0.0)
        derivative = tl.where(x > 0, 1.0, 0.0)
    else:
        tl.static_assert(FUNCTION == "relu2", "unknown activation function")
        positive = tl.where(x > 0, x, 0.0)
        value = positive * positive
        derivative = 2 * positive
    return value, derivative
