"""Whether a forward pass is made once more, asked when compiled code runs and not when it is compiled."""

from __future__ import annotations

import torch
from torch import Tensor

from .define import define_op


def in_backward() -> bool:
    """Whether this thread runs a backward pass now."""
    return torch._C._current_graph_task_id() != -1


def _run(new: Tensor, old: Tensor) -> Tensor:
    return (old if in_backward() else new).clone()


def _fake(new: Tensor, old: Tensor) -> Tensor:
    return torch.empty_like(new)


unless_recomputed = define_op("unless_recomputed", "Tensor new, Tensor old", "Tensor", _run, _fake)
