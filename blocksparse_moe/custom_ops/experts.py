"""The expert MLP as registered ops: two autograd nodes, so that little is kept and it is freed early.

    up     pre = sdd(x, w_up), a = activation(pre)          saves x; a is neither differentiable nor saved
    down   y = combine(dsd(a, w_down), p)                   saves pre, and returns its gradient

With dA' = sdd(dy, w_down) unscaled: dp = <dA', a>, dA = p dA', dw_down = dsd((p a).T, dy), a recomputed from pre; the form of
dp is SonicMoE's, arXiv:2512.14080. Autograd frees pre when `down` returns, before dx and dw_up are made.

`expert_mlp_recompute` is both as one node that saves its inputs only. `expert_mlp` does the same and has no gradient, for
inference: an op that has one costs more to call.

Kernels read no row that was dropped. Such rows of pre and of its gradient are zero for those who read whole tensors: hooks of
saved tensors, and anomaly detection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blocksparse_moe_kernels import Activation, BlockSparse, Columns, Topology, get_activation
from blocksparse_moe_kernels.block_sparse import values_shape

from ..products import implementation
from .define import NUM_TOPOLOGY, TOPOLOGY, columns_of, define, differentiate, no_gradients, save, saved, unflatten
from .products import zero_unused

EXPERTS = f"{TOPOLOGY}, SymInt[]? widths, str activation, str backend"


def _experts(w: Tensor, arguments: Sequence[Any]) -> tuple[Topology, Columns, Activation, Any]:
    """(topology, columns F_e, activation, kernels) from the arguments `EXPERTS` of an op; w is either weight."""
    *flat, widths, name, backend = arguments
    topology, activation = unflatten(flat), get_activation(name)
    return topology, columns_of(widths, _hidden_width(w, activation), topology), activation, implementation(backend)


def _hidden_width(w: Tensor, activation: Activation) -> int:
    """F, from up [E, weight_halves, N, H] or down [E, F, H]; of no use where the weights are flat."""
    return w.shape[1] * w.shape[2] // activation.halves if w.ndim == 4 else w.shape[-2]


def _flat_columns(w: Tensor, columns: Columns) -> Columns | None:
    """Columns as the launchers want them: beside a flat weight only."""
    return columns if w.ndim == 2 else None


def _expert_up_run(x, w, bias, *arguments) -> tuple[Tensor, Tensor]:
    topology, columns, activation, kernels = _experts(w, arguments)
    pre, hidden = kernels.sdd_activation(x, w, topology, activation, columns=_flat_columns(w, columns), bias=bias)
    return zero_unused(pre, kernels), hidden.values


def _expert_up_fake(x, w, bias, *arguments) -> tuple[Tensor, Tensor]:
    *flat, widths, name, _ = arguments
    topology, activation = unflatten(flat), get_activation(name)
    columns = columns_of(widths, _hidden_width(w, activation), topology)
    pre_columns = columns.times(activation.halves)
    shapes = (values_shape(topology.num_slots, pre_columns), values_shape(topology.num_slots, columns))
    return x.new_empty(shapes[0]), x.new_empty(shapes[1])


def _expert_up_setup(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    x, w, bias, *topology, widths, activation, backend = inputs
    save(ctx, (x, w, bias), topology)
    ctx.rest = (widths, activation, backend)


def _expert_up_backward(ctx, grad_pre, _):
    grads: tuple[Tensor | None, ...] = no_gradients(3)
    if grad_pre is not None:
        (x, w, bias), topology = saved(ctx)
        wanted = list(ctx.needs_input_grad[:3])
        grads = _expert_up_grads(grad_pre, x, w, bias, wanted, *topology, *ctx.rest)
        grads = tuple(grad if want else None for grad, want in zip(grads, wanted, strict=True))
    return *grads, *no_gradients(NUM_TOPOLOGY + 3)


def _expert_up_grads_run(grad_pre, x, w, bias, wanted, *arguments) -> tuple[Tensor, Tensor, Tensor]:
    topology, columns, activation, kernels = _experts(w, arguments)
    s = BlockSparse(grad_pre, topology, columns.times(activation.halves))
    want_x, want_w, want_bias = wanted
    # First, so that its rows are freed before the gradient of the weight is made.
    grad_x = kernels.combine(kernels.dsd(s, w), topology) if want_x else x.new_empty(0)
    grad_w = kernels.dsd_transposed(s, x, order="tokens", like=w) if want_w else x.new_empty(0)
    grad_bias = kernels.expert_sum(s).view(bias.shape) if want_bias else x.new_empty(0)
    return grad_x, grad_w, grad_bias


def _expert_up_grads_fake(grad_pre, x, w, bias, wanted, *arguments) -> tuple[Tensor, Tensor, Tensor]:
    want_x, want_w, want_bias = wanted
    return (
        _contiguous_like(x) if want_x else x.new_empty(0),
        torch.empty_like(w) if want_w else x.new_empty(0),
        _contiguous_like(bias) if want_bias else x.new_empty(0),
    )


def _contiguous_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _expert_down_run(pre, hidden, w, bias, routing_weights, *arguments) -> Tensor:
    topology, columns, _, kernels = _experts(w, arguments)
    y = kernels.dsd(BlockSparse(hidden, topology, columns), w, bias=bias)
    return kernels.combine(y, topology, routing_weights)


def _expert_down_fake(pre, hidden, w, bias, routing_weights, *arguments) -> Tensor:
    return hidden.new_empty(unflatten(arguments[:NUM_TOPOLOGY]).num_tokens, w.shape[-1])


def _expert_down_setup(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    pre, _, w, bias, routing_weights, *topology, widths, activation, backend = inputs
    save(ctx, (pre, w, bias, routing_weights), topology)
    ctx.rest = (widths, activation, backend)


def _expert_down_backward(ctx, grad):
    grads: tuple[Tensor | None, ...] = no_gradients(4)
    if grad is not None:
        (pre, w, bias, routing_weights), topology = saved(ctx)
        needs = ctx.needs_input_grad
        wanted = [needs[0], *needs[2:5]]
        grads = _expert_down_grads(grad, pre, w, bias, routing_weights, wanted, *topology, *ctx.rest)
        grads = tuple(grad if want else None for grad, want in zip(grads, wanted, strict=True))
    return grads[0], None, *grads[1:], *no_gradients(NUM_TOPOLOGY + 3)


def _expert_down_grads_run(grad, pre, w, bias, routing_weights, wanted, *arguments) -> tuple[Tensor, ...]:
    topology, columns, activation, kernels = _experts(w, arguments)
    want_pre, want_w, want_bias, want_weights = wanted
    grad_pre = grad_w = grad_bias = grad_weights = None
    if want_pre or want_w or want_weights:
        grad_hidden = kernels.sdd(grad, w, topology, order="tokens", columns=_flat_columns(w, columns))
        dot = kernels.bias_dot(grad, bias, topology) if want_weights and bias is not None else None
        pre_sparse = BlockSparse(pre, topology, columns.times(activation.halves))
        s, scaled, grad_weights = kernels.activation_backward(grad_hidden, pre_sparse, activation, routing_weights, dot)
        grad_pre = s.values if want_pre else None
        if want_w:
            grad_w = kernels.dsd_transposed(scaled, grad, order="tokens", like=w)
    if want_bias:
        grad_bias = kernels.expert_sum_tokens(grad, topology, routing_weights)
    grads = (grad_pre, grad_w, grad_bias, grad_weights)
    return tuple(grad.new_empty(0) if tensor is None else tensor for tensor in grads)


def _expert_down_grads_fake(grad, pre, w, bias, routing_weights, wanted, *arguments) -> tuple[Tensor, ...]:
    want_pre, want_w, want_bias, want_weights = wanted
    empty = grad.new_empty(0)
    passes = want_pre or want_w or want_weights
    return (
        torch.empty_like(pre) if want_pre else empty.clone(),
        torch.empty_like(w) if want_w else empty.clone(),
        _contiguous_like(bias) if want_bias else empty.clone(),
        _contiguous_like(routing_weights) if passes and routing_weights is not None else empty.clone(),
    )


def _expert_mlp_run(x, up, up_bias, down, down_bias, routing_weights, *arguments) -> Tensor:
    topology, columns, activation, kernels = _experts(down, arguments)
    _, hidden = kernels.sdd_activation(
        x, up, topology, activation, columns=_flat_columns(up, columns), bias=up_bias, save_pre=False
    )
    return kernels.combine(kernels.dsd(hidden, down, bias=down_bias), topology, routing_weights)


def _expert_mlp_fake(x, up, up_bias, down, down_bias, routing_weights, *arguments) -> Tensor:
    return x.new_empty(unflatten(arguments[:NUM_TOPOLOGY]).num_tokens, down.shape[-1])


def _expert_mlp_setup(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    x, up, up_bias, down, down_bias, routing_weights, *topology, widths, activation, backend = inputs
    save(ctx, (x, up, up_bias, down, down_bias, routing_weights), topology)
    ctx.rest = (widths, activation, backend)


def _expert_mlp_backward(ctx, grad):
    """The backward passes of both nodes, with the pre-activation computed again."""
    grads: tuple[Tensor | None, ...] = no_gradients(6)
    if grad is not None:
        (x, up, up_bias, down, down_bias, routing_weights), topology = saved(ctx)
        arguments = (*topology, *ctx.rest)
        wanted = list(ctx.needs_input_grad[:6])
        wants_up, wants_down = wanted[:3], [any(wanted[:3]), *wanted[3:]]
        pre = _expert_up(x, up, up_bias, *arguments)[0]
        grad_pre, *of_down = _expert_down_grads(grad, pre, down, down_bias, routing_weights, wants_down, *arguments)
        del pre
        of_up = no_gradients(3)
        if any(wants_up):
            of_up = _expert_up_grads(grad_pre, x, up, up_bias, wants_up, *arguments)
        grads = tuple(grad if want else None for grad, want in zip((*of_up, *of_down), wanted, strict=True))
    return *grads, *no_gradients(NUM_TOPOLOGY + 3)


def _no_second_order(ctx, *grads):
    raise NotImplementedError(
        "expert_mlp: second-order gradients are not implemented. Build the layer from sdd, dsd and combine, which have "
        "gradients of any order and no precision, or call reference.expert_mlp; of a patched model call handle.restore()."
    )


def _save_nothing(ctx, inputs, output) -> None:
    pass


_expert_up = define(
    "expert_up", f"Tensor x, Tensor w, Tensor? bias, {EXPERTS}", "(Tensor, Tensor)", _expert_up_run, _expert_up_fake
)
differentiate("expert_up", _expert_up_backward, _expert_up_setup)
_expert_up_grads = define(
    "expert_up_backward",
    f"Tensor grad_pre, Tensor x, Tensor w, Tensor? bias, bool[] wanted, {EXPERTS}",
    "(Tensor, Tensor, Tensor)",
    _expert_up_grads_run,
    _expert_up_grads_fake,
)
differentiate("expert_up_backward", _no_second_order, _save_nothing)
_expert_down = define(
    "expert_down",
    f"Tensor pre, Tensor hidden, Tensor w, Tensor? bias, Tensor? routing_weights, {EXPERTS}",
    "Tensor",
    _expert_down_run,
    _expert_down_fake,
)
differentiate("expert_down", _expert_down_backward, _expert_down_setup)
_expert_down_grads = define(
    "expert_down_backward",
    f"Tensor grad, Tensor pre, Tensor w, Tensor? bias, Tensor? routing_weights, bool[] wanted, {EXPERTS}",
    "(Tensor, Tensor, Tensor, Tensor)",
    _expert_down_grads_run,
    _expert_down_grads_fake,
)
differentiate("expert_down_backward", _no_second_order, _save_nothing)
_EXPERT_MLP = (
    f"Tensor x, Tensor up, Tensor? up_bias, Tensor down, Tensor? down_bias, Tensor? routing_weights, {EXPERTS}",
    "Tensor",
    _expert_mlp_run,
    _expert_mlp_fake,
)
define("expert_mlp", *_EXPERT_MLP)
define("expert_mlp_recompute", *_EXPERT_MLP)
differentiate("expert_mlp_recompute", _expert_mlp_backward, _expert_mlp_setup)
