"""SonicMoE (arXiv:2512.14080), with the routing given: its layer without the router, for tokens that have K experts each.

Written after the sources of 0.1.2.post1, whose public function for a given routing takes the slower way of tokens with any
number of experts; the parts used here are those of its own layer. Never run here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..inputs import Case
from ..variants import Layer
from .requirements import missing, unsupported


def why_not(case: Case) -> str | None:
    return missing("sonic-moe", "0.1.2") or unsupported(case, (torch.bfloat16, torch.float16), capability=(9, 0))


def build(case: Case) -> Layer:
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import TC_topk_router_metadata_triton, _DownProjection, _UpProjection

    T, E, K, M = case.shape.T, case.shape.E, case.shape.K, case.shape.M
    x, weights, up_proj, down_proj = leaves = case.leaves()
    expert_ids = case.expert_ids.int()  # as its router writes them

    def forward() -> Tensor:
        counts, offsets, tokens, slots, rows = (expert_ids.new_empty(size) for size in (E, E + 1, M, M, M))
        TC_topk_router_metadata_triton(expert_ids, E, counts, offsets, tokens, slots, rows)
        tables, swiglu = (tokens, slots, rows, None, False), ActivationType.SWIGLU
        inference, gate_before_up = not torch.is_grad_enabled(), True
        up, down = up_proj.permute(1, 2, 0), down_proj.permute(1, 2, 0)  # [2F, H, E], [H, F, E]
        hidden, pre = _UpProjection.apply(x, up, None, offsets, M, K, *tables, swiglu, inference, gate_before_up)
        return _DownProjection.apply(hidden, pre, down, None, weights, offsets, T, K, *tables, swiglu)

    return Layer("sonic-moe", "peer", leaves, forward)
