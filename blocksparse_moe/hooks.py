"""What hooks on modules need to know and to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .custom_ops import recompute


class Hook:
    """A hook that copies of the model, and pickles of it, do not take along."""

    def __init__(self, see: Callable[..., None] | None) -> None:
        self.see = see

    def __call__(self, *args: Any) -> None:
        if self.see is not None:
            self.see(*args)

    def __reduce__(self) -> tuple[type[Hook], tuple[None]]:
        return Hook, (None,)


def is_recomputed() -> bool:
    """Whether this forward pass runs inside a backward pass, as activation checkpointing has it. Compiled code says no: see
    `unless_recomputed`."""
    return not torch.compiler.is_compiling() and recompute.in_backward()


def unless_recomputed(new: Tensor, old: Tensor) -> Tensor:
    """What is counted after a forward pass: `new`, but where it is recomputed `old`, in compiled code as well. No gradient."""
    if torch.compiler.is_compiling():
        return recompute.unless_recomputed(new.detach(), old)
    return old if recompute.in_backward() else new.detach()
