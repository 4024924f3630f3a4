"""The ops that can be measured: one function each, which lines up the variants that do the same work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor, nn

import blocksparse_moe
from blocksparse_moe.products import implementation, why_not
from blocksparse_moe_kernels import BlockSparse, Columns, Topology, get_activation, reference

from .check import reference_dtype
from .inputs import Case, make_router, random_dense, random_sparse, rows_of
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
    """The experts through autograd, routing given and its topology inside; roofs: their dense GEMMs, reading the weights."""
    peers, left_out = build_peers(case, choice.peers)
    layers = [_our_layer(case, backend) for backend in choice.backends_for(case)] + peers
    return _layer_tasks("expert_mlp", case, choice, layers, partial(_expected_layer, case), left_out)


def dMoE(case: Case, choice: Choice) -> list[Task]:
    """The whole layer through autograd, router inside; the roofs are those of expert_mlp."""
    x, gate = make_router(case)
    layers = [_our_module(case, x, gate, backend) for backend in choice.backends_for(case)]
    return _layer_tasks("dMoE", case, choice, layers, partial(_expected_module, case, x, gate), {})


def _layer_tasks(
    op: str,
    case: Case,
    choice: Choice,
    layers: Iterable[Layer],
    expected: Callable[[bool], tuple[Tensor, ...]],
    left_out: Mapping[str, str],
) -> list[Task]:
    """One task for each stage; `expected` makes the output, with its argument true the gradients of the leaves too."""
    expected = cache(partial(expected, "forward+backward" in choice.stages))
    return [
        Task(
            op=op,
            stage=stage,
            variants=(*(_stage_of(layer, stage, case.grad) for layer in layers), *_layer_roofs(case, stage)),
            expected=expected if stage == "forward+backward" else lambda: expected()[:1],
            flops=case.shape.forward_flops * (3 if stage == "forward+backward" else 1),
            bytes=_weight_bytes(case) if stage == "inference" else 0,
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


def _our_module(case: Case, x: Tensor, gate: Tensor, backend: str) -> Layer:
    """The module on given hidden states [T, H] and gate [E, H]; its leaves are x, the gate and the weights of the experts."""
    shape = case.shape
    config = blocksparse_moe.MoEConfig(shape.H, shape.F, shape.E, router=_router_config(case))
    module = blocksparse_moe.dMoE(config, device="meta", backend=backend)
    x, _, up_proj, down_proj = replace(case, x=x).leaves()
    leaves = (x, nn.Parameter(gate), nn.Parameter(up_proj.detach()), nn.Parameter(down_proj.detach()))
    _, module.router.weight, module.experts.gate_up_proj, module.experts.down_proj = leaves
    return Layer(_name(backend), "ours", leaves, lambda: module(x))


def _router_config(case: Case) -> blocksparse_moe.RouterConfig:
    return blocksparse_moe.RouterConfig(case.shape.K, normalize=case.shape.K > 1)


def _name(backend: str) -> str:
    return f"blocksparse {backend}"


def _stage_of(layer: Layer, stage: str, grad: Tensor) -> Variant:
    def forward() -> tuple[Tensor, ...]:
        return (layer.forward(),)

    def forward_backward() -> tuple[Tensor, ...]:
        return _with_gradients(layer.forward(), layer.leaves, grad)

    def comparable(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return *results[:1], *(layer.gradients(results[1:]) if len(results) > 1 else ())

    runs = {"forward": forward, "inference": torch.no_grad()(forward), "forward+backward": forward_backward}
    return Variant(layer.name, layer.kind, runs[stage], comparable)


def _expected_layer(case: Case, with_gradients: bool) -> tuple[Tensor, ...]:
    x, weights, up_proj, down_proj = leaves = case.leaves(reference_dtype(case.dtype))
    topology = Topology.from_ids(case.expert_ids, case.shape.E)
    with torch.set_grad_enabled(with_gradients):
        y = reference.expert_mlp(x, topology, up_proj, down_proj, weights)
    return _with_gradients(y, leaves, case.grad) if with_gradients else (y,)


def _expected_module(case: Case, x: Tensor, gate: Tensor, with_gradients: bool) -> tuple[Tensor, ...]:
    x, _, up_proj, down_proj = replace(case, x=x).leaves(reference_dtype(case.dtype))
    gate = _wide(gate).requires_grad_()
    config = _router_config(case)
    with torch.set_grad_enabled(with_gradients):
        _, weights, expert_ids = reference.router(x, gate, config.top_k, normalize=config.normalize)
        y = reference.expert_mlp(x, Topology.from_ids(expert_ids, case.shape.E), up_proj, down_proj, weights)
    return _with_gradients(y, (x, gate, up_proj, down_proj), case.grad) if with_gradients else (y,)


def _with_gradients(y: Tensor, leaves: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    return y.detach(), *torch.autograd.grad(y, leaves, grad.to(y.dtype))


def _layer_roofs(case: Case, stage: str) -> list[Variant]:
    """What no layer passes: its dense GEMMs and, in inference, where few tokens may leave little else, reading the weights."""
    dense = _dense_layer(case, stage)
    return [dense, _copy(case, _weight_bytes(case), name="weights read")] if stage == "inference" else [dense]


def _weight_bytes(case: Case) -> int:
    """Of the experts that some token chose."""
    return case.expert_ids.unique().numel() * (case.up_proj[0].nbytes + case.down_proj[0].nbytes)


def _dense_layer(case: Case, stage: str) -> Variant:
    """Two GEMMs of the forward pass, and four of the backward pass, as if the M rows had one expert."""
    M, H, F = case.shape.M, case.shape.H, case.shape.F
    up, down = case.up_proj[0], case.down_proj[0]
    x, y = random_dense(case, M, H), random_dense(case, M, H)
    pre, hidden = random_dense(case, M, 2 * F), random_dense(case, M, F)

    def forward() -> tuple[Tensor, ...]:
        return x @ up.T, hidden @ down.T

    def forward_backward() -> tuple[Tensor, ...]:
        return *forward(), y @ down, y.T @ hidden, pre @ up, pre.T @ x

    return Variant("dense matmuls", "roof", forward_backward if stage == "forward+backward" else forward)


# -------------------------------------------------------------------- its parts


def router(case: Case, choice: Choice) -> list[Task]:
    """Scores, top-k and routing weights, in fp32; the roof is the gate's product in the dtype of the hidden states."""
    x, gate = make_router(case)
    config = _router_config(case)
    module = blocksparse_moe.Router(case.shape.H, case.shape.E, config, device="meta")
    module.weight = nn.Parameter(gate)

    def run() -> tuple[Tensor, ...]:
        routing = module(x)
        return routing.logits, routing.weights, routing.expert_ids

    variants = [Variant("blocksparse", "ours", torch.no_grad()(run)), Variant("gate matmul", "roof", lambda: (x @ gate.T,))]

    def expected() -> tuple[Tensor, ...]:
        return reference.router(_wide(x), _wide(gate), config.top_k, normalize=config.normalize)

    return [_part("router", variants, expected, flops=2 * case.shape.T * case.shape.H * case.shape.E)]


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
    x, w, rows = case.x, case.up_proj, rows_of(case)
    dense = random_dense(case, case.shape.M, case.shape.H)
    variants = [
        *_ours(case, choice, lambda backend: blocksparse_moe.sdd(x, w, rows, backend=backend).values),
        Variant("dense matmul", "roof", lambda: (dense @ w[0].T,)),
    ]
    return [_part("sdd", variants, partial(_values_of_sdd, x, w, rows), flops=_flops(case, halves=2))]


