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

    def __init__(self, name: str) -> None:
        self.name = name

    def why_not(self, spec: ExpertSpec) -> str | None:
        return why_not(self.name, spec.device, spec.dtype)

    def experts(
        self, x: Tensor, topology: Topology, routing_weights: Tensor | None, weights: ExpertWeights, spec: ExpertSpec
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
