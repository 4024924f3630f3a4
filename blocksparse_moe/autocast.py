"""Autocast, asked about or switched off; the meta device has none."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast computes in on `device`, None where it is off."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def without_autocast(device: torch.device) -> AbstractContextManager:
    """A region in which operands keep their dtypes."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
