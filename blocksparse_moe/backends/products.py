"""The backends made of the two products: `triton` and `torch` differ only in who multiplies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from blocksparse_moe_kernels import Topology

from ..ops import expert_mlp
from ..products import why_not

if TYPE_CHECKING:
    from . import ExpertSpec, ExpertWeights


class ProductBackend:
    """sdd, activation, dsd, combine by one of the implementations in `blocksparse_moe.products`."""

    precisions = ("bf16",)

    def __init__(self, name: str) -> None:
        self.name = name

    def why_not(self, spec: ExpertSpec) -> str | None:
        execution = spec.execution
        if execution.require_fused:
            return "has no fused grouped MLP of Transformer Engine, which require_fused=True asks for; use backend='te'"
        if execution.precision is not None and execution.precision not in self.precisions:
            return f"does not compute in {execution.precision}, but in the dtype of the weights; use backend='te'"
        return why_not(self.name, spec.device, spec.dtype)

    def describe(self, spec: ExpertSpec) -> list[str]:
        return []

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
            backend=self.name,
        )
