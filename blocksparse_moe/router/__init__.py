"""Routers: which experts a token goes to, with which weights, and what keeps experts equally busy.

config.py     RouterConfig and its presets
gate.py       hidden states -> logits
choice.py     logits -> experts and weights
assignment.py experts that are given, not needed, or have no room
router.py     Router, the module
output.py     RouterOutput, what a router decided
losses.py     losses for balance, over sequences and global batches
balancing.py  balance without a loss
replay.py     routing recorded and given back
"""

from .assignment import balanced_ids
from .balancing import BiasBalancer
from .config import PRESETS, RouterConfig
from .losses import GlobalLoad, importance_loss, load_balancing_loss, load_loss, z_loss
from .output import RouterOutput
from .replay import record_routing, replay_routing
from .router import Router

__all__ = [
    "PRESETS",
    "BiasBalancer",
    "GlobalLoad",
    "Router",
    "RouterConfig",
    "RouterOutput",
    "balanced_ids",
    "importance_loss",
    "load_balancing_loss",
    "load_loss",
    "record_routing",
    "replay_routing",
    "z_loss",
]
