"""The experts in other precisions than that of their weights, with their errors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from blocksparse_moe.backends import ExpertSpec, ExpertWeights, select
from blocksparse_moe.backends.execution import Execution
from blocksparse_moe.mxfp8 import mxfp8_expert_mlp, quantize_experts
from blocksparse_moe.products import choose
from blocksparse_moe_kernels import Columns, Topology

from .inputs import Case
from .layers import expected_layer, layer_tasks
from .lineup import Choice, and_gradients
from .variants import Layer, Task

TOLERANCE = {"": (1e-2, 5e-2), "fp8": (0.1, 0.5), "mxfp8": (0.1, 0.5)}
"""Of whole results and of rows, by the beginning of the precision: three significand bits, two products after one another."""

WAYS = (
    ("auto", None), ("auto", "mxfp8"), ("te", None), ("te", "fp8_current"), ("te", "fp8_block"), ("te", "fp8_delayed"),
    ("te", "mxfp8"),
)  # fmt: skip


def low_precision(case: Case, choice: Choice) -> list[Task]:
    """The experts by every backend and precision that runs here, as `expert_mlp`; weights in MXFP8; also each one's error."""
    left_out = {}
    layers = [_kept_weights(case)] if "inference" in choice.stages else []
    for execution in ways():
        try:
            layers.append(_layer(case, execution))
        except NotImplementedError as error:
            left_out[name_of(execution)] = str(error)
    return layer_tasks("low_precision", case, choice, layers, partial(expected_layer, case), left_out)


def ways() -> Iterator[Execution]:
    """A fresh execution for each way."""
    for backend, precision in WAYS:
        yield Execution(backend, precision)


def name_of(execution: Execution) -> str:
    return " ".join(("blocksparse", execution.backend, *([execution.precision] if execution.precision else [])))


def _kept_weights(case: Case) -> Layer:
    x, weights, up_proj, down_proj = leaves = case.leaves()
    experts = quantize_experts(up_proj, down_proj)

    def forward() -> Tensor:
        return mxfp8_expert_mlp(x, Topology.from_ids(case.expert_ids, case.shape.E), experts, weights)

    name = f"blocksparse {choose('auto', case.device, case.dtype)[0]}, weights in mxfp8"
    return Layer(name, "ours", leaves, forward, inference_only=True, tolerance=TOLERANCE["mxfp8"])


def _layer(case: Case, execution: Execution) -> Layer:
    x, weights, up_proj, down_proj = leaves = case.leaves()
    shape = case.shape
    columns = Columns.equal(shape.F, shape.E)
    spec = ExpertSpec(columns, shape.H, "swiglu", False, case.dtype, case.device, execution=execution)
    backend, _ = select(spec)
    name = name_of(Execution(backend.name, execution.precision))

    def forward() -> Tensor:
        topology = Topology.from_ids(case.expert_ids, shape.E)
        return backend.experts(x, topology, weights, ExpertWeights(up_proj, down_proj), spec)

    if execution.precision == "fp8_delayed":  # scales are those of the step before
        and_gradients(forward(), leaves, case.grad)
    kind = "mxfp8" if execution.precision == "mxfp8" else (execution.precision or "")[:3]
    return Layer(name, "ours", leaves, forward, tolerance=TOLERANCE[kind])
