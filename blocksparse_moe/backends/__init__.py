"""Backends: who computes the experts. One registry; a backend that was asked for runs, or says why it cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from blocksparse_moe_kernels import Columns, Topology

from ..products import choose, describe_versions, unknown
from .products import ProductBackend


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
    """

    columns: Columns
    hidden_size: int
    activation: str
    bias: bool
    dtype: torch.dtype
    device: torch.device
    recompute: bool = False


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

    def experts(
        self, x: Tensor, topology: Topology, routing_weights: Tensor | None, weights: ExpertWeights, spec: ExpertSpec
    ) -> Tensor:
        """x [T, H] -> [T, H], differentiable in x, routing_weights and weights."""


BACKENDS: dict[str, Backend] = {"triton": ProductBackend("triton"), "torch": ProductBackend("torch")}


def check_name(name: str) -> str:
    """`name` itself; ValueError unless it is "auto" or a backend."""
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"backend: {name!r} {unknown(name)}.")
    return name


def select(name: str, spec: ExpertSpec) -> tuple[Backend, str]:
    """The backend that runs `spec` for `name` ("auto" included), and why.

    Raises:
        ValueError: an unknown name; TypeError: no floating dtype; NotImplementedError: the named backend cannot, with the
            reason.
    """
    check_name(name)
    chosen, reason = choose(name, spec.device, spec.dtype)
    return BACKENDS[chosen], reason


def report(name: str, spec: ExpertSpec) -> str:
    """Which backend runs, why, and why the others would not: for people. One that was asked for may be unable to, too."""
    obstacle = None if check_name(name) == "auto" else BACKENDS[name].why_not(spec)
    if obstacle is None:
        backend, reason = select(name, spec)
        lines = [f"backend {backend.name} ({reason}), {describe_versions()}"]
    else:
        backend = BACKENDS[name]
        lines = [f"backend {name} (asked for) cannot run here: it {obstacle}; {describe_versions()}"]
    for other in BACKENDS.values():
        if other.name != backend.name:
            obstacle = other.why_not(spec)
            lines.append(f"  {other.name}: {'possible, not chosen' if obstacle is None else obstacle}")
    return "\n".join(lines)
