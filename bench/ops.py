"""The ops that can be measured: one function each, which lines up the variants that do the same work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor, nn

import blocksparse_moe
from blocksparse_moe.products import implementation
from blocksparse_moe.router.choice import choose_experts
from blocksparse_moe_kernels import BlockSparse, Columns, Topology, get_activation, reference
from blocksparse_moe_kernels.config import ceil_div

from .check import reference_dtype
from .decoder import IMPLEMENTATIONS, decoder_layer
from .inputs import Case, make_logits, make_router, random_dense, random_sparse, rows_of
from .layers import expected_layer, layer_tasks
from .lineup import Choice, and_gradients, copy_of, name_of, ours, part, wide
from .low_precision import low_precision
from .peers import PEERS, PRODUCT_PEERS, build_peers
from .products import dsd, grad_down, grad_hidden, grad_rows, grad_up, sdd, sdd_activation
from .variants import Layer, Task, Variant

BEYOND_CACHES = 2**28
"""Bytes that no GPU's cache holds."""

# -------------------------------------------------------------------- the layer


def expert_mlp(case: Case, choice: Choice) -> list[Task]:
    """The experts through autograd, routing given and its topology inside; roofs: their dense GEMMs, reading the weights."""
    peers, left_out = build_peers(case, choice.peers)
    layers = [_our_layer(case, backend) for backend in choice.backends_for(case)] + peers
    return layer_tasks("expert_mlp", case, choice, layers, partial(expected_layer, case), left_out)


def dMoE(case: Case, choice: Choice) -> list[Task]:
    """The whole layer through autograd, router inside; the roofs are those of expert_mlp."""
    x, gate = make_router(case)
    layers = [_our_module(case, x, gate, backend) for backend in choice.backends_for(case)]
    return layer_tasks("dMoE", case, choice, layers, partial(_expected_module, case, x, gate), {})


def monitor(case: Case, choice: Choice) -> list[Task]:
    """The whole layer with a `MoEMonitor` of it and without, step by step; long windows have what it measures at intervals."""
    x, gate = make_router(case)
    layers = []
    for backend in choice.backends_for(case):
        layers += [_our_module(case, x, gate, backend), _our_module(case, x, gate, backend, watched=True)]
    return layer_tasks("monitor", case, choice, layers, partial(_expected_module, case, x, gate), {})


def _our_layer(case: Case, backend: str) -> Layer:
    x, weights, up_proj, down_proj = leaves = case.leaves()

    def forward() -> Tensor:
        topology = Topology.from_ids(case.expert_ids, case.shape.E)
        return blocksparse_moe.expert_mlp(x, topology, up_proj, down_proj, weights, backend=backend)

    return Layer(name_of(backend), "ours", leaves, forward)


def _our_module(case: Case, x: Tensor, gate: Tensor, backend: str, *, watched: bool = False) -> Layer:
    """The module on given hidden states [T, H] and gate [E, H]; its leaves are x, the gate and the weights of the experts."""
    shape = case.shape
    config = blocksparse_moe.MoEConfig(shape.H, shape.F, shape.E, router=_router_config(case))
    module = blocksparse_moe.dMoE(config, device="meta", backend=backend)
    x, _, up_proj, down_proj = replace(case, x=x).leaves()
    leaves = (x, nn.Parameter(gate), nn.Parameter(up_proj.detach()), nn.Parameter(down_proj.detach()))
    _, module.router.weight, module.experts.gate_up_proj, module.experts.down_proj = leaves
    if not watched:
        return Layer(name_of(backend), "ours", leaves, lambda: module(x))
    for weight in leaves[1:]:
        weight.grad = torch.zeros_like(weight)  # what the monitor finds there
    watch = blocksparse_moe.MoEMonitor(module)

    def forward() -> Tensor:
        watch.step()
        return module(x)

    return Layer(f"{name_of(backend)} watched", "ours", leaves, forward)


def _router_config(case: Case) -> blocksparse_moe.RouterConfig:
    return blocksparse_moe.RouterConfig(case.shape.K, normalize=case.shape.K > 1)


