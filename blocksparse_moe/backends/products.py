"""The backends made of the two products: `triton` and `torch` differ only in who multiplies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from blocksparse_moe_kernels import Topology
from blocksparse_moe_kernels.config import architecture_of

from ..ops import expert_mlp
from ..products import why_not
from .execution import Execution

if TYPE_CHECKING:
    from . import ExpertSpec, ExpertWeights


_NATIVE = "precision mxfp8, native: tensor cores multiply blocks with their scales; never run here by this project"
_EMULATED = "precision mxfp8, emulated: rounded to it, then multiplied in a wider dtype. For numerics, not for speed"


class ProductBackend:
    """sdd, activation, dsd, combine by one of the implementations in `blocksparse_moe.products`."""

    precisions = ("bf16", "mxfp8")

    def __init__(self, name: str) -> None:
        self.name = name

    def never(self, execution: Execution) -> str | None:
        if execution.require_fused:
            return "has no fused grouped MLP of Transformer Engine, which require_fused=True asks for; use backend='te'"
        if execution.precision is not None and execution.precision not in self.precisions:
            return f"has no {execution.precision}; backend='te' has it on a CUDA device, and this one precision=\"mxfp8\""
        return None

    def why_not(self, spec: ExpertSpec) -> str | None:
        if (reason := self.never(spec.execution)) is not None:
            return reason
        if spec.execution.precision == "mxfp8" and not spec.columns.are_equal:
            return "computes in mxfp8 where experts have one size; these differ. Leave precision out"
        return why_not(self.name, spec.device, spec.dtype)

    def describe(self, spec: ExpertSpec) -> list[str]:
        if spec.execution.precision != "mxfp8":
            return []
        return [_NATIVE if self._is_native(spec) else _EMULATED]

    def brief(self, spec: ExpertSpec) -> str:
        precision = spec.execution.precision
        if precision != "mxfp8":
            return precision or str(spec.dtype).removeprefix("torch.")
        return f"mxfp8, {'native' if self._is_native(spec) else 'emulated'}"

    def _is_native(self, spec: ExpertSpec) -> bool:
        return self.name == "triton" and spec.device.type == "cuda" and architecture_of(spec.device) // 10 == 10

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
