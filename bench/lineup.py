"""What the ops share: what a run was asked for, and the pieces of a line-up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from blocksparse_moe.products import why_not
from blocksparse_moe_kernels import BlockSparse

from .check import reference_dtype
from .inputs import Case
from .peers import peer_names
from .variants import Layer, Task, Variant

STAGES = ("forward", "inference", "forward+backward")
"""Of the layer. Forward keeps what the backward pass will need, inference does not."""


@dataclass(frozen=True)
class Choice:
    """What a run was asked for: stages of the layer, our backends (None: all that can run here) and peers."""

    stages: tuple[str, ...] = STAGES
    backends: tuple[str, ...] | None = None
    peers: tuple[str, ...] = peer_names()

    def backends_for(self, case: Case) -> tuple[str, ...]:
        """NotImplementedError if one that was asked for cannot run on the case."""
        for name in self.backends or ():
            if reason := why_not(name, case.device, case.dtype):
                raise NotImplementedError(f"backend {name!r} {reason}.")
        if self.backends is not None:
            return self.backends
        on_device = ("triton", "torch") if case.device.type == "cuda" else ("torch",)
        return tuple(name for name in on_device if why_not(name, case.device, case.dtype) is None)


def name_of(backend: str) -> str:
    return f"blocksparse {backend}"


def part(
    op: str,
    variants: Iterable[Variant],
    expected: Callable[[], tuple[Tensor, ...]],
    *,
    stage: str = "forward",
    flops: int = 0,
    moved: int = 0,
    left_out: Mapping[str, str] = MappingProxyType({}),
) -> Task:
    """A line-up of one part of the layer."""
    return Task(op, stage, tuple(variants), expected, flops=flops, bytes=moved, left_out=left_out)


def ours(case: Case, choice: Choice, call: Callable[[str], Tensor]) -> list[Variant]:
    """One variant for each of our backends; `call` takes its name."""
    return [
        Variant(name_of(backend), "ours", lambda backend=backend: (call(backend),)) for backend in choice.backends_for(case)
    ]


def stage_of(layer: Layer, stage: str, grad: Tensor) -> Variant:
    """A stage of the layer as a variant; `grad` is the gradient of its output."""

    def forward() -> tuple[Tensor, ...]:
        return (layer.forward(),)

    def forward_backward() -> tuple[Tensor, ...]:
        return and_gradients(layer.forward(), layer.leaves, grad)

    def comparable(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return *results[:1], *(layer.gradients(results[1:]) if len(results) > 1 else ())

    runs = {"forward": forward, "inference": torch.no_grad()(forward), "forward+backward": forward_backward}
    return Variant(layer.name, layer.kind, runs[stage], comparable, layer.tolerance)


def and_gradients(y: Tensor, leaves: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    return y.detach(), *torch.autograd.grad(y, leaves, grad.to(y.dtype))


def copy_of(case: Case, moved: int, name: str = "copy", times: int = 1) -> Variant:
    """Reads half of `moved` bytes and writes the other half, by so many copies of as many bytes."""
    source = torch.zeros(times, moved // 2 // times, dtype=torch.uint8, device=case.device)
    target = torch.empty_like(source)
    return Variant(name, "roof", lambda: tuple(map(Tensor.copy_, target, source)), moved=moved)


def wide(tensor: Tensor) -> Tensor:
    """In the precision of the reference."""
    return tensor.to(reference_dtype(tensor.dtype))


def wide_sparse(s: BlockSparse) -> BlockSparse:
    return BlockSparse(wide(s.values), s.topology, s.columns, s.transposed)
