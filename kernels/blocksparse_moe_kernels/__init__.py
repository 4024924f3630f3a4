"""Block-sparse products for mixture-of-experts layers, in Triton: `sdd`, `dsd`, `combine`, and the `Topology` of their rows.

These are the launchers: plain functions on tensors, without autograd (that is `blocksparse_moe.ops`). They are imported when
first used, so that the package can be imported without Triton and without a GPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .activations import ACTIVATIONS, Activation, get_activation
from .block_sparse import BlockSparse, Columns
from .topology import Schedule, Topology

if TYPE_CHECKING:
    from .config import GemmConfig as GemmConfig
    from .triton.combine import combine as combine
    from .triton.dsd import dsd as dsd
    from .triton.sdd import sdd as sdd
    from .triton.sdd import sdd_activation as sdd_activation

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "BlockSparse",
    "Columns",
    "GemmConfig",
    "Schedule",
    "Topology",
    "combine",
    "dsd",
    "get_activation",
    "sdd",
    "sdd_activation",
]

_LAUNCHERS = {
    "sdd": "triton.sdd",
    "sdd_activation": "triton.sdd",
    "dsd": "triton.dsd",
    "combine": "triton.combine",
    "GemmConfig": "config",
}


def __getattr__(name: str):
    if name not in _LAUNCHERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_LAUNCHERS[name]}", __name__), name)
    globals()[name] = value
    return value
