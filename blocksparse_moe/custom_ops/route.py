"""The choice of experts by a Triton kernel, as a registered op; `router.choice` is what it computes, in torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .define import define_op, differentiate, no_gradients

MAX_EXPERTS = 4096
"""Above it a row is too long for the registers of a program; torch's operators make the same choice."""


def _run(*args: Any) -> Any:
    from blocksparse_moe_kernels.triton.replay import replay
    from blocksparse_moe_kernels.triton.route import route

    return replay(route, *args)


def _fake(logits, correction_bias, top_k, *_) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)


def _setup(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    logits, _, _, normalize, score, scaling_factor, *_ = inputs
    weights, ids = output
    ctx.mark_non_differentiable(ids)
    needs_logits = score != "softmax" or not normalize
    ctx.save_for_backward(logits if needs_logits else None, weights, ids)
    ctx.rest = (logits.shape[1], normalize, score, scaling_factor)


def _backward(ctx, grad, _):
    if grad is None:
        return no_gradients(9)
    return _route_backward(grad, *ctx.saved_tensors, *ctx.rest), *no_gradients(8)


def _backward_run(*args: Any) -> Any:
    from blocksparse_moe_kernels.triton.replay import replay
    from blocksparse_moe_kernels.triton.route import route_backward

    return replay(route_backward, *args)


def _backward_fake(grad, logits, weights, ids, num_experts, *_) -> Tensor:
    return grad.new_empty(grad.shape[0], num_experts)


route = define_op(
    "route",
    "Tensor logits, Tensor? correction_bias, int top_k, bool normalize, str score, float scaling_factor, int num_groups, "
    "int top_groups, str group_score",
    "(Tensor weights, Tensor ids)",
    _run,
    _fake,
)
_route_backward = define_op(
    "route_backward",
    "Tensor grad, Tensor? logits, Tensor weights, Tensor ids, int num_experts, bool normalize, str score, float scaling_factor",
    "Tensor",
    _backward_run,
    _backward_fake,
)
differentiate("route", _backward, _setup)


def _no_second_order(ctx, *grads):
    raise NotImplementedError(
        'route: second-order gradients are not implemented. Use operators of torch, as in Router(..., backend="torch").'
    )


differentiate("route_backward", _no_second_order, lambda ctx, inputs, output: None)
