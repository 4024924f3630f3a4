"""Experts that nobody chooses any more, drawn anew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import index

import torch
from torch import Tensor, nn

from blocksparse_moe_kernels.launch import check_type

from ..checks import number
from .layer import ExpertWeight, Layer
from .layers import find_layers


@torch.no_grad()
def reinit_experts(
    model: nn.Module,
    expert_ids: Iterable[int],
    *,
    layer: str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    std: float | None = None,
    router: bool = True,
    generator: torch.Generator | None = None,
) -> None:
    """Draw the weights of collapsed experts anew, as at the beginning: normal, biases nil, and forget what the optimizer knows.

    Args:
        model: a `dMoE`, or a model that has MoE layers, ours or those of transformers.
        expert_ids: the experts, below E.
        layer: name of the module that holds them in the model, as a monitor has it; may be left out where there is one only.
        optimizer: its state of those experts becomes nil (moments of Adam and Adafactor, momentum), that of others stays. What
            it holds of no expert, as its step, stays as well.
        std: of the normal distribution; the layer's own if not given.
        router: draw what the router holds of these experts anew as well: rows of the gate with the mean and the standard
            deviation that the others' have in each column, biases as the mean of the others'.
        generator: of the random numbers.
    Raises:
        ValueError: no such layer or expert, or more than one layer and no name; TypeError: ids that are no integers.
        NotImplementedError: the weights are distributed.
    """
    check_type("reinit_experts", "model", model, nn.Module, "Give the model, or a dMoE.")
    if optimizer is not None:
        check_type("reinit_experts", "optimizer", optimizer, torch.optim.Optimizer, "Give the one of these weights.")
    found = _named(model, layer)
    ids = _indices(expert_ids, found.num_experts)
    if not ids:
        return
    deviation = found.init_std if std is None else std
    number("reinit_experts", "std", deviation, at_least=0)
    for weight in found.expert_weights():
        for part in _parts(weight, weight.parameter.data, ids):
            if weight.name.endswith("bias"):
                part.zero_()
            else:
                part.normal_(std=deviation, generator=generator)
        _forget(optimizer, weight, ids)
    if router and found.router is not None:
        _renew_gate(found, ids, optimizer, generator)


def _renew_gate(
    layer: Layer, ids: list[int], optimizer: torch.optim.Optimizer | None, generator: torch.Generator | None
) -> None:
    assert layer.router is not None
    others = [expert for expert in range(layer.columns) if expert not in ids] or ids
    for name, held in (*layer.router.named_parameters(), *layer.router.named_buffers()):
        if held.ndim == 0 or len(held) != layer.columns:
            continue
        values = held.data[others].float()
        drawn = values.mean(dim=0).expand(len(ids), *values.shape[1:]).clone()
        if held.ndim > 1 and len(others) > 1:
            noise = torch.randn(drawn.shape, generator=generator, device=drawn.device)
            drawn += noise * values.std(dim=0)
        held.data[ids] = drawn.to(held.dtype)
        if isinstance(held, nn.Parameter):
            _forget(optimizer, ExpertWeight(name, held, None), ids)


def _indices(expert_ids: Iterable[int], num_experts: int) -> list[int]:
    wanted = f"reinit_experts: expert_ids must be integers in [0, {num_experts}), such as [3, 7]; got {expert_ids!r}."
    try:
        given = expert_ids.tolist() if hasattr(expert_ids, "tolist") else list(expert_ids)
        if any(isinstance(expert, bool) for expert in given):
            raise TypeError(f"{wanted} Of a mask take mask.nonzero().flatten().")
        ids = sorted(set(map(index, given)))
    except TypeError as error:
        raise error if str(error).startswith(wanted) else TypeError(wanted) from None
    if ids and not 0 <= ids[0] <= ids[-1] < num_experts:
        raise ValueError(wanted)
    return ids


def _named(model: nn.Module, name: str | None) -> Layer:
    layers = find_layers(model)
    names = [layer.name for layer in layers]
    if name is None and len(layers) == 1:
        return layers[0]
    for layer in layers:
        if layer.name == name:
            return layer
    raise ValueError(
        f"reinit_experts: layer must be one of {', '.join(map(repr, names)) or 'none: no MoE layer'}; got {name!r}."
    )


def _parts(weight: ExpertWeight, tensor: Tensor, ids: list[int]) -> Iterator[Tensor]:
    """The rows of each of the experts, as views."""
    if hasattr(tensor, "full_tensor"):
        raise NotImplementedError("reinit_experts: the weights are distributed over ranks; call it before they are sharded.")
    parts = weight.of_each(tensor)
    return (parts[expert] for expert in ids)


def _forget(optimizer: torch.optim.Optimizer | None, weight: ExpertWeight, ids: list[int]) -> None:
    if optimizer is not None:
        for held in optimizer.state.get(weight.parameter, {}).values():
            # Moments have the shape of the parameter; Adafactor's have its first dimension.
            if isinstance(held, Tensor) and held.shape[:1] == weight.parameter.shape[:1]:
                for part in _parts(weight, held, ids):
                    part.zero_()