def _expected_module(case: Case, x: Tensor, gate: Tensor, with_gradients: bool) -> tuple[Tensor, ...]:
    x, _, up_proj, down_proj = replace(case, x=x).leaves(reference_dtype(case.dtype))
    gate = wide(gate).requires_grad_()
    config = _router_config(case)
    with torch.set_grad_enabled(with_gradients):
        _, weights, expert_ids = reference.router(x, gate, config.top_k, normalize=config.normalize)
        y = reference.expert_mlp(x, Topology.from_ids(expert_ids, case.shape.E), up_proj, down_proj, weights)
    return and_gradients(y, (x, gate, up_proj, down_proj), case.grad) if with_gradients else (y,)


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
        return reference.router(wide(x), wide(gate), config.top_k, normalize=config.normalize)

    return [part("router", variants, expected, flops=2 * case.shape.T * case.shape.H * case.shape.E)]


def route(case: Case, choice: Choice) -> list[Task]:
    """From logits to experts and weights by several routers, without the gate; the roof is a copy of as many bytes. One call,
    whose input may be in a cache, and several with an input each, which are not."""
    logits = make_logits(case)
    leaf, grad = logits.clone().requires_grad_(), torch.randn(case.shape.T, case.shape.K, device=case.device)
    rounds = ceil_div(BEYOND_CACHES, max(1, logits.nbytes))
    if rounds > 64 or case.device.type == "cpu":  # too small to be anywhere but in the cache
        rounds = 1
    inputs, from_memory = [logits.clone() for _ in range(rounds)], f"forward, {rounds} inputs"
    stages = ["forward", *([from_memory] if rounds > 1 else []), "forward+backward"]
    variants: dict[str, list[Variant]] = {stage: [] for stage in stages}
    for name, config in _routers(case).items():
        bias = torch.zeros(case.shape.E, device=case.device) if config.correction_bias else None
        expected = cache(partial(_expected_route, logits, grad, config, bias))
        for backend in choice.backends_for(case):

            def forward(config=config, bias=bias, backend=backend) -> tuple[Tensor, ...]:
                return choose_experts(logits, bias, config, backend)

            def forwards(config=config, bias=bias, backend=backend) -> tuple[Tensor, ...]:
                return [choose_experts(one, bias, config, backend) for one in inputs][-1]

            def forward_backward(config=config, bias=bias, backend=backend) -> tuple[Tensor, ...]:
                weights, ids = choose_experts(leaf, bias, config, backend)
                return weights.detach(), ids, *torch.autograd.grad(weights, leaf, grad)

            runs = {"forward": forward, from_memory: forwards, "forward+backward": forward_backward}
            for stage in stages:
                variants[stage].append(Variant(f"{name_of(backend)}, {name}", "ours", runs[stage], expected=expected))
    chosen = 12 * grad.numel()  # weights in fp32, ids in int64
    once = logits.nbytes + chosen
    moved = {"forward": once, from_memory: rounds * once, "forward+backward": once + 2 * logits.nbytes + chosen + grad.nbytes}
    copies = {stage: copy_of(case, moved[stage], times=rounds if stage == from_memory else 1) for stage in stages}
    return [part("route", [*variants[stage], copies[stage]], tuple, stage=stage, moved=moved[stage]) for stage in stages]


