"""The gate's product of 16-bit operands as a registered op: operands as they are, sums and result in fp32.

Products of two bf16 or fp16 numbers are exact in fp32, so nothing is lost beside widening the operands first, which would cost
a copy of the hidden states and the tensor cores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .define import define_op, differentiate


def _run(x: Tensor, weight: Tensor) -> Tensor:
    if not x.is_cuda:
        return x.float() @ weight.float().mT
    multiply = torch.mm if x.ndim == 2 else torch.bmm
    return multiply(x, weight.mT, out_dtype=torch.float32)


def _fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[-2], dtype=torch.float32)


def _setup(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    x, weight = ctx.saved_tensors
    grad_x = grad_weight = None
    if grad is None:
        return grad_x, grad_weight
    # fp16 has not the range that the parts below need, which have no gradients of their own either.
    if x.dtype != torch.bfloat16 or torch.is_grad_enabled():
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight.float()).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (grad.T @ x.float()).to(x.dtype)
        return grad_x, grad_weight
    parts = _two_parts(grad)
    if ctx.needs_input_grad[0]:
        grad_x = parts @ torch.cat((weight, weight))
    if ctx.needs_input_grad[1]:
        grad_weight = _sum_over_tokens(parts, x).view(-1, 2, *weight.shape).sum(dim=(0, 1)).to(x.dtype)
    return grad_x, grad_weight


def _sum_over_tokens(parts: Tensor, x: Tensor) -> Tensor:
    """[pieces, 2 E, H] fp32: parts^T x, a long sum for few results, over equal pieces of the tokens for more parallelism."""
    pieces = 16 if len(x) % 16 == 0 else 1
    return linear_fp32(parts.unflatten(0, (pieces, -1)).mT, x.unflatten(0, (pieces, -1)).mT)


def _two_parts(grad: Tensor) -> Tensor:
    """[T, E] fp32 -> [T, 2 E] bf16, which add up to it in 16 bits: twice those that the gradients by it are rounded to."""
    T, E = grad.shape
    parts = grad.new_empty(T, 2, E, dtype=torch.bfloat16)
    parts[:, 0] = grad
    parts[:, 1] = grad - parts[:, 0]
    return parts.view(T, 2 * E)


linear_fp32 = define_op("linear_fp32", "Tensor x, Tensor weight", "Tensor", _run, _fake)
"""x [T, H] weight [E, H]^T, both of one 16-bit dtype -> [T, E] fp32; without gradients also of a batch of both."""

differentiate("linear_fp32", _backward, _setup)
