"""The ops that can be measured: one function each, which lines up the variants that do the same work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

import blocksparse_moe
from blocksparse_moe.products import why_not
from blocksparse_moe_kernels import BlockSparse, Columns, Topology, reference
from blocksparse_moe_kernels.config import choose_block_m

from .check import reference_dtype
from .inputs import Case
from .peers import PEERS, build_peers
from .variants import Layer, Task, Variant

STAGES = ("forward", "inference", "forward+backward")
"""Of the layer. Forward keeps what the backward pass will need, inference does not."""


@dataclass(frozen=True)
class Choice:
    """What a run was asked for: stages of the layer, our backends (None: all that can run here) and peers."""

    stages: tuple[str, ...] = STAGES
    backends: tuple[str, ...] | None = None
    peers: tuple[str, ...] = tuple(PEERS)

    def backends_for(self, case: Case) -> tuple[str, ...]:
        """NotImplementedError if one that was asked for cannot run on the case."""
        for name in self.backends or ():
            if reason := why_not(name, case.device, case.dtype):
                raise NotImplementedError(f"backend {name!r} {reason}.")
        if self.backends is not None:
            return self.backends
        on_device = ("triton", "torch") if case.device.type == "cuda" else ("torch",)
        return tuple(name for name in on_device if why_not(name, case.device, case.dtype) is None)


# -------------------------------------------------------------------- the layer


def expert_mlp(case: Case, choice: Choice) -> list[Task]:
    """The whole layer through autograd, its topology inside; the roof is its dense GEMMs, one after the other."""
    peers, left_out = build_peers(case, choice.peers)
    layers = [_our_layer(case, backend) for backend in choice.backends_for(case)] + peers
    expected = cache(partial(_expected_layer, case, with_gradients="forward+backward" in choice.stages))
    return [
        Task(
            op="expert_mlp",
            stage=stage,
            variants=(*(_stage_of(layer, stage, case.grad) for layer in layers), _dense_layer(case, stage)),
            expected=expected if stage == "forward+backward" else lambda: expected()[:1],
            flops=case.shape.forward_flops * (3 if stage == "forward+backward" else 1),
            left_out=left_out,
        )
        for stage in choice.stages
    ]


def _our_layer(case: Case, backend: str) -> Layer:
    x, weights, up_proj, down_proj = leaves = case.leaves()

    def forward() -> Tensor:
        topology = Topology.from_ids(case.expert_ids, case.shape.E)
        return blocksparse_moe.expert_mlp(x, topology, up_proj, down_proj, weights, backend=backend)

    return Layer(_name(backend), "ours", leaves, forward)


def _name(backend: str) -> str:
    return f"blocksparse {backend}"


def _stage_of(layer: Layer, stage: str, grad: Tensor) -> Variant:
    def forward() -> tuple[Tensor, ...]:
        return (layer.forward(),)

    def forward_backward() -> tuple[Tensor, ...]:
        y = layer.forward()
        return y.detach(), *torch.autograd.grad(y, layer.leaves, grad)

    runs = {"forward": forward, "inference": torch.no_grad()(forward), "forward+backward": forward_backward}
    return Variant(layer.name, layer.kind, runs[stage])


def _expected_layer(case: Case, with_gradients: bool) -> tuple[Tensor, ...]:
    x, weights, up_proj, down_proj = leaves = case.leaves(reference_dtype(case.dtype))
    topology = Topology.from_ids(case.expert_ids, case.shape.E)
    with torch.set_grad_enabled(with_gradients):
        y = reference.expert_mlp(x, topology, up_proj, down_proj, weights)
    return (y.detach(), *torch.autograd.grad(y, leaves, case.grad.to(y.dtype))) if with_gradients else (y,)


def _dense_layer(case: Case, stage: str) -> Variant:
    """Two GEMMs of the forward pass, and four of the backward pass, as if the M rows had one expert."""
    M, H, F = case.shape.M, case.shape.H, case.shape.F
    up, down = case.up_proj[0], case.down_proj[0]
    x, y = _normal(case, M, H), _normal(case, M, H)
    pre, hidden = _normal(case, M, 2 * F), _normal(case, M, F)

    def forward() -> tuple[Tensor, ...]:
        return x @ up.T, hidden @ down.T

    def forward_backward() -> tuple[Tensor, ...]:
        return *forward(), y @ down, y.T @ hidden, pre @ up, pre.T @ x

    return Variant("dense matmuls", "roof", forward_backward if stage == "forward+backward" else forward)


# -------------------------------------------------------------------- its parts


def topology(case: Case, choice: Choice) -> list[Task]:
    """Sorting the slots by expert; the roof is a copy of as many bytes."""
    M, E = case.shape.M, case.shape.E

    def run() -> tuple[Tensor, ...]:
        made = Topology.from_ids(case.expert_ids, E)
        return made.slots, made.offsets

    def expected() -> tuple[Tensor, ...]:
        flat = case.expert_ids.reshape(-1)
        counts = flat.bincount(minlength=E)
        return flat.argsort(stable=True).int(), torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()

    moved = case.expert_ids.nbytes + 4 * (3 * M + E + 1)  # ids; slots, rows and tokens; offsets
    return [_part("topology", [Variant("blocksparse", "ours", run), _copy(case, moved)], expected, moved=moved)]


def sdd(case: Case, choice: Choice) -> list[Task]:
    """Up-projection: gathered tokens times the weights of their experts, without the activation."""
    x, w, rows = case.x, case.up_proj, _rows(case)
    dense = _normal(case, case.shape.M, case.shape.H)
    variants = [
        *_ours(case, choice, lambda backend: blocksparse_moe.sdd(x, w, rows, backend=backend).values),
        Variant("dense matmul", "roof", lambda: (dense @ w[0].T,)),
    ]
    return [_part("sdd", variants, lambda: (reference.sdd(_wide(x), _wide(w), rows).values,), flops=_flops(case, halves=2))]


def dsd(case: Case, choice: Choice) -> list[Task]:
    """Down-projection: the block-sparse hidden activation times the weights, rows in expert order."""
    s, w = _random_sparse(case, case.shape.F), case.down_proj.transpose(1, 2)
    variants = [
        *_ours(case, choice, lambda backend: blocksparse_moe.dsd(s, w, backend=backend)),
        Variant("dense matmul", "roof", lambda: (s.values @ w[0],)),
    ]
    return [_part("dsd", variants, lambda: (reference.dsd(_wide_sparse(s), _wide(w)),), flops=_flops(case, halves=1))]


def dsd_transposed(case: Case, choice: Choice) -> list[Task]:
    """Gradient of the up-projection: the transposed block-sparse matrix times gathered tokens."""
    s, x = _random_sparse(case, 2 * case.shape.F).T, case.x
    dense = _normal(case, case.shape.M, case.shape.H)
    variants = [
        *_ours(case, choice, lambda backend: blocksparse_moe.dsd(s, x, order="tokens", backend=backend)),
        Variant("dense matmul", "roof", lambda: (s.values.T @ dense,)),
    ]

    def expected() -> tuple[Tensor, ...]:
        return (reference.dsd(_wide_sparse(s), _wide(x), order="tokens"),)

    return [_part("dsd_transposed", variants, expected, flops=_flops(case, halves=2))]


def combine(case: Case, choice: Choice) -> list[Task]:
    """Rows back to tokens, weighted; the roof is a copy of as many bytes."""
    rows, weights = _rows(case), case.routing_weights
    y = _normal(case, case.shape.M, case.shape.H)
    moved = y.nbytes + case.x.nbytes + weights.nbytes + rows.rows.nbytes
    variants = [
        *_ours(case, choice, lambda backend: blocksparse_moe.combine(y, rows, weights, backend=backend)),
        _copy(case, moved),
    ]
    return [_part("combine", variants, lambda: (reference.combine(_wide(y), rows, weights),), moved=moved)]


OPS: dict[str, Callable[[Case, Choice], list[Task]]] = {
    op.__name__: op for op in (expert_mlp, topology, sdd, dsd, dsd_transposed, combine)
}


def _part(
    op: str, variants: Iterable[Variant], expected: Callable[[], tuple[Tensor, ...]], *, flops: int = 0, moved: int = 0
) -> Task:
    return Task(op, "forward", tuple(variants), expected, flops=flops, bytes=moved)


def _ours(case: Case, choice: Choice, call: Callable[[str], Tensor]) -> list[Variant]:
    """One variant for each of our backends; `call` takes its name."""
    return [Variant(_name(backend), "ours", lambda backend=backend: (call(backend),)) for backend in choice.backends_for(case)]


def _rows(case: Case) -> Topology:
    """The topology of a case with the schedule that the kernels choose, so that it isn't made inside the timing."""
    block_m = choose_block_m(case.shape.M, case.shape.E)
    return Topology.from_ids(case.expert_ids, case.shape.E, block_ms=(block_m,))


def _flops(case: Case, halves: int) -> int:
    return 2 * halves * case.shape.M * case.shape.H * case.shape.F


def _copy(case: Case, moved: int) -> Variant:
    """Reads half of `moved` bytes and writes the other half."""
    source = torch.zeros(moved // 2, dtype=torch.uint8, device=case.device)
    target = torch.empty_like(source)
    return Variant("copy", "roof", lambda: (target.copy_(source),))


def _normal(case: Case, *size: int) -> Tensor:
    return torch.randn(size, dtype=case.dtype, device=case.device)


def _random_sparse(case: Case, width: int) -> BlockSparse:
    return BlockSparse(_normal(case, case.shape.M, width), _rows(case), Columns.equal(width, case.shape.E))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(reference_dtype(tensor.dtype))


def _wide_sparse(s: BlockSparse) -> BlockSparse:
    return BlockSparse(_wide(s.values), s.topology, s.columns, s.transposed)
