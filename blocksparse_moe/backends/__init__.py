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

    def why_not(self, spec: ExpertSpec) -> str | None:
        """Why this backend cannot compute `spec`, or None."""

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
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"backend: {name!r} is not known; choose one of auto, {', '.join(BACKENDS)}.")
    return name


def check_execution(execution: Execution) -> Execution:
    """`execution` itself; ValueError or TypeError unless backend and precision are known."""
    check_name(execution.backend)
    if execution.precision is not None and execution.precision not in PRECISIONS:
        raise ValueError(f"precision: {execution.precision!r} is not known; choose one of {', '.join(PRECISIONS)}, or None.")
    check_type("backend", "require_fused", execution.require_fused, bool, "Give True or False.")
    return execution


def select(spec: ExpertSpec) -> tuple[Backend, str]:
    """The backend that runs `spec`, and why.

    Raises:
        ValueError: an unknown name, or precision "bf16" of other dtypes; TypeError: no floating dtype; NotImplementedError:
            the named backend cannot, with the reason; for "auto" no backend can.
    """
    name, precision = spec.execution.backend, spec.execution.precision
    if spec.execution.is_plain:
        chosen, reason = choose(check_name(name), spec.device, spec.dtype)
        return BACKENDS[chosen], reason
    if precision == "bf16" and spec.dtype != torch.bfloat16:
        raise ValueError(
            f'precision="bf16": the experts compute in {spec.dtype}. Cast the layer, as by .bfloat16(), or use autocast.'
        )
    if name != "auto":
        if (obstacle := BACKENDS[name].why_not(spec)) is not None:
            raise NotImplementedError(f"backend {name!r} {obstacle}.")
        return BACKENDS[name], "asked for"
    order = ("triton", "torch", "te") if spec.device.type == "cuda" else ("torch", "triton", "te")
    obstacles = {one: BACKENDS[one].why_not(spec) for one in order}
    for one, obstacle in obstacles.items():
        if obstacle is None:
            return BACKENDS[one], f"the first that can on {spec.device.type}"
    raise NotImplementedError(f"no backend can: {'; '.join(f'{one} {reason}' for one, reason in obstacles.items())}.")


def report(spec: ExpertSpec) -> str:
    """Which backend runs, why, and why the others would not: for people. None may be able to."""
    chosen = None
    try:
        backend, reason = select(spec)
    except NotImplementedError as error:
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