def dsd(case: Case, choice: Choice) -> list[Task]:
    """Down-projection: the block-sparse hidden activation times the weights, rows in expert order."""
    s, w = random_sparse(case, case.shape.F), case.down_proj.transpose(1, 2)
    variants = [
        *_ours(case, choice, lambda backend: blocksparse_moe.dsd(s, w, backend=backend)),
        Variant("dense matmul", "roof", lambda: (s.values @ w[0],)),
    ]
    return [_part("dsd", variants, lambda: (reference.dsd(_wide_sparse(s), _wide(w)),), flops=_flops(case, halves=1))]


def combine(case: Case, choice: Choice) -> list[Task]:
    """Rows back to tokens, weighted; the roof is a copy of as many bytes."""
    rows, weights = rows_of(case), case.routing_weights
    y = random_dense(case, case.shape.M, case.shape.H)
    moved = y.nbytes + case.x.nbytes + weights.nbytes + rows.rows.nbytes
    variants = [
        *_ours(case, choice, lambda backend: blocksparse_moe.combine(y, rows, weights, backend=backend)),
        _copy(case, moved),
    ]
    return [_part("combine", variants, lambda: (reference.combine(_wide(y), rows, weights),), moved=moved)]


def grad_hidden(case: Case, choice: Choice) -> list[Task]:
    """Gradient of the hidden activation, SDD: gathered rows of the output's gradient times the down-projection."""
    grad, w, rows = case.grad, case.down_proj.transpose(1, 2), rows_of(case)
    dense = random_dense(case, case.shape.M, case.shape.H)
    variants = [
        *_ours(case, choice, lambda backend: implementation(backend).sdd(grad, w, rows).values),
        Variant("dense matmul", "roof", lambda: (dense @ w[0].T,)),
    ]
    expected = partial(_values_of_sdd, grad, w, rows)
    return [_part("grad_hidden", variants, expected, flops=_flops(case, halves=1))]