def _routers(case: Case) -> dict[str, blocksparse_moe.RouterConfig]:
    """Two by softmax, one by each other score with a bias, and DeepSeek-V3's, with as many groups as there can be."""
    E, K = case.shape.E, case.shape.K
    groups = next(groups for groups in (8, 4, 2, 1) if E % groups == 0 and E // groups * max(1, groups // 2) >= K)
    deepseek = blocksparse_moe.RouterConfig(
        K, score="sigmoid", normalize=K > 1, scaling_factor=2.5, correction_bias=True, num_groups=groups,
        top_groups=max(1, groups // 2),
    )  # fmt: skip
    biased = replace(deepseek, num_groups=1, top_groups=1)
    rest = {
        "softmax": blocksparse_moe.RouterConfig(K, normalize=False),
        "sigmoid": biased,
        "sqrt softplus": replace(biased, score="sqrt_softplus"),
        "sigmoid in groups": deepseek,
    }
    return ({"softmax, normalised": blocksparse_moe.RouterConfig(K, normalize=True)} if K > 1 else {}) | rest


def _expected_route(
    logits: Tensor, grad: Tensor, config: blocksparse_moe.RouterConfig, bias: Tensor | None
) -> tuple[Tensor, ...]:
    leaf, identity = wide(logits).requires_grad_(), torch.eye(logits.shape[1], device=logits.device)
    names = ("normalize", "score", "scaling_factor", "num_groups", "top_groups", "group_score")
    options = {name: getattr(config, name) for name in names}
    _, weights, ids = reference.router(leaf, wide(identity), config.top_k, correction_bias=bias, **options)
    return weights.detach(), ids, *torch.autograd.grad(weights, leaf, wide(grad))


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
    return [part("topology", [Variant("blocksparse", "ours", run), copy_of(case, moved)], expected, moved=moved)]


def combine(case: Case, choice: Choice) -> list[Task]:
    """Rows back to tokens, weighted; the roof is a copy of as many bytes."""
    rows, weights = rows_of(case), case.routing_weights
    y = random_dense(case, case.shape.M, case.shape.H)
    moved = y.nbytes + case.x.nbytes + weights.nbytes + rows.rows.nbytes
    variants = [
        *ours(case, choice, lambda backend: blocksparse_moe.combine(y, rows, weights, backend=backend)),
        copy_of(case, moved),
    ]
    return [part("combine", variants, lambda: (reference.combine(wide(y), rows, weights),), moved=moved)]


def activation_backward(case: Case, choice: Choice) -> list[Task]:
    """Gradients of pre-activation and routing weights, and the scaled hidden activation; the roof is a copy of as many bytes.

    The pass overwrites the gradient of the hidden activation with the scaled activation. Here one is equal to the other, so
    that every call finds what the first one found.
    """
    activation, rows, weights = get_activation("swiglu"), rows_of(case), case.routing_weights
    pre = random_sparse(case, 2 * case.shape.F)
    scale = weights.reshape(-1)[rows.slots.long(), None]
    grad = (scale * activation(wide(pre.values))).to(case.dtype)

    def variant(backend: str) -> Variant:
        own = BlockSparse(grad.clone(), rows, Columns.equal(case.shape.F, case.shape.E))

        def run() -> tuple[Tensor, ...]:
            grad_pre, scaled, grad_weights = implementation(backend).activation_backward(own, pre, activation, weights)
            return grad_pre.values, scaled.values, grad_weights

        return Variant(name_of(backend), "ours", run)

    def expected() -> tuple[Tensor, ...]:
        leaf = wide(pre.values).requires_grad_()
        hidden = activation(leaf)
        (grad_pre,) = torch.autograd.grad(scale * hidden, leaf, wide(grad))
        grad_weights = torch.empty_like(scale, dtype=leaf.dtype)
        grad_weights[rows.slots.long(), 0] = torch.linalg.vecdot(wide(grad), hidden.detach())
        return grad_pre, (scale * hidden).detach(), grad_weights.view_as(weights)

    moved = 2 * (grad.nbytes + pre.values.nbytes + weights.nbytes) + rows.slots.nbytes
    variants = [variant(backend) for backend in choice.backends_for(case)]
    return [part("activation_backward", [*variants, copy_of(case, moved)], expected, stage="backward", moved=moved)]


OPS: dict[str, Callable[[Case, Choice], list[Task]]] = {
    op.__name__: op
    for op in (
        dMoE,
        monitor,
        expert_mlp,
        low_precision,
        decoder_layer,
        router,
        route,
        topology,
        sdd,
        sdd_activation,
        dsd,
        combine,
        grad_hidden,
        activation_backward,
        grad_down,
        grad_rows,
        grad_up,
    )
}

LAYERS = ("dMoE", "monitor", "expert_mlp", "low_precision", "decoder_layer")
"""The ops of which stages can be chosen."""

WITHOUT_BACKENDS = ("low_precision", "router", "topology")
"""The ops that run every backend, or have one way only."""

ROUTED_BY_ITSELF = ("decoder_layer",)
"""The ops whose gate chooses, whatever the case says."""


def peers_of(op: str) -> tuple[str, ...]:
    """Names of those that do the work of `op` as well."""
    return tuple({"expert_mlp": PEERS, "decoder_layer": IMPLEMENTATIONS, **PRODUCT_PEERS}.get(op, ()))
