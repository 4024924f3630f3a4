"""Tokens to padded rows and back, and the activation between the two products: our kernels, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from blocksparse_moe_kernels import Activation, BlockSparse, Columns
from blocksparse_moe_kernels.padding import PaddedRows


def _of_first_order(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """A backward pass that refuses to be differentiated: autograd's own refusal is not on the way to every gradient."""

    @wraps(backward)
    def checked(ctx: Any, *grads: Tensor) -> tuple:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "backend 'te': second-order gradients are not implemented, and create_graph=True asks for what they need. "
                "Leave it out, or compose sdd, an activation, dsd and combine, which have no precision."
            )
        return backward(ctx, *grads)

    return checked


class Spread(Function):
    """x [T, H] -> [P, H]: the rows of each expert, zeros where padding is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, padded: PaddedRows, kernels: Any) -> Tensor:
        ctx.padded, ctx.kernels = padded, kernels
        return kernels.gather_rows(x, padded.tokens)

    @staticmethod
    @_of_first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.kernels.sum_slots(grad, ctx.padded.rows, ctx.padded.topology), None, None


class Collect(Function):
    """y [P, H] -> [T, H]: the sum of each token's rows."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, padded: PaddedRows, kernels: Any) -> Tensor:
        ctx.padded, ctx.kernels = padded, kernels
        return kernels.sum_slots(y, padded.rows, padded.topology)

    @staticmethod
    @_of_first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.kernels.gather_rows(grad, ctx.padded.tokens), None, None


class SpreadWeights(Function):
    """Routing weights [T, K] or [M] by slot -> [P], zero where padding is."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, padded: PaddedRows, kernels: Any) -> Tensor:
        ctx.shape, ctx.padded, ctx.kernels = weights.shape, padded, kernels
        return kernels.gather_rows(weights.reshape(-1, 1), padded.slots).flatten()

    @staticmethod
    @_of_first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.kernels.gather_rows(grad.unsqueeze(1), ctx.padded.rows).view(ctx.shape), None, None


class ScaledActivation(Function):
    """pre [P, halves * F], weights [P] -> weights * activation(pre) [P, F]."""

    @staticmethod
    def forward(ctx: Any, pre: Tensor, weights: Tensor, activation: Activation, padded: PaddedRows, kernels: Any) -> Tensor:
        ctx.save_for_backward(pre, weights)
        ctx.activation, ctx.padded, ctx.kernels = activation, padded, kernels
        return kernels.scaled_activation(pre, activation, weights)

    @staticmethod
    @_of_first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pre, weights = ctx.saved_tensors
        activation, topology = ctx.activation, ctx.padded.padded
        columns = Columns.equal(grad.shape[1], topology.num_experts)
        # It writes over the gradient that it is given, which is autograd's.
        grad_pre, _, grad_weights = ctx.kernels.activation_backward(
            BlockSparse(grad.clone(), topology, columns),
            BlockSparse(pre, topology, columns.times(activation.halves)),
            activation,
            weights,
        )
        return grad_pre.values, grad_weights, None, None, None
