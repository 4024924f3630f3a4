"""The layer as one would write it on `torch.nn.functional.grouped_mm`: sort, gather, two grouped products, weighted sum."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..inputs import Case
from ..variants import Layer
from .requirements import rows_of_other_sizes


def why_not(case: Case) -> str | None:
    if not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"
    return rows_of_other_sizes(case)


def build(case: Case) -> Layer:
    x, weights, up_proj, down_proj = leaves = case.leaves()
    experts = torch.arange(case.shape.E, device=case.device)

    def forward() -> Tensor:
        sorted_ids, slots = case.expert_ids.flatten().sort()
        ends = torch.searchsorted(sorted_ids, experts, right=True, out_int32=True)  # [E], of each expert's rows
        tokens = slots // case.shape.K
        gate, up = F.grouped_mm(x[tokens], up_proj.transpose(1, 2), offs=ends).chunk(2, dim=1)
        y = F.grouped_mm(F.silu(gate) * up, down_proj.transpose(1, 2), offs=ends)
        y = y * weights.flatten()[slots, None].to(y.dtype)
        return torch.zeros_like(x).index_add(0, tokens, y)

    return Layer("torch grouped_mm", "peer", leaves, forward)
