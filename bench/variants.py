"""What is measured: tasks, and the variants that do the same work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

Kind = Literal["ours", "peer", "roof"]


@dataclass(frozen=True)
class Variant:
    """One way to do the work of a task.

    Attributes:
        name: for people.
        kind: "ours" and "peer" are checked; a "roof" is what the hardware needs for a part of the work that nobody can spare:
            the products as dense ones, or the bytes. Of several roofs the slowest binds.
        run: does the work once and returns its results, in the order of the task's `expected`.
    """

    name: str
    kind: Kind
    run: Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Layer:
    """A layer, as a function of its own leaves.

    Attributes:
        leaves: x, routing_weights (or the gate that makes them), up_proj, down_proj.
        forward: their output [T, H], with sort and all inside.
    """

    name: str
    kind: Kind
    leaves: tuple[Tensor, Tensor, Tensor, Tensor]
    forward: Callable[[], Tensor]


@dataclass(frozen=True)
class Task:
    """One line-up: an op, or one pass of it.

    Attributes:
        op: its name, a key of `bench.ops.OPS`.
        stage: "forward", "inference" or "forward+backward".
        variants: all do the same work.
        expected: makes the results in higher precision.
        flops: useful work; bytes: what must be read and written once. 0 where that is not the measure.
        left_out: why variants that were asked for are not among them, by name.
    """

    op: str
    stage: str
    variants: tuple[Variant, ...]
    expected: Callable[[], tuple[Tensor, ...]]
    flops: int = 0
    bytes: int = 0
    left_out: Mapping[str, str] = field(default_factory=dict)
