"""Routers: which experts a token goes to, with which weights, and what keeps experts equally busy.

config.py     RouterConfig and its presets
gate.py       hidden states -> logits
choice.py     logits -> experts and weights
router.py     Router, the module
output.py     RouterOutput, what a router decided
losses.py     losses for balance, over sequences and global batches
balancing.py  balance without a loss
"""

from .balancing import BiasBalancer
from .config import PRESETS, RouterConfig
from .losses import GlobalLoad, importance_loss, load_balancing_loss, load_loss, z_loss
from .output import RouterOutput
from .router import Router

__all__ = [
    "PRESETS",
    "BiasBalancer",
    "GlobalLoad",
    "Router",
    "RouterConfig",
    "RouterOutput",
    "importance_loss",
    "load_balancing_loss",
    "load_loss",
    "z_loss",
]
