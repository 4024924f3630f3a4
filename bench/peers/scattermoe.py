"""ScatterMoE (arXiv:2403.08245): its two `parallel_linear` around our SwiGLU, as its own `GLUMLP` has them.

Written after the sources of 0.3.0; never run here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..inputs import Case
from ..variants import Layer
from .requirements import missing, unsupported


def why_not(case: Case) -> str | None:
    return missing("scattermoe", "0.3") or unsupported(case, (torch.float32, torch.float16, torch.bfloat16))


def build(case: Case) -> Layer:
    from scattermoe.parallel_experts import flatten_sort_count, parallel_linear

    x, weights, up_proj, down_proj = leaves = case.leaves()

    def forward() -> Tensor:
        ids, slots, ends = flatten_sort_count(case.expert_ids, num_experts=case.shape.E)
        pre = parallel_linear(x, up_proj.permute(0, 2, 1), case.shape.K, ids, slots, ends, grouped_out=True)
        gate, up = pre.chunk(2, dim=1)
        hidden, gates = F.silu(gate) * up, weights.to(case.dtype)
        return parallel_linear(hidden, down_proj.permute(0, 2, 1), 1, ids, slots, ends, gates=gates, grouped_in=True)

    return Layer("scattermoe", "peer", leaves, forward)
