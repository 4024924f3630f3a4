"""One stacked parameter as the separate weights that Transformer Engine takes: views, without a copy in either direction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def views_of(stacked: Tensor, parameter: Tensor) -> tuple[Tensor, ...]:
    """The E matrices of `stacked` [E, N, K], differentiable.

    Args:
        stacked: what is multiplied: the parameter, or a copy of it in another dtype.
        parameter: whose `main_grad`, if it has one, the weight gradients are to be added to. Megatron's convention: a buffer
            of the parameter's shape, and `grad_added_to_main_grad` to be set where that attribute exists. With
            `overwrite_main_grad` it is overwritten.
    """
    views = _Views.apply(stacked, parameter)
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is not None:
        for view, part in zip(views, main_grad.unbind(), strict=True):
            view.main_grad = part
            view.overwrite_main_grad = getattr(parameter, "overwrite_main_grad", False)
    return views


def accumulates(parameter: Tensor | None) -> bool:
    """Whether weight gradients, if any are wanted, go to a `main_grad`."""
    return parameter is not None and parameter.requires_grad and getattr(parameter, "main_grad", None) is not None


class _Views(Function):
    @staticmethod
    def forward(ctx: Any, stacked: Tensor, parameter: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shape = stacked.shape
        ctx.parameter = parameter if accumulates(parameter) else None  # as the module was told
        return stacked.unbind()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        parameter = ctx.parameter
        if parameter is None:
            return stacked_grads(grads, ctx.shape), None
        if not hasattr(parameter, "grad_added_to_main_grad"):
            return None, None
        # Megatron's hooks want a gradient to come, and look at the flag instead of at its values.
        parameter.grad_added_to_main_grad = True
        return parameter.new_zeros(()).expand(ctx.shape), None


def stacked_grads(grads: tuple[Tensor | None, ...], shape: torch.Size) -> Tensor | None:
    """[E, N, K] from E gradients; as they are, if they lie in turn in one piece of memory, as Transformer Engine makes them."""
    first = grads[0]
    if all(grad is None for grad in grads):
        return None
    if first is not None and first.is_contiguous():
        storage, size = first.untyped_storage().data_ptr(), first.numel()
        if all(
            grad is not None
            and grad.is_contiguous()
            and grad.untyped_storage().data_ptr() == storage
            and grad.storage_offset() == first.storage_offset() + number * size
            for number, grad in enumerate(grads)
        ):
            return first.as_strided(shape, (size, *first.stride()))
    some = next(grad for grad in grads if grad is not None)
    return torch.stack([some.new_zeros(shape[1:]) if grad is None else grad for grad in grads])
