"""Backends: who computes the experts. One registry; a backend that was asked for runs, or says why it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Protocol

import torch
from torch import Tensor

from blocksparse_moe_kernels import Columns, Topology
from blocksparse_moe_kernels.launch import check_type

from ..products import choose, describe_versions
from .execution import Execution
from .products import ProductBackend
from .te import TransformerEngine
from .te.recipes import RECIPES


@dataclass(frozen=True)
class ExpertSpec:
    """What a backend must be able to compute.

    Attributes:
        columns: F_e of each expert.
        hidden_size: H.
        activation: a key of `ACTIVATIONS`.
        bias: whether both projections have biases.
        dtype: dtype of the computation.
        device: where the weights are.
        recompute: whether training keeps only the inputs, and computes the pre-activation once more.
        contiguous: whether both stacked weights are contiguous, in the layouts of `ExpertWeights`.
        execution: backend, precision and memory.
    """

    columns: Columns
    hidden_size: int
    activation: str
    bias: bool
    dtype: torch.dtype
    device: torch.device
    recompute: bool = False
    contiguous: bool = True
    execution: Execution = field(default_factory=Execution)

    @property
    def name_of_precision(self) -> str:
        """The precision that was asked for, or the dtype."""
        return self.execution.precision or str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class ExpertWeights:
    """Parameters of the experts in the layouts of `ops.expert_mlp`."""

    up_proj: Tensor
    down_proj: Tensor
    up_proj_bias: Tensor | None = None
    down_proj_bias: Tensor | None = None


class Backend(Protocol):
    """One way to compute the experts."""

    name: str

    def never(self, spec: ExpertSpec) -> str | None:
        """Why this backend computes no such layer, on whatever device and in whatever dtype; None where it may."""

    def why_not(self, spec: ExpertSpec) -> str | None:
        """Why this backend cannot compute `spec` where it is, or None."""

    def emulates(self, spec: ExpertSpec) -> bool:
        """Whether it rounds to the precision of `spec`, and multiplies in a wider one."""

    def brief(self, spec: ExpertSpec) -> str:
        """The precision that it computes `spec` in, and how, in a few words."""

    def describe(self, spec: ExpertSpec) -> list[str]:
        """What a report should say of how it computes `spec`, line by line."""

    def aside(self, spec: ExpertSpec) -> list[str]:
        """What it should say where another backend computes `spec`, or none."""

    def experts(
        self,
        x: Tensor,
        topology: Topology,
        routing_weights: Tensor | None,
        weights: ExpertWeights,
        spec: ExpertSpec,
    ) -> Tensor:
        """x [T, H] -> [T, H], differentiable in x, routing_weights and weights."""


BACKENDS: dict[str, Backend] = {
    "triton": ProductBackend("triton"),
    "torch": ProductBackend("torch"),
    "te": TransformerEngine(),
}

PRECISIONS = ("bf16", "fp8_current", "fp8_block", "fp8_delayed", "mxfp8", "nvfp4")


def check_name(name: str) -> str:
    """`name` itself; ValueError unless it is "auto" or a backend."""
    if not isinstance(name, str) or (name != "auto" and name not in BACKENDS):
        raise ValueError(f"backend: {name!r} is not known; choose one of auto, {', '.join(BACKENDS)}.")
    return name


def check_execution(execution: Execution) -> Execution:
    """`execution` itself; ValueError or TypeError unless backend and precision are known."""
    check_name(execution.backend)
    precision = execution.precision
    if precision is not None and (not isinstance(precision, str) or precision not in PRECISIONS):
        raise ValueError(f"precision: {precision!r} is not known; choose one of {', '.join(PRECISIONS)}, or None.")
    check_type("experts", "require_fused", execution.require_fused, bool, "Give True or False.")
    return execution


def check_layer(spec: ExpertSpec) -> None:
    """NotImplementedError if the backend that was asked for ("auto": any) computes no such layer, on whatever device."""
    asked = spec.execution.backend
    obstacles = {name: BACKENDS[name].never(spec) for name in (BACKENDS if asked == "auto" else (asked,))}
    if None not in obstacles.values():
        reasons = "; ".join(f"backend {name!r} {obstacle}" for name, obstacle in obstacles.items())
        raise NotImplementedError(_refusal(spec, f"{reasons}."))


def select(spec: ExpertSpec) -> tuple[Backend, str]:
    """The backend that runs `spec`, and why.

    Raises:
        ValueError: an unknown name, or precision "bf16" of other dtypes; TypeError: no floating dtype; NotImplementedError:
            the backend cannot, with the reason and the nearest that runs.
    """
    try:
        return _select(spec)
    except NotImplementedError as error:
        raise NotImplementedError(_refusal(spec, str(error))) from None


def _select(spec: ExpertSpec) -> tuple[Backend, str]:
    """`select`, whose reasons are without advice."""
    execution = spec.execution
    name, precision = check_name(execution.backend), execution.precision
    if name != "auto" and (obstacle := BACKENDS[name].never(spec)) is not None:
        raise NotImplementedError(f"backend {name!r} {obstacle}.")
    if name != "te" and not execution.require_fused and precision in (None, *ProductBackend.precisions):
        name, reason = choose(name, spec.device, spec.dtype)
    elif name == "auto":
        name, reason = "te", f"the only one with {'its fused path' if precision is None else precision}"
    else:
        reason = "asked for"
    backend = BACKENDS[name]
    if not execution.is_plain and (obstacle := backend.why_not(spec)) is not None:
        raise NotImplementedError(f"backend {name!r} {obstacle}.")
    if (mistake := _mistake(spec)) is not None:
        autocast = "" if spec.dtype == torch.float64 else ", or use autocast"  # which leaves fp64 alone
        raise ValueError(f"{mistake}. Cast the layer, as by .bfloat16(){autocast}.")
    return backend, reason


def _mistake(spec: ExpertSpec) -> str | None:
    """What no backend computes: a precision that is not the dtype of the computation."""
    wrong = spec.execution.precision == "bf16" and spec.dtype != torch.bfloat16
    return f'precision="bf16": the experts compute in {spec.dtype}' if wrong else None


def _refusal(spec: ExpertSpec, reason: str) -> str:
    """The reason, and what to ask for instead: the nearest in earnest, and the nearest that is emulated if that is nearer."""
    emulated = ""
    for changed, other in _neighbours(spec):
        try:
            backend, _ = _select(other)
        except (NotImplementedError, ValueError, TypeError):
            continue
        found = f"{changed} ({backend.name}: {backend.brief(other)})"
        if not backend.emulates(other):
            return f"{reason} The nearest that runs here is {found}{emulated}."
        emulated = emulated or f", or {found}"
    return reason


def _neighbours(spec: ExpertSpec) -> Iterator[tuple[str, ExpertSpec]]:
    """What may be asked for in the place of `spec`, the nearest first: the options that change, and all of it."""
    execution = spec.execution
    asked = (execution.require_fused, execution.precision, spec.recompute, execution.backend)
    of_precision = () if execution.precision is None else RECIPES[execution.precision].nearest
    of_fused = ("mxfp8",) if execution.require_fused else ()
    instead = ((False,), (*of_precision, *of_fused, None), (False,), ("auto",))
    for options in product(*(dict.fromkeys((one, *others)) for one, others in zip(asked, instead, strict=True))):
        named = zip(("require_fused", "precision", "recompute", "backend"), options, asked, strict=True)
        changed = ", ".join(f"{name}={option!r}" for name, option, before in named if option != before)
        require_fused, precision, recompute, backend = options
        yield changed, replace(spec, recompute=recompute, execution=Execution(backend, precision, require_fused))


def report(spec: ExpertSpec) -> str:
    """Which backend runs, why, and why the others would not: for people. None may be able to."""
    chosen = None
    try:
        backend, reason = select(spec)
    except (NotImplementedError, ValueError, TypeError) as error:
        lines = [f"nothing runs here: {error} {describe_versions()}"]
    else:
        chosen = backend.name
        lines = [f"backend {chosen} ({reason}), {describe_versions()}"]
        lines += [f"  {line}" for line in backend.describe(spec)]
    for other in BACKENDS.values():
        if other.name != chosen:
            obstacle = other.why_not(spec) or _mistake(spec)
            lines.append(f"  {other.name}: {'possible, not chosen' if obstacle is None else obstacle}")
            lines += [f"    {line}" for line in other.aside(spec)]
    return "\n".join(lines)