def activation_backward(case: Case, choice: Choice) -> list[Task]:
    """Gradients of pre-activation and routing weights, and the scaled hidden activation; the roof is a copy of as many bytes.

    The pass overwrites the gradient of the hidden activation with the scaled activation. Here one is equal to the other, so
    that every call finds what the first one found.
    """
    activation, rows, weights = get_activation("swiglu"), rows_of(case), case.routing_weights
    pre = random_sparse(case, 2 * case.shape.F)
    scale = weights.reshape(-1)[rows.slots.long(), None]
    grad = (scale * activation(_wide(pre.values))).to(case.dtype)

    def variant(backend: str) -> Variant:
        own = BlockSparse(grad.clone(), rows, Columns.equal(case.shape.F, case.shape.E))

        def run() -> tuple[Tensor, ...]:
            grad_pre, scaled, grad_weights = implementation(backend).activation_backward(own, pre, activation, weights)
            return grad_pre.values, scaled.values, grad_weights

        return Variant(_name(backend), "ours", run)

    def expected() -> tuple[Tensor, ...]:
        leaf = _wide(pre.values).requires_grad_()
        hidden = activation(leaf)
        (grad_pre,) = torch.autograd.grad(scale * hidden, leaf, _wide(grad))
        grad_weights = torch.empty_like(scale, dtype=leaf.dtype)
        grad_weights[rows.slots.long(), 0] = torch.linalg.vecdot(_wide(grad), hidden.detach())
        return grad_pre, (scale * hidden).detach(), grad_weights.view_as(weights)

    moved = 2 * (grad.nbytes + pre.values.nbytes + weights.nbytes) + rows.slots.nbytes
    variants = [variant(backend) for backend in choice.backends_for(case)]
    return [_part("activation_backward", [*variants, _copy(case, moved)], expected, moved=moved)]


def grad_down(case: Case, choice: Choice) -> list[Task]:
    """Gradient of the down-projection: the transposed scaled activation times gathered rows of the output's gradient."""
    s, grad, like = random_sparse(case, case.shape.F), case.grad, case.down_proj.transpose(1, 2)
    return [_transposed("grad_down", case, choice, s, grad, like, halves=1)]


def grad_rows(case: Case, choice: Choice) -> list[Task]:
    """Gradient of the gathered tokens, DSD: that of the pre-activation times the up-projection, rows in expert order."""
    s, w = random_sparse(case, 2 * case.shape.F), case.up_proj
    variants = [
        *_ours(case, choice, lambda backend: implementation(backend).dsd(s, w)),
        Variant("dense matmul", "roof", lambda: (s.values @ w[0],)),
    ]
    return [_part("grad_rows", variants, lambda: (reference.dsd(_wide_sparse(s), _wide(w)),), flops=_flops(case, halves=2))]


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
        return (reference.dsd(_wide_sparse(s).T, _wide(x), order="tokens"),)

    variants = [*_ours(case, choice, call), Variant("dense matmul", "roof", lambda: (s.values.T @ dense,))]
    return _part(op, variants, expected, flops=_flops(case, halves=halves))


OPS: dict[str, Callable[[Case, Choice], list[Task]]] = {
    op.__name__: op
    for op in (
        dMoE,
        expert_mlp,
        router,
        topology,
        sdd,
        dsd,
        combine,
        grad_hidden,
        activation_backward,
        grad_down,
        grad_rows,
        grad_up,
    )
}


def _part(
    op: str, variants: Iterable[Variant], expected: Callable[[], tuple[Tensor, ...]], *, flops: int = 0, moved: int = 0
) -> Task:
    return Task(op, "forward", tuple(variants), expected, flops=flops, bytes=moved)


def _ours(case: Case, choice: Choice, call: Callable[[str], Tensor]) -> list[Variant]:
    """One variant for each of our backends; `call` takes its name."""
    return [Variant(_name(backend), "ours", lambda backend=backend: (call(backend),)) for backend in choice.backends_for(case)]


def _values_of_sdd(x: Tensor, w: Tensor, rows: Topology) -> tuple[Tensor, ...]:
    return (reference.sdd(_wide(x), _wide(w), rows).values,)


def _flops(case: Case, halves: int) -> int:
    return 2 * halves * case.shape.M * case.shape.H * case.shape.F


def _copy(case: Case, moved: int, name: str = "copy") -> Variant:
    """Reads half of `moved` bytes and writes the other half."""
    source = torch.zeros(moved // 2, dtype=torch.uint8, device=case.device)
    target = torch.empty_like(source)
    return Variant(name, "roof", lambda: (target.copy_(source),))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(reference_dtype(tensor.dtype))


def _wide_sparse(s: BlockSparse) -> BlockSparse:
    return BlockSparse(_wide(s.values), s.topology, s.columns, s.transposed)
