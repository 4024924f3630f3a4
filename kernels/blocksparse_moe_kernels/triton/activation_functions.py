"""The functions of `activations.FUNCTIONS` in Triton: value, and value with derivative, of an fp32 tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def function_value(x, FUNCTION: tl.constexpr):
    value, _ = function_value_and_derivative(x, FUNCTION)
    return value


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
