"""Activations of the expert MLP: their names, and each as a few lines of torch.

An activation maps the pre-activation of a row to its hidden activation. Gated ones (GLU variants, arXiv:2002.05202) take 2F
columns, F of a gate and F of an up-projection; the others take F columns. ReLU squared is from Primer, arXiv:2109.08668.

A name may carry parameters, as the models that clamp have them:

    swiglu(alpha=1.702, gate_limit=7, up_limit=7, up_offset=1, interleaved)       gpt-oss, arXiv:2508.10925
    swiglu(gate_limit=10, up_limit=10)                                            DeepSeek-V4
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from math import isfinite

import torch
import torch.nn.functional as F
from torch import Tensor

PASSES_AT_LIMIT = torch.__version__ < "2.14"
"""Whether torch.clamp hands on the gradient of what lies at its limit: it did, and does not since torch 2.14. In low precision
many numbers are rounded to a limit, so that the installed torch and this package must agree."""


@dataclass(frozen=True)
class Activation:
    """`f(min(gate, gate_limit)) * (clamp(up, -up_limit, up_limit) + up_offset)`, or `f(x)` if it is not gated.

    Attributes:
        function: name of the elementwise function, a key of `FUNCTIONS`.
        gated: whether there is an up-projection to multiply by.
        interleaved: columns are gate and up in turn; else all of the gate, then all of the up-projection.
        alpha: f(x) = function(alpha x) / alpha.
        gate_limit: largest gate; None is no limit.
        up_limit: largest magnitude of the up-projection; None is no limit.
        up_offset: added to it.
    Where a limit cuts, the gradient is zero; at the limit itself it is what torch.clamp makes of it, see `PASSES_AT_LIMIT`.
    """

    function: str
    gated: bool
    interleaved: bool = False
    alpha: float = 1.0
    gate_limit: float | None = None
    up_limit: float | None = None
    up_offset: float = 0.0

    @property
    def halves(self) -> int:
        """Pre-activation columns per hidden column: 2 if gated, else 1."""
        return 2 if self.gated else 1

    @property
    def weight_halves(self) -> int:
        """Parts in which the columns lie: gate and up, or all of them together."""
        return 1 if self.interleaved else self.halves

    def __call__(self, pre: Tensor) -> Tensor:
        """pre [..., halves * F] -> [..., F], in the dtype of `pre`."""
        gate, *up = self.split(pre)
        return self.of_gate(gate) * self.of_up(up[0]) if up else self.of_gate(gate)

    def split(self, pre: Tensor) -> tuple[Tensor, ...]:
        """Views of the columns of the gate and, if there is one, of the up-projection."""
        if not self.gated:
            return (pre,)
        return (pre[..., ::2], pre[..., 1::2]) if self.interleaved else pre.chunk(2, dim=-1)

    def of_gate(self, gate: Tensor) -> Tensor:
        value = FUNCTIONS[self.function].value(self._argument(gate))
        return value if self.alpha == 1 else value / self.alpha

    def of_gate_backward(self, grad: Tensor, gate: Tensor) -> Tensor:
        """Gradient of the gate, from that of `of_gate`."""
        grad = FUNCTIONS[self.function].backward(grad, self._argument(gate))
        return grad if self.gate_limit is None else grad.masked_fill(_is_cut(gate, self.gate_limit), 0)

    def up_is_cut(self, up: Tensor) -> Tensor | None:
        """Where the up-projection gets no gradient; None is nowhere."""
        return None if self.up_limit is None else _is_cut(up.abs(), self.up_limit)

    def of_up(self, up: Tensor) -> Tensor:
        if self.up_limit is not None:
            up = up.clamp(-self.up_limit, self.up_limit)
        return up + self.up_offset if self.up_offset else up

    def _argument(self, gate: Tensor) -> Tensor:
        if self.gate_limit is not None:
            gate = gate.clamp(max=self.gate_limit)
        return gate if self.alpha == 1 else gate * self.alpha

    def __str__(self) -> str:
        """The name that `get_activation` reads."""
        plain = Activation(self.function, self.gated)
        name = next(key for key, one in ACTIVATIONS.items() if one == plain)
        changed = [field.name for field in fields(self) if getattr(self, field.name) != getattr(plain, field.name)]
        settings = [key if key == "interleaved" else f"{key}={getattr(self, key)!r}" for key in changed]
        return f"{name}({', '.join(settings)})" if settings else name


def _is_cut(x: Tensor, limit: float) -> Tensor:
    return x > limit if PASSES_AT_LIMIT else x >= limit


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
    return ACTIVATIONS[name] if isinstance(name, str) and name in ACTIVATIONS else _parsed(str(name))


def halves_of(name: str) -> tuple[int, int]:
    """(halves, weight_halves) of the activation called `name`."""
    activation = get_activation(name)
    return activation.halves, activation.weight_halves


def interleaved(name: str) -> str:
    """The name of the same activation of columns that are gate and up in turn."""
    return str(replace(get_activation(name), interleaved=True))


@lru_cache(maxsize=256)
def _parsed(name: str) -> Activation:
    """An activation whose name has parameters."""
    base, _, inside = name.removesuffix(")").partition("(")
    if base not in ACTIVATIONS or (base != name and not name.endswith(")")):
        raise ValueError(
            f"activation: {name!r} is not known; choose one of {', '.join(ACTIVATIONS)}, of which gated ones take parameters, "
            'as in "swiglu(alpha=1.702, gate_limit=7, up_limit=7, up_offset=1, interleaved)".'
        )
    settings: dict[str, bool | float] = {}
    for setting in filter(None, map(str.strip, inside.split(","))):
        key, _, value = (part.strip() for part in setting.partition("="))
        if key == "interleaved" and not value:
            settings[key] = True
        elif key in _PARAMETERS and _is_number(value) and (key == "up_offset" or float(value) > 0):
            settings[key] = float(value)
        else:
            raise ValueError(
                f"activation: {setting!r} in {name!r} is not understood; parameters are interleaved, and positive numbers for "
                "alpha, gate_limit and up_limit, and any number for up_offset."
            )
    plain = ACTIVATIONS[base]
    if not plain.gated and settings.keys() & {"interleaved", "up_limit", "up_offset"}:
        raise ValueError(f"activation: {base!r} in {name!r} has no up-projection; only alpha and gate_limit are for it.")
    return replace(plain, **settings)  # type: ignore[arg-type]


_PARAMETERS = ("alpha", "gate_limit", "up_limit", "up_offset")


def _is_number(text: str) -> bool:
    try:
        return isfinite(float(text))
    except ValueError:
        return False


# torch.compile calls them and keeps the result, which it could not do with an Activation.
halves_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
interleaved._dynamo_marked_constant = True  # type: ignore[attr-defined]
