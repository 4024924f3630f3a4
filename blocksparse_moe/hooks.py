"""What hooks on modules need to know and to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
    """Whether this forward pass runs inside a backward pass, as activation checkpointing has it. Compiled code never asks."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
