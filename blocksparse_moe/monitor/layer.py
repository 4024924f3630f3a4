"""What a monitor wants of a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

See = Callable[..., None]


class Layer(ABC):
    """One mixture-of-experts layer.

    Attributes:
        name: of the watched module in its model.
        num_experts: E. columns: C, with those experts behind them that compute nothing.
        router: the module that holds the gate; None where it is not known.
        gate_weights: of its products, [C, H] as a rule.
        init_std: standard deviation of the weights at the beginning.
    """

    name: str
    num_experts: int
    columns: int
    router: nn.Module | None
    init_std: float

    @abstractmethod
    def watch(self, see_logits: See, see_ids: See) -> list[Any]:
        """At every forward pass call `see_logits(module, x, logits [T, .], score)` and `see_ids(module, x, ids [T, K])`; x is
        [T, H], or None where the layer cannot be probed with it. Returns the handles of the hooks."""

    @abstractmethod
    def logits_of(self, x: Tensor) -> Tensor:
        """[S, C]: what the gate says of x [S, H], without noise."""

    @abstractmethod
    def outputs_of(self, x: Tensor, expert_ids: Tensor) -> Tensor:
        """[S * K, H]: the output of every expert of ids [S, K] for its token, not weighed."""

    @property
    @abstractmethod
    def gate_weights(self) -> list[Tensor]: ...

    @abstractmethod
    def expert_weights(self) -> Iterator[ExpertWeight]: ...


class ExpertWeight(NamedTuple):
    """A parameter of all experts.

    Attributes:
        rows: of each expert in the first dimension, one after the other; None for [E, ...].
    """

    name: str
    parameter: nn.Parameter
    rows: list[int] | None

    def of_each(self, tensor: Tensor) -> Sequence[Tensor]:
        """Views of the part of each expert, of the parameter or of what has its shape."""
        return tensor if self.rows is None else tensor.split(self.rows)  # type: ignore[return-value]
