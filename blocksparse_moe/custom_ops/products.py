"""sdd, dsd, its transpose and combine as registered ops, each differentiated by the others: see the table in `ops`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blocksparse_moe_kernels import BlockSparse, Columns
from blocksparse_moe_kernels.block_sparse import new_weight, values_shape

from ..products import implementation
from .define import NUM_TOPOLOGY, TOPOLOGY, columns_of, define, differentiate, no_gradients, save, saved, unflatten

# -------------------------------------------------------------------- sdd


def _sdd_run(x, w, *arguments) -> Tensor:
    *flat, widths, order, backend = arguments
    topology = unflatten(flat)
    kernels = implementation(backend)
    s = kernels.sdd(x, w, topology, order=order, columns=None if widths is None else Columns.of(widths))
    return zero_unused(s, kernels)


def zero_unused(s: BlockSparse, kernels: Any) -> Tensor:
    """Values of s, with zeros behind the rows that are kept."""
    return kernels.zero_tail(s.values, *s.end())


def _sdd_fake(x, w, *arguments) -> Tensor:
    *flat, widths, _, _ = arguments
    topology = unflatten(flat)
    columns = columns_of(widths, w.shape[1:-1].numel(), topology)
    return x.new_empty(values_shape(topology.num_slots, columns))


def _sdd_setup(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    x, w, *topology, widths, order, backend = inputs
    save(ctx, (x, w), topology)
    ctx.rest = (widths, order, backend)


def _sdd_backward(ctx, grad):
    (x, w), topology = saved(ctx)
    widths, order, backend = ctx.rest
    grad_x = grad_w = None
    if grad is not None and ctx.needs_input_grad[0]:
        grad_x = _dsd(grad, w, *topology, widths, backend)
        if order == "tokens":
            grad_x = _combine(grad_x, None, *topology, backend)
    if grad is not None and ctx.needs_input_grad[1]:
        grad_w = _dsd_transposed(grad, x, w, *topology, widths, order, backend)
    return grad_x, grad_w, *no_gradients(NUM_TOPOLOGY + 3)


_sdd = define("sdd", f"Tensor x, Tensor w, {TOPOLOGY}, SymInt[]? widths, str order, str backend", "Tensor", _sdd_run, _sdd_fake)
differentiate("sdd", _sdd_backward, _sdd_setup)


# -------------------------------------------------------------------- dsd


def _dsd_run(s, w, *arguments) -> Tensor:
    *flat, widths, backend = arguments
    topology = unflatten(flat)
    kernels = implementation(backend)
    columns = columns_of(widths, w.shape[1:-1].numel(), topology)
    y = kernels.dsd(BlockSparse(s, topology, columns), w)
    return kernels.zero_tail(y, topology.offsets, y.shape[1])


def _dsd_fake(s, w, *arguments) -> Tensor:
    return s.new_empty(unflatten(arguments[:NUM_TOPOLOGY]).num_slots, w.shape[-1])


def _dsd_setup(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    s, w, *topology, widths, backend = inputs
    save(ctx, (s, w), topology)
    ctx.rest = (widths, backend)


def _dsd_backward(ctx, grad):
    (s, w), topology = saved(ctx)
    widths, backend = ctx.rest
    grad_s = grad_w = None
    if grad is not None and ctx.needs_input_grad[0]:
        grad_s = _sdd(grad, w, *topology, widths, "rows", backend)
    if grad is not None and ctx.needs_input_grad[1]:
        grad_w = _dsd_transposed(s, grad, w, *topology, widths, "rows", backend)
    return grad_s, grad_w, *no_gradients(NUM_TOPOLOGY + 2)


_dsd = define("dsd", f"Tensor s, Tensor w, {TOPOLOGY}, SymInt[]? widths, str backend", "Tensor", _dsd_run, _dsd_fake)
differentiate("dsd", _dsd_backward, _dsd_setup)


# -------------------------------------------------------------------- transposed dsd


def _dsd_transposed_run(s, x, like, *arguments) -> Tensor:
    *flat, widths, order, backend = arguments
    topology = unflatten(flat)
    columns = columns_of(widths, s.shape[-1], topology)
    return implementation(backend).dsd_transposed(BlockSparse(s, topology, columns), x, order=order, like=like)


def _dsd_transposed_fake(s, x, like, *arguments) -> Tensor:
    if like is not None:
        return torch.empty_like(like)
    *flat, widths, _, _ = arguments
    topology = unflatten(flat)
    return new_weight(s, columns_of(widths, s.shape[-1], topology), x.shape[1])


def _dsd_transposed_setup(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    s, x, _, *topology, widths, order, backend = inputs
    save(ctx, (s, x), topology)
    ctx.rest = (widths, order, backend)


def _dsd_transposed_backward(ctx, grad):
    (s, x), topology = saved(ctx)
    widths, order, backend = ctx.rest
    grad_s = grad_x = None
    if grad is not None and ctx.needs_input_grad[0]:
        grad_s = _sdd(x, grad, *topology, widths, order, backend)
    if grad is not None and ctx.needs_input_grad[1]:
        grad_x = _dsd(s, grad, *topology, widths, backend)
        if order == "tokens":
            grad_x = _combine(grad_x, None, *topology, backend)
    return grad_s, grad_x, *no_gradients(NUM_TOPOLOGY + 4)


_dsd_transposed = define(
    "dsd_transposed",
    f"Tensor s, Tensor x, Tensor? like, {TOPOLOGY}, SymInt[]? widths, str order, str backend",
    "Tensor",
    _dsd_transposed_run,
    _dsd_transposed_fake,
)
differentiate("dsd_transposed", _dsd_transposed_backward, _dsd_transposed_setup)


# -------------------------------------------------------------------- combine


def _combine_run(y, weights, *arguments) -> Tensor:
    *flat, backend = arguments
    return implementation(backend).combine(y, unflatten(flat), weights)


def _combine_fake(y, weights, *arguments) -> Tensor:
    return y.new_empty(unflatten(arguments[:NUM_TOPOLOGY]).num_tokens, y.shape[1])


def _combine_setup(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    y, weights, *topology, _ = inputs
    save(ctx, (None if weights is None else y, weights), topology)


def _combine_backward(ctx, grad):
    (y, weights), flat = saved(ctx)
    grad_y = grad_weights = None
    if grad is not None:
        topology = unflatten(flat)
        row = torch.arange(topology.num_slots, device=grad.device)
        kept = row < topology.num_rows
        if topology.num_tokens:
            spread = torch.where(kept[:, None], grad.index_select(0, topology.tokens), 0)
        else:
            spread = grad.new_zeros(topology.num_slots, grad.shape[1])
        slots = topology.slots.long()
        if ctx.needs_input_grad[0]:
            grad_y = spread
            if weights is not None:
                scale = torch.where(kept, weights.reshape(-1)[slots], 0)  # a dropped slot may have a weight of NaN
                grad_y = (spread * scale[:, None]).to(grad.dtype)
        if ctx.needs_input_grad[1]:
            wide = torch.promote_types(y.dtype, torch.float32)
            dots = torch.where(kept, torch.linalg.vecdot(spread.to(wide), y.to(wide)), 0)
            grad_weights = torch.zeros_like(dots).scatter(0, slots, dots).view(weights.shape).to(weights.dtype)
    return grad_y, grad_weights, *no_gradients(NUM_TOPOLOGY + 1)


_combine = define("combine", f"Tensor y, Tensor? weights, {TOPOLOGY}, str backend", "Tensor", _combine_run, _combine_fake)
differentiate("combine", _combine_backward, _combine_setup)
