"""Autocast, asked about or switched off; the meta device has none."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype that autocast computes `tensor` in; None where it is off, and for fp64, which it leaves alone."""
    kind = tensor.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """A region in which operands keep their dtypes."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
