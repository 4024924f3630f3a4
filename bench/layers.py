"""The layer as a line-up: its stages, its roofs, and the reference of the experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from blocksparse_moe_kernels import Topology, reference

from .check import reference_dtype
from .inputs import Case, random_dense
from .lineup import Choice, and_gradients, copy_of, stage_of
from .variants import Layer, Task, Variant


def layer_tasks(
    op: str,
    case: Case,
    choice: Choice,
    layers: Sequence[Layer],
    expected: Callable[[bool], tuple[Tensor, ...]],
    left_out: dict[str, str],
) -> list[Task]:
    """One task for each stage; `expected` makes the output, with its argument true the gradients of the leaves too."""
    expected = cache(partial(expected, "forward+backward" in choice.stages))
    if choice.stages != ("inference",):
        left_out = left_out | {
            f"{layer.name}, but in inference": "has no gradients" for layer in layers if layer.inference_only
        }
    return [
        Task(
            op=op,
            stage=stage,
            variants=(
                *(stage_of(layer, stage, case.grad) for layer in layers if stage == "inference" or not layer.inference_only),
                *_layer_roofs(case, stage),
            ),
            expected=expected if stage == "forward+backward" else lambda: expected()[:1],
            flops=case.shape.forward_flops * (3 if stage == "forward+backward" else 1),
            bytes=_bytes(case, stage),
            left_out=left_out,
        )
        for stage in choice.stages
    ]


def expected_layer(case: Case, with_gradients: bool) -> tuple[Tensor, ...]:
    x, weights, up_proj, down_proj = leaves = case.leaves(reference_dtype(case.dtype))
    topology = Topology.from_ids(case.expert_ids, case.shape.E)
    with torch.set_grad_enabled(with_gradients):
        y = reference.expert_mlp(x, topology, up_proj, down_proj, weights)
    return and_gradients(y, leaves, case.grad) if with_gradients else (y,)


def _layer_roofs(case: Case, stage: str) -> list[Variant]:
    """What no layer passes: its dense GEMMs and, in inference, where few tokens may leave little else, reading the weights."""
    dense = _dense_layer(case, stage)
    return [dense, copy_of(case, _weight_bytes(case), name="weights read")] if stage == "inference" else [dense]


def _weight_bytes(case: Case) -> int:
    """Of the experts that some token chose."""
    return case.expert_ids.unique().numel() * (case.up_proj[0].nbytes + case.down_proj[0].nbytes)


def _bytes(case: Case, stage: str) -> int:
    """Leaves and results, and gradients of both: the weights of experts that some token chose, but the gradients of all."""
    tokens = 2 * case.x.nbytes + case.routing_weights.nbytes
    forward = _weight_bytes(case) + tokens + case.expert_ids.nbytes
    return forward + (tokens + case.up_proj.nbytes + case.down_proj.nbytes if stage == "forward+backward" else 0)


def _dense_layer(case: Case, stage: str) -> Variant:
    """Two GEMMs of the forward pass, and four of the backward pass, as if the M rows had one expert."""
    M, H, F = case.shape.M, case.shape.H, case.shape.F
    up, down = case.up_proj[0], case.down_proj[0]
    x, y = random_dense(case, M, H), random_dense(case, M, H)
    pre, hidden = random_dense(case, M, 2 * F), random_dense(case, M, F)

    def forward() -> tuple[Tensor, ...]:
        return x @ up.T, hidden @ down.T

    def forward_backward() -> tuple[Tensor, ...]:
        return *forward(), y @ down, y.T @ hidden, pre @ up, pre.T @ x

    return Variant("dense matmuls", "roof", forward_backward if stage == "forward+backward" else forward)
