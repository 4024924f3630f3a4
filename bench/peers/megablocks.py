"""MegaBlocks (arXiv:2211.15841), its grouped implementation.

Written after the sources of 0.10.0; never run here. Its sparse implementation refuses Triton 3.2 and newer, and so cannot run
beside ours, which needs 3.6.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..inputs import Case
from ..variants import Layer
from .requirements import missing, unsupported


def why_not(case: Case) -> str | None:
    return missing("megablocks", "0.10") or missing("grouped_gemm", "0.3") or unsupported(case, (torch.bfloat16,))


def build(case: Case) -> Layer:
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
            mlp_impl="grouped",
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

    return Layer("megablocks grouped", "peer", (x, weights, experts.w1, experts.v1, experts.w2), forward, gradients)
