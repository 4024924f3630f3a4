"""How a layer wants its experts computed, and what a backend remembers of it."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Execution:
    """What a user chose, and the memory of the backend that was chosen.

    Attributes:
        backend: "auto", or one by name.
        precision: of the products; None is the dtype of the weights, or autocast's.
        require_fused: whether Transformer Engine's unfused path is an error.
        memory: what a backend keeps from call to call. Copies and pickles begin without.
    """

    backend: str = "auto"
    precision: str | None = None
    require_fused: bool = False
    memory: MutableMapping[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def __reduce__(self) -> tuple:
        return Execution, (self.backend, self.precision, self.require_fused)

    @property
    def is_plain(self) -> bool:
        """Whether our products compute it in the dtype of the weights."""
        return self.backend != "te" and self.precision is None and not self.require_fused
