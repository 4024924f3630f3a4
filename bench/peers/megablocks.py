"""MegaBlocks (arXiv:2211.15841), its grouped and its sparse implementation.

Written after the sources of 0.10.0; never run here. The sparse one refuses Triton 3.2 and newer, and so cannot run beside ours,
which needs 3.6; its products are peers of ours in stk.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..inputs import Case
from ..variants import Layer
from .requirements import missing, unsupported
from .stk import unsupported_sizes


def why_not_grouped(case: Case) -> str | None:
    return missing("megablocks", "0.10") or missing("grouped_gemm", "0.3") or unsupported(case, (torch.bfloat16,))


def why_not_sparse(case: Case) -> str | None:
    if (reason := missing("megablocks", "0.10")) is not None:
        return reason
    if missing("triton", "3.2") is None:
        return "refuses Triton 3.2 and newer"
    return unsupported(case, (torch.bfloat16,)) or unsupported_sizes(case)


def build(case: Case, *, implementation: str) -> Layer:
    from megablocks.layers.arguments import Arguments
    from megablocks.layers.dmoe import ParallelDroplessMLP

    shape = case.shape
    module = ParallelDroplessMLP(
        Arguments(
            hidden_size=shape.H,
            ffn_hidden_size=shape.F,
            bias=False,
            activation_fn=F.silu,
            moe_num_experts=shape.E,
            moe_top_k=shape.K,
            mlp_type="glu",
            mlp_impl=implementation,
            fp16=False,
            bf16=True,
            device="meta",
        )
    )
    x, weights, up_proj, down_proj = case.leaves()
    gate, up = up_proj.detach().chunk(2, dim=1)
    flat = [part.reshape(shape.E * shape.F, shape.H) for part in (gate, up, down_proj.detach().transpose(1, 2))]
    experts = module.mlp
    experts.w1, experts.v1, experts.w2 = (nn.Parameter(part) for part in flat)  # [E * F, H] each

    def forward() -> Tensor:
        return module.forward_once(x, weights, case.expert_ids)[0]

    def gradients(found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        grad_x, grad_weights, *parts = found
        gate, up, down = (part.view(shape.E, shape.F, shape.H) for part in parts)
        return grad_x, grad_weights, torch.cat((gate, up), dim=1), down.transpose(1, 2)

    leaves = (x, weights, experts.w1, experts.v1, experts.w2)
    return Layer(f"megablocks {implementation}", "peer", leaves, forward, gradients)
