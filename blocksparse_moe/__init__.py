"""blocksparse_moe: exact mixture-of-experts layers as two block-sparse products.

layer = dMoE(MoEConfig(hidden_size=2048, ffn_hidden_size=768, num_experts=128, router=RouterConfig(top_k=8)))
y = layer(x)                                # [..., H] -> the same shape

handle = patch_huggingface(model)           # the experts of a transformers model, in place
"""

from __future__ import annotations

from blocksparse_moe_kernels import BlockSparse, Columns, Topology

from .integrations.huggingface import patch_huggingface, register_huggingface, supports, unpatch_huggingface
from .moe import Experts, MoEConfig, dMoE
from .monitor import MoEMonitor
from .ops import combine, dsd, expert_mlp, sdd
from .router import Router, RouterConfig, RouterOutput

__version__ = "0.1.0"

__all__ = [
    "BlockSparse",
    "Columns",
    "Experts",
    "MoEConfig",
    "MoEMonitor",
    "Router",
    "RouterConfig",
    "RouterOutput",
    "Topology",
    "combine",
    "dMoE",
    "dsd",
    "expert_mlp",
    "patch_huggingface",
    "register_huggingface",
    "sdd",
    "supports",
    "unpatch_huggingface",
]
