"""Routers: which experts a token goes to, with which weights, and what keeps experts equally busy.

config.py     RouterConfig and its presets
gate.py       hidden states -> logits
choice.py     logits -> experts and weights
assignment.py experts that are given, not needed, or have no room
router.py     Router, the module
output.py     RouterOutput, what a router decided
losses.py     losses for balance
global_loss.py the load-balancing loss over micro-batches and ranks
balancing.py  balance without a loss
replay.py     routing recorded and given back
"""

from .assignment import balanced_ids
from .balancing import BiasBalancer
from .config import PRESETS, RouterConfig
from .global_loss import GlobalLoadBalancingLoss
from .losses import importance_loss, load_balancing_loss, load_loss, z_loss
from .output import RouterOutput
from .replay import record_routing, replay_routing
from .router import Router

__all__ = [
    "PRESETS",
    "BiasBalancer",
    "GlobalLoadBalancingLoss",
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
