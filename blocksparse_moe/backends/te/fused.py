"""Transformer Engine's fused grouped MLP (MXFP8 on Blackwell): the conditions, one by one, and whether they hold.

Transformer Engine turns to its unfused ops without a word where one of them fails.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from blocksparse_moe_kernels import get_activation
from blocksparse_moe_kernels.versions import release

from .engine import FUSED_VARIABLE, Engine

if TYPE_CHECKING:
    from .. import ExpertSpec

INTERLEAVE = 32
"""Rows of the gate, then of the up-projection, in turn: the order in which the fused kernel wants the first weight."""

_FRONTEND = "1.23.0"
_MULTIPLE = 64


@dataclass(frozen=True)
class Condition:
    """One thing that the fused path needs, and how it is here."""

    needs: str
    found: str
    holds: bool

    def __str__(self) -> str:
        return f"{'holds' if self.holds else 'FAILS'}: {self.needs} ({self.found})"


def _determinism() -> tuple[str, bool]:
    if torch.are_deterministic_algorithms_enabled():
        return "torch.use_deterministic_algorithms is on", False
    allowed = os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") != "0"
    return ("they need not" if allowed else "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0"), allowed


def _too_late(engine: Engine) -> bool:
    """Whether the variable must have been set after the import: what it turns on is not there."""
    return engine.imported_before and engine.fused_obstacle is not None


def _is_on(variable: str | None) -> bool:
    """As Transformer Engine reads it."""
    try:
        return int(variable or 0) > 0
    except ValueError:
        return False


def _is_new(frontend: str | None) -> bool:
    try:
        return frontend is not None and release(frontend) >= release(_FRONTEND)
    except ValueError:  # a version that is none
        return False


def conditions_of_layer(spec: ExpertSpec) -> tuple[Condition, ...]:
    """Those that no device and no dtype changes."""
    H, F = spec.hidden_size, spec.columns.widest
    activation = get_activation(spec.activation)
    return (
        Condition("precision mxfp8", spec.name_of_precision, spec.execution.precision == "mxfp8"),
        Condition(f"H and F multiples of {_MULTIPLE}", f"H={H}, F={F}", H % _MULTIPLE == F % _MULTIPLE == 0),
        Condition("plain swiglu with its halves apart", spec.activation, activation == get_activation("swiglu")),
        Condition("no biases", "biases" if spec.bias else "none", not spec.bias),
    )


def conditions(engine: Engine, spec: ExpertSpec) -> tuple[Condition, ...]:
    """Everything that the fused grouped MLP needs to be used here."""
    major, minor = engine.capability
    frontend = engine.cudnn_frontend
    variable = engine.fused_variable
    return (
        *conditions_of_layer(spec),
        Condition("computation in bf16", str(spec.dtype), spec.dtype == torch.bfloat16),
        Condition("compute capability 10.x (Blackwell)", f"{major}.{minor}", major == 10),
        Condition(
            f"{FUSED_VARIABLE}=1 in the environment before Transformer Engine is imported",
            ("not set" if variable is None else f"set to {variable}")
            + (" now, but it was imported before this package could look" if engine.imported_before else ""),
            _is_on(variable) and not _too_late(engine),
        ),
        Condition(f"nvidia-cudnn-frontend >= {_FRONTEND}", frontend or "not installed", _is_new(frontend)),
        Condition("algorithms that need not be deterministic", *_determinism()),
        Condition(
            "the fused grouped MLP is registered by Transformer Engine",
            engine.fused_obstacle or "registered",
            engine.fused_obstacle is None,
        ),
    )


def is_fused(engine: Engine, spec: ExpertSpec) -> bool:
    """Whether all of them hold. A forward pass asks, and in other precisions it is soon answered."""
    return spec.execution.precision == "mxfp8" and all(condition.holds for condition in conditions(engine, spec))


def not_fused(conditions: tuple[Condition, ...]) -> str | None:
    """Which of them fail, against `require_fused`; None when all hold."""
    failing = "; ".join(str(condition) for condition in conditions if not condition.holds)
    return f"would run unfused, and require_fused=True was asked for: {failing}" if failing else None
