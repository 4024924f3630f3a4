"""The activation of rows that another library multiplied, times a weight of each row.

    a[r] = p[r] activation(pre[r])          pre [P, halves * F], p [P] -> [P, F]

Our own products have it in their epilogue. Its gradient is `activation_backward`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..activations import Activation
from ..config import ceil_div, next_power_of_2
from .activation_functions import activation_value, constants
from .launcher import launch


@triton.jit
def _scaled_activation_kernel(
    Pre, Weights, Out,                      # [P, HALVES * N], [P], [P, N]
    N,
    BLOCK_N: tl.constexpr, HALVES: tl.constexpr, FUNCTION: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr,
    GATE_LIMIT: tl.constexpr, UP_LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_N
    offs_n = first + tl.arange(0, BLOCK_N)
    mask = offs_n < N
    Pre += row * HALVES * N
    if INTERLEAVED:
        offs_pair = 2 * first + tl.arange(0, 2 * BLOCK_N)
        pair = tl.load(Pre + offs_pair, mask=offs_pair < 2 * N, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(pair, (BLOCK_N, 2)))
    else:
        gate = tl.load(Pre + offs_n, mask=mask, other=0.0).to(tl.float32)
        up = gate
        if HALVES == 2:
            up = tl.load(Pre + N + offs_n, mask=mask, other=0.0).to(tl.float32)
    hidden = activation_value(gate, up, HALVES == 2, FUNCTION, ALPHA, GATE_LIMIT, UP_LIMIT, UP_OFFSET)
    hidden *= tl.load(Weights + row).to(tl.float32)
    tl.store(Out + row * N + offs_n, hidden.to(Out.dtype.element_ty), mask=mask)


def scaled_activation(pre: Tensor, activation: Activation, weights: Tensor) -> Tensor:
    """`activation` of each row, times its weight; fp32 inside.

    Args:
        pre: [P, halves * F], contiguous.
        weights: [P], contiguous, any floating dtype.
    Returns:
        [P, F] in the dtype of `pre`.
    """
    columns = pre.shape[1] // activation.halves
    out = pre.new_empty(pre.shape[0], columns)
    if out.numel():
        block_n = min(1024, next_power_of_2(columns))
        launch(
            _scaled_activation_kernel, pre.device, (pre.shape[0], ceil_div(columns, block_n)),
            pre, weights, out, columns, BLOCK_N=block_n, HALVES=activation.halves, **constants(activation),
        )  # fmt: skip
    return out
