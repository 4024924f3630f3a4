"""The backend `te`: NVIDIA Transformer Engine's grouped path, for bf16 and for FP8 recipes.

    topology -> rows padded to what the recipe wants -> GroupedLinear, activation times routing weight, GroupedLinear -> tokens

Parameters, their layouts and the state dict are those of every other backend: Transformer Engine gets views. Its modules only
keep what a recipe remembers. Source: Transformer Engine 2.17 to 2.20.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blocksparse_moe_kernels import Topology, get_activation

from .engine import Engine, ask
from .fused import conditions, conditions_of_layer, is_fused, not_fused
from .recipes import FUSED_ALIGNMENT, RECIPES
from .recipes import never as never_of_recipe
from .recipes import why_not as why_not_recipe

if TYPE_CHECKING:
    from .. import ExpertSpec, ExpertWeights

LIMITS = (
    "each forward pass reads the rows of each expert on the host, once: no CUDA graphs",
    "torch.compile breaks the graph here",
)
"""What a layer gives up on this backend, for the report."""

PROVEN_ON = (9, 0)
"""Compute capability on which the proven recipes have run."""

UNFUSED = "GEMMs are spread over a few streams, one an expert; results do not depend on that"

_GEMMS = {
    torch.bfloat16: "GEMMs in bf16",
    torch.float16: "GEMMs in fp16",
    torch.float32: "GEMMs of fp32, which Transformer Engine multiplies in TF32",
}
"""How the dtypes that it computes in are multiplied without a recipe."""


class TransformerEngine:
    """Both products by `transformer_engine.pytorch.GroupedLinear`, or the whole MLP as its fused op where that exists."""

    name = "te"

    def never(self, spec: ExpertSpec) -> str | None:
        if not spec.columns.are_equal:
            return "multiplies experts of one size only; these differ"
        if not spec.contiguous:
            return "takes each expert's matrices contiguous, [out, in]; these weights have other strides"
        if spec.recompute:
            return "does not recompute (recompute=True); transformer_engine.pytorch.checkpoint does, around the layer"
        halves = get_activation(spec.activation).halves
        sizes = (spec.hidden_size, spec.columns.widest, halves * spec.columns.widest)
        reasons = [never_of_recipe(_key(spec), sizes)]
        if spec.execution.require_fused:
            reasons.append(not_fused(conditions_of_layer(spec)))
        return _joined(reasons)

    def why_not(self, spec: ExpertSpec) -> str | None:
        if (reason := self.never(spec)) is not None:
            return reason
        if spec.device.type != "cuda":
            return f"needs a CUDA device; the tensors are on {spec.device.type}"
        if spec.dtype not in _GEMMS:
            return f"computes in bf16, fp16 and fp32; got {spec.dtype}"
        engine = ask(spec.device)
        if isinstance(engine, str):
            return engine
        reasons = [why_not_recipe(_key(spec), engine, str(spec.device))]
        if spec.execution.require_fused:
            reasons.append(not_fused(conditions(engine, spec)))
        return _joined(reasons)

    def emulates(self, spec: ExpertSpec) -> bool:
        return False

    def brief(self, spec: ExpertSpec) -> str:
        engine = ask(spec.device)
        fused = isinstance(engine, Engine) and is_fused(engine, spec)
        return f"{spec.name_of_precision}, {'fused' if fused else 'unfused'}"

    def describe(self, spec: ExpertSpec) -> list[str]:
        """For a report: the recipe, fused or not and why, and what Transformer Engine cannot do."""
        engine = ask(spec.device)
        if isinstance(engine, str):
            return []
        recipe = RECIPES[_key(spec)]
        fused = is_fused(engine, spec)
        lines = [
            f"Transformer Engine {engine.version}, cuBLASLt {_dotted(engine.cublaslt)}",
            f"precision {spec.name_of_precision}: {recipe.name or _GEMMS[spec.dtype]}, rows of each expert padded to "
            f"{FUSED_ALIGNMENT if fused else recipe.alignment}"
            + ("" if recipe.proven and engine.capability == PROVEN_ON else "; never run here by this project"),
        ]
        lines += self.aside(spec) or ["unfused grouped MLP: fused are those of mxfp8 only"]
        how = "the first weight is copied in each step, in the order that the fused kernel wants" if fused else UNFUSED
        return [*lines, how, *LIMITS]

    def aside(self, spec: ExpertSpec) -> list[str]:
        """Of mxfp8 whether it is fused, or would be, condition by condition."""
        engine = ask(spec.device) if spec.device.type == "cuda" else None
        if not isinstance(engine, Engine) or spec.execution.precision != "mxfp8":
            return []
        what = "fused" if is_fused(engine, spec) else "unfused"
        return [f"{what} grouped MLP; the conditions:", *(f"  {condition}" for condition in conditions(engine, spec))]

    def experts(
        self,
        x: Tensor,
        topology: Topology,
        routing_weights: Tensor | None,
        weights: ExpertWeights,
        spec: ExpertSpec,
    ) -> Tensor:
        from .run import experts

        engine = ask(spec.device)
        if isinstance(engine, str):
            raise NotImplementedError(f"backend 'te' {engine}.")
        return experts(x, topology, routing_weights, weights, spec, fused=is_fused(engine, spec))


def _key(spec: ExpertSpec) -> str:
    """Of `RECIPES`: plain GEMMs, whatever the dtype, have one."""
    return spec.execution.precision or "bf16"


def _joined(reasons: list[str | None]) -> str | None:
    return "; it ".join(reason for reason in reasons if reason is not None) or None


def _dotted(version: int | None) -> str:
    """130100 -> 13.1"""
    return "of an unknown version" if version is None else f"{version // 10000}.{version // 100 % 100}"
