"""What is measured: tasks, and the variants that do the same work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

Kind = Literal["ours", "peer", "roof"]
Tensors = tuple[Tensor, ...]


def as_they_are(tensors: Tensors) -> Tensors:
    return tensors


def first_line(error: Exception) -> str:
    """Of what a variant raised."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


@dataclass(frozen=True)
class Variant:
    """One way to do the work of a task.

    Attributes:
        name: for people.
        kind: "ours" and "peer" are checked; a "roof" is what the hardware needs for a part of the work that nobody can spare:
            the products as dense ones, or the bytes. Of several roofs the slowest binds.
        run: does the work once and returns its results.
        comparable: those results in the order and layout of the task's `expected`; for the check, not timed.
        tolerance: of the check, where it is not that of the dtype: see `check.disagreement`.
        moved: bytes that a roof reads and writes; 0 of one that multiplies.
        expected: makes what this variant should give, where it is not what the task says; results may be fewer.
    """

    name: str
    kind: Kind
    run: Callable[[], Tensors]
    comparable: Callable[[Tensors], Tensors] = as_they_are
    tolerance: tuple[float, float] | None = None
    moved: int = 0
    expected: Callable[[], Tensors] | None = None


@dataclass(frozen=True)
class Layer:
    """A layer, as a function of its own leaves.

    Attributes:
        leaves: x, routing_weights (or the gate that makes them), up_proj, down_proj.
        forward: their output [T, H], with sort and all inside.
        gradients: the gradients of the leaves as those of x, routing_weights, up_proj and down_proj; for the check, not timed.
        inference_only: whether there are none, nor a forward pass that keeps what they need.
        tolerance: as that of a `Variant`.
    """

    name: str
    kind: Kind
    leaves: Tensors
    forward: Callable[[], Tensor]
    gradients: Callable[[Tensors], Tensors] = as_they_are
    inference_only: bool = False
    tolerance: tuple[float, float] | None = None


@dataclass(frozen=True)
class Task:
    """One line-up: an op, or one pass of it.

    Attributes:
        op: its name, a key of `bench.ops.OPS`.
        stage: "forward", "inference", "backward" or "forward+backward".
        variants: all do the same work.
        expected: makes the results in higher precision.
        flops: useful work, 0 where there is none worth counting; bytes: operands and results, each read or written once.
        left_out: why variants that were asked for are not among them, by name.
        routing: how tokens are routed, where it is not as the case says.
    """

    op: str
    stage: str
    variants: tuple[Variant, ...]
    expected: Callable[[], Tensors]
    flops: int = 0
    bytes: int = 0
    left_out: Mapping[str, str] = field(default_factory=dict)
    routing: str = ""
