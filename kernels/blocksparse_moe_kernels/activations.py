"""Activations of the expert MLP: their names, and each as a few lines of torch.

An activation maps the pre-activation of a row to its hidden activation. Gated ones (GLU variants, arXiv:2002.05202) take 2F
columns `[gate | up]` and give `function(gate) * up`; the others take F columns. ReLU squared is from Primer,
arXiv:2109.08668.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Activation:
    """One entry of `ACTIVATIONS`.

    Attributes:
        function: name of the elementwise function, a key of `FUNCTIONS`.
        gated: whether it multiplies `function(gate)` by `up`.
    """

    function: str
    gated: bool

    @property
    def halves(self) -> int:
        """Pre-activation columns per hidden column: 2 if gated, else 1."""
        return 2 if self.gated else 1

    def __call__(self, pre: Tensor) -> Tensor:
        """pre [..., halves * F] -> [..., F], in the dtype of `pre`."""
        if not self.gated:
            return FUNCTIONS[self.function].value(pre)
        gate, up = pre.chunk(2, dim=-1)
        return FUNCTIONS[self.function].value(gate) * up


@dataclass(frozen=True)
class _Function:
    """An elementwise function of x, and its backward: (gradient of the value, x) -> gradient of x."""

    value: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


_aten = torch.ops.aten

FUNCTIONS = {
    "silu": _Function(F.silu, _aten.silu_backward),
    "gelu": _Function(F.gelu, _aten.gelu_backward),
    "gelu_tanh": _Function(partial(F.gelu, approximate="tanh"), partial(_aten.gelu_backward, approximate="tanh")),
    "relu": _Function(F.relu, lambda grad, x: _aten.threshold_backward(grad, x, 0)),
    "relu2": _Function(lambda x: F.relu(x).square(), lambda grad, x: 2 * grad * F.relu(x)),
}

ACTIVATIONS = {
    "swiglu": Activation("silu", gated=True),
    "geglu": Activation("gelu", gated=True),
    "geglu_tanh": Activation("gelu_tanh", gated=True),
    "reglu": Activation("relu", gated=True),
    "relu2_glu": Activation("relu2", gated=True),
    "silu": Activation("silu", gated=False),
    "gelu": Activation("gelu", gated=False),
    "gelu_tanh": Activation("gelu_tanh", gated=False),
    "relu": Activation("relu", gated=False),
    "relu2": Activation("relu2", gated=False),
}


def get_activation(name: str) -> Activation:
    """The activation called `name`; ValueError names those that exist."""
    try:
        return ACTIVATIONS[name]
    except KeyError:
        raise ValueError(f"activation: {name!r} is not known; choose one of {', '.join(ACTIVATIONS)}.") from None
