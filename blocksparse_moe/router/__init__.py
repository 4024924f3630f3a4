"""Routers: which experts a token goes to, with which weights, and the losses that keep experts equally busy.

config.py    RouterConfig and its presets
choice.py    logits -> experts and weights, as functions
router.py    Router, the module
output.py    RouterOutput, with the losses
"""

from .config import PRESETS, RouterConfig
from .output import RouterOutput
from .router import Router

__all__ = ["PRESETS", "Router", "RouterConfig", "RouterOutput"]
