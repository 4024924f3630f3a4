"""The products of the layer and of its backward pass, each alone; the roof is a dense product of the same FLOPs."""

from __future__ import annotations

from functools import partial

from torch import Tensor

import blocksparse_moe
from blocksparse_moe.products import implementation
from blocksparse_moe_kernels import BlockSparse, Topology, get_activation, reference

from .inputs import Case, random_dense, random_sparse, rows_of
from .lineup import Choice, name_of, ours, part, wide, wide_sparse
from .peers import build_product_peers
from .variants import Task, Variant


def sdd(case: Case, choice: Choice) -> list[Task]:
    """Up-projection: gathered tokens times the weights of their experts, without the activation."""
    x, w, rows = case.x, case.up_proj, rows_of(case)
    dense = random_dense(case, case.shape.M, case.shape.H)
    peers, left_out = build_product_peers("sdd", case, choice.peers, x, w, rows)
    variants = [
        *ours(case, choice, lambda backend: blocksparse_moe.sdd(x, w, rows, backend=backend).values),
        *peers,
        Variant("dense matmul", "roof", lambda: (dense @ w[0].T,)),
    ]
    expected, moved = partial(_values_of_sdd, x, w, rows), _moved(case, x, w, rows=2 * case.shape.F)
    return [part("sdd", variants, expected, flops=_flops(case, halves=2), moved=moved, left_out=left_out)]


def sdd_activation(case: Case, choice: Choice) -> list[Task]:
    """Up-projection with SwiGLU in the same kernel: forward writes the pre-activation too, inference does not."""
    x, w, rows, activation = case.x, case.up_proj, rows_of(case), get_activation("swiglu")
    dense = random_dense(case, case.shape.M, case.shape.H)

    def task(stage: str, save_pre: bool) -> Task:
        def variant(backend: str) -> Variant:
            def run() -> tuple[Tensor, ...]:
                pre, hidden = implementation(backend).sdd_activation(x, w, rows, activation, save_pre=save_pre)
                return (pre.values, hidden.values) if save_pre else (hidden.values,)

            return Variant(name_of(backend), "ours", run)

        def expected() -> tuple[Tensor, ...]:
            (pre,) = _values_of_sdd(x, w, rows)
            return (pre, activation(pre)) if save_pre else (activation(pre),)

        variants = [variant(backend) for backend in choice.backends_for(case)]
        variants.append(Variant("dense matmul", "roof", lambda: (dense @ w[0].T,)))
        moved = _moved(case, x, w, rows=(3 if save_pre else 1) * case.shape.F)
        return part("sdd_activation", variants, expected, stage=stage, flops=_flops(case, halves=2), moved=moved)

    return [task("forward", save_pre=True), task("inference", save_pre=False)]


def dsd(case: Case, choice: Choice) -> list[Task]:
    """Down-projection: the block-sparse hidden activation times the weights, rows in expert order."""
    s, w = random_sparse(case, case.shape.F), case.down_proj.transpose(1, 2)
    peers, left_out = build_product_peers("dsd", case, choice.peers, s, w)
    variants = [
        *ours(case, choice, lambda backend: blocksparse_moe.dsd(s, w, backend=backend)),
        *peers,
        Variant("dense matmul", "roof", lambda: (s.values @ w[0],)),
    ]

    def expected() -> tuple[Tensor, ...]:
        return (reference.dsd(wide_sparse(s), wide(w)),)

    moved = _moved(case, w, rows=case.shape.F + case.shape.H)
    return [part("dsd", variants, expected, flops=_flops(case, halves=1), moved=moved, left_out=left_out)]


def grad_hidden(case: Case, choice: Choice) -> list[Task]:
    """Gradient of the hidden activation, SDD: gathered rows of the output's gradient times the down-projection."""
    grad, w, rows = case.grad, case.down_proj.transpose(1, 2), rows_of(case)
    dense = random_dense(case, case.shape.M, case.shape.H)
    variants = [
        *ours(case, choice, lambda backend: implementation(backend).sdd(grad, w, rows).values),
        Variant("dense matmul", "roof", lambda: (dense @ w[0].T,)),
    ]
    expected, moved = partial(_values_of_sdd, grad, w, rows), _moved(case, grad, w, rows=case.shape.F)
    return [part("grad_hidden", variants, expected, stage="backward", flops=_flops(case, halves=1), moved=moved)]


def grad_down(case: Case, choice: Choice) -> list[Task]:
    """Gradient of the down-projection: the transposed scaled activation times gathered rows of the output's gradient."""
    s, grad, like = random_sparse(case, case.shape.F), case.grad, case.down_proj.transpose(1, 2)
    return [_transposed("grad_down", case, choice, s, grad, like, halves=1)]


def grad_rows(case: Case, choice: Choice) -> list[Task]:
    """Gradient of the gathered tokens, DSD: that of the pre-activation times the up-projection, rows in expert order."""
    s, w = random_sparse(case, 2 * case.shape.F), case.up_proj
    variants = [
        *ours(case, choice, lambda backend: implementation(backend).dsd(s, w)),
        Variant("dense matmul", "roof", lambda: (s.values @ w[0],)),
    ]

    def expected() -> tuple[Tensor, ...]:
        return (reference.dsd(wide_sparse(s), wide(w)),)

    moved = _moved(case, w, rows=2 * case.shape.F + case.shape.H)
    return [part("grad_rows", variants, expected, stage="backward", flops=_flops(case, halves=2), moved=moved)]


def grad_up(case: Case, choice: Choice) -> list[Task]:
    """Gradient of the up-projection: that of the pre-activation, transposed, times gathered tokens."""
    s = random_sparse(case, 2 * case.shape.F)
    return [_transposed("grad_up", case, choice, s, case.x, case.up_proj, halves=2)]


def _transposed(op: str, case: Case, choice: Choice, s: BlockSparse, x: Tensor, like: Tensor, *, halves: int) -> Task:
    """The product of s [M, N], transposed, and x [T, H]: a weight gradient [E, N, H] that lies in memory as `like`."""
    dense = random_dense(case, case.shape.M, case.shape.H)

    def call(backend: str) -> Tensor:
        return implementation(backend).dsd_transposed(s, x, order="tokens", like=like)

    def expected() -> tuple[Tensor, ...]:
        return (reference.dsd(wide_sparse(s).T, wide(x), order="tokens"),)

    variants = [*ours(case, choice, call), Variant("dense matmul", "roof", lambda: (s.values.T @ dense,))]
    moved = _moved(case, x, like, rows=halves * case.shape.F)
    return part(op, variants, expected, stage="backward", flops=_flops(case, halves=halves), moved=moved)


def _values_of_sdd(x: Tensor, w: Tensor, rows: Topology) -> tuple[Tensor, ...]:
    return (reference.sdd(wide(x), wide(w), rows).values,)


def _flops(case: Case, halves: int) -> int:
    return 2 * halves * case.shape.M * case.shape.H * case.shape.F


def _moved(case: Case, *others: Tensor, rows: int) -> int:
    """Bytes of operands and results: `others`, and `rows` numbers for each routed row."""
    return sum(other.nbytes for other in others) + rows * case.shape.M * case.dtype.itemsize
