"""Hugging Face transformers: its Mixtral experts module, with the implementation of its experts interface named.

The experts of Qwen3-MoE, OLMoE and DeepSeek-V3 run the same code.
"""

from __future__ import annotations

import torch
from torch import nn

from ..inputs import Case
from ..variants import Layer
from .requirements import missing, rows_of_other_sizes


def why_not(case: Case) -> str | None:
    return missing("transformers", "5.9")


def why_not_grouped(case: Case) -> str | None:
    return why_not(case) or rows_of_other_sizes(case)


def why_not_compiled(case: Case) -> str | None:
    if case.device.type != "cuda":
        return "measured on CUDA only; a CPU build of it needs a C++ compiler and minutes"
    return why_not_grouped(case)


def build(case: Case, *, implementation: str, compiled: bool = False) -> Layer:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    shape = case.shape
    config = MixtralConfig(
        hidden_size=shape.H,
        intermediate_size=shape.F,
        num_local_experts=shape.E,
        num_experts_per_tok=shape.K,
        hidden_act="silu",
        experts_implementation=implementation,
    )
    with torch.device("meta"):
        module = MixtralExperts(config)
    x, weights, up_proj, down_proj = case.leaves()
    module.gate_up_proj, module.down_proj = nn.Parameter(up_proj.detach()), nn.Parameter(down_proj.detach())
    experts = torch.compile(module, dynamic=False) if compiled else module
    return Layer(
        name=f"transformers {implementation}{' compiled' if compiled else ''}",
        kind="peer",
        leaves=(x, weights, module.gate_up_proj, module.down_proj),
        forward=lambda: experts(x, case.expert_ids, weights),
    )
