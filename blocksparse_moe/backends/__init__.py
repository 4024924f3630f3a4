"""Backends: who computes the experts. One registry; a backend that was asked for runs, or says why it cannot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from blocksparse_moe_kernels import Columns, Topology
from blocksparse_moe_kernels.launch import check_type

from ..products import choose, describe_versions
from .execution import Execution
from .products import ProductBackend
from .te import TransformerEngine


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
        execution: backend, precision and memory.
    """

    columns: Columns
    hidden_size: int
    activation: str
    bias: bool
    dtype: torch.dtype
    device: torch.device
    recompute: bool = False
    execution: Execution = field(default_factory=Execution)


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

    def never(self, execution: Execution) -> str | None:
        """Why this backend computes no layer in that way, whatever the layer; None where it may."""

    def why_not(self, spec: ExpertSpec) -> str | None:
        """Why this backend cannot compute `spec`, or None."""

    def brief(self, spec: ExpertSpec) -> str:
        """The precision that it computes `spec` in, and how, in a few words."""

    def describe(self, spec: ExpertSpec) -> list[str]:
        """What a report should say of how it computes `spec`, line by line."""

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
    """`execution` itself; ValueError or TypeError unless backend and precision are known, and such that one has the other."""
    name, precision = check_name(execution.backend), execution.precision
    if precision is not None and (not isinstance(precision, str) or precision not in PRECISIONS):
        raise ValueError(f"precision: {precision!r} is not known; choose one of {', '.join(PRECISIONS)}, or None.")
    check_type("experts", "require_fused", execution.require_fused, bool, "Give True or False.")
    if name != "auto" and (reason := BACKENDS[name].never(execution)) is not None:
        raise ValueError(f"backend {name!r} {reason}.")
    return execution


def select(spec: ExpertSpec) -> tuple[Backend, str]:
    """The backend that runs `spec`, and why.

    Raises:
        ValueError: an unknown name, or precision "bf16" of other dtypes; TypeError: no floating dtype; NotImplementedError:
            the backend cannot, with the reason.
    """
    execution = spec.execution
    name, precision = check_name(execution.backend), execution.precision
    if precision == "bf16" and spec.dtype != torch.bfloat16:
        raise ValueError(
            f'precision="bf16": the experts compute in {spec.dtype}. Cast the layer, as by .bfloat16(), or use autocast.'
        )
    if name != "te" and not execution.require_fused and precision in (None, *ProductBackend.precisions):
        chosen, reason = choose(name, spec.device, spec.dtype)
        if precision == "mxfp8" and (obstacle := BACKENDS[chosen].why_not(spec)) is not None:
            raise NotImplementedError(f"backend {chosen!r} {obstacle}.")
        return BACKENDS[chosen], reason
    if name == "auto":
        name = "te"  # nobody else has it
    if (obstacle := BACKENDS[name].why_not(spec)) is not None:
        raise NotImplementedError(f"backend {name!r} {obstacle}.")
    asked = execution.backend == name
    return BACKENDS[name], "asked for" if asked else f"the only one with {'its fused path' if precision is None else precision}"


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
            obstacle = other.why_not(spec)
            lines.append(f"  {other.name}: {'possible, not chosen' if obstacle is None else obstacle}")
    return "\n".join(lines)
