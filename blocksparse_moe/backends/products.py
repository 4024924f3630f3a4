"""The backends made of the two products: `triton` and `torch` differ only in who multiplies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blocksparse_moe_kernels import Topology

from ..ops import expert_mlp
from ..products import why_not

if TYPE_CHECKING:
    from . import ExpertSpec, ExpertWeights


NATIVE_MXFP8 = (100, 103, 110, 120)
"""Architectures for which Triton 3.7 was seen to compile a product of scaled blocks to instructions that multiply them as they
are; not 121, though it is newer."""

_NATIVE = "precision mxfp8, native: tensor cores multiply blocks with their scales; never run here by this project"
_EMULATED = "precision mxfp8, emulated: rounded to it, then multiplied in a wider dtype. For numerics, not for speed"


class ProductBackend:
    """sdd, activation, dsd, combine by one of the implementations in `blocksparse_moe.products`."""

    precisions = ("bf16", "mxfp8")

    def __init__(self, name: str) -> None:
        self.name = name

    def never(self, spec: ExpertSpec) -> str | None:
        precision = spec.execution.precision
        if spec.execution.require_fused:
            return "has no fused grouped MLP of Transformer Engine, which require_fused=True asks for"
        if precision is not None and precision not in self.precisions:
            return f"has no {precision}"
        if precision == "mxfp8" and not spec.columns.are_equal:
            return "computes in mxfp8 where experts have one size; these differ"
        return None

    def why_not(self, spec: ExpertSpec) -> str | None:
        return self.never(spec) or why_not(self.name, spec.device, spec.dtype)

    def emulates(self, spec: ExpertSpec) -> bool:
        if spec.execution.precision != "mxfp8":
            return False
        if self.name != "triton" or spec.device.type != "cuda":
            return True
        major, minor = torch.cuda.get_device_capability(spec.device)
        return 10 * major + minor not in NATIVE_MXFP8

    def describe(self, spec: ExpertSpec) -> list[str]:
        if spec.execution.precision != "mxfp8":
            return []
        return [_EMULATED if self.emulates(spec) else _NATIVE]

    def aside(self, spec: ExpertSpec) -> list[str]:
        return []

    def brief(self, spec: ExpertSpec) -> str:
        if spec.execution.precision != "mxfp8":
            return spec.name_of_precision
        return f"mxfp8, {'emulated' if self.emulates(spec) else 'native'}"

    def experts(
        self,
        x: Tensor,
        topology: Topology,
        routing_weights: Tensor | None,
        weights: ExpertWeights,
        spec: ExpertSpec,
    ) -> Tensor:
        return expert_mlp(
            x,
            topology,
            weights.up_proj,
            weights.down_proj,
            routing_weights,
            activation=spec.activation,
            up_proj_bias=weights.up_proj_bias,
            down_proj_bias=weights.down_proj_bias,
            columns=None if spec.columns.are_equal else spec.columns,
            recompute=spec.recompute,
            precision="mxfp8" if spec.execution.precision == "mxfp8" else None,
            backend=self.name,
        )
