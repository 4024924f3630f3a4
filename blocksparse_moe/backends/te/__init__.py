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

from ..execution import Execution
from .engine import Engine, ask
from .fused import Condition, conditions
from .recipes import FUSED_ALIGNMENT, RECIPES
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

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TransformerEngine:
    """Both products by `transformer_engine.pytorch.GroupedLinear`, or the whole MLP as its fused op where that exists."""

    name = "te"

    def never(self, execution: Execution) -> None:
        """It has every precision; what runs, the device decides."""

    def why_not(self, spec: ExpertSpec) -> str | None:
        if spec.device.type != "cuda":
            return f"needs a CUDA device; the tensors are on {spec.device.type}" + _without(spec)
        if not spec.columns.are_equal:
            return "multiplies experts of one size only; these differ. Use backend='triton'"
        if spec.dtype not in _DTYPES:
            return f"computes in bf16, fp16 and fp32; got {spec.dtype}"
        if spec.recompute:
            return "does not recompute (recompute=True); wrap the layer in transformer_engine.pytorch.checkpoint"
        engine = ask(spec.device)
        if isinstance(engine, str):
            return engine + _without(spec)
        precision = _precision(spec)
        activation = get_activation(spec.activation)
        sizes = (spec.hidden_size, spec.columns.widest, activation.halves * spec.columns.widest)
        if (reason := why_not_recipe(precision, engine, str(spec.device), sizes)) is not None:
            return reason
        if spec.execution.require_fused and (failing := _failing(engine, spec)):
            return "would run unfused, and require_fused=True was asked for: " + "; ".join(map(str, failing))
        return None

    def brief(self, spec: ExpertSpec) -> str:
        engine = ask(spec.device)
        fused = isinstance(engine, Engine) and not _failing(engine, spec)
        precision = spec.execution.precision or str(spec.dtype).removeprefix("torch.")
        return f"{precision}, {'fused' if fused else 'unfused'}"

    def describe(self, spec: ExpertSpec) -> list[str]:
        """For a report: the recipe, fused or not and why, and what Transformer Engine cannot do."""
        engine = ask(spec.device)
        if isinstance(engine, str):
            return []
        recipe = RECIPES[_precision(spec)]
        is_fused = not _failing(engine, spec)
        lines = [
            f"Transformer Engine {engine.version}, cuBLASLt {_dotted(engine.cublaslt)}",
            f"precision {_precision(spec)}: {recipe.name or f'GEMMs in {spec.dtype}'}, rows of each expert padded to "
            f"{FUSED_ALIGNMENT if is_fused else recipe.alignment}"
            + ("" if recipe.proven and engine.capability == PROVEN_ON else "; never run here by this project"),
            f"{'fused' if is_fused else 'unfused'} grouped MLP; the conditions:",
            *(f"  {condition}" for condition in conditions(engine, _precision(spec), spec)),
        ]
        how = "the first weight is copied in each step, in the order that the fused kernel wants" if is_fused else UNFUSED
        return [*lines, how, *LIMITS]

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
        assert isinstance(engine, Engine)
        return experts(x, topology, routing_weights, weights, spec, fused=not _failing(engine, spec))


def _without(spec: ExpertSpec) -> str:
    """What can be had where Transformer Engine cannot be asked, for whoever asked for it."""
    precision = spec.execution.precision
    if precision == "mxfp8":
        return ". backend='auto' emulates mxfp8 without it"
    if precision not in (None, "bf16"):
        return ". The nearest that runs without it is precision=\"mxfp8\" with backend='auto', which emulates it"
    return ". backend='auto' needs none" if spec.execution.backend == "te" else ""


def _precision(spec: ExpertSpec) -> str:
    return spec.execution.precision or "bf16"


def _failing(engine: Engine, spec: ExpertSpec) -> list[Condition]:
    return [condition for condition in conditions(engine, _precision(spec), spec) if not condition.holds]


def _dotted(version: int) -> str:
    """130100 -> 13.1"""
    return f"{version // 10000}.{version // 100 % 100}"
