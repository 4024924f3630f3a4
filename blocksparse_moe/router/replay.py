"""Routing that was recorded, given back: the experts that a model chose when it generated, while it is trained on the result.

Source of the use: routing replay in reinforcement learning of MoE models, arXiv:2510.11370.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from blocksparse_moe_kernels.launch import check_type

from ..hooks import is_recomputed
from .output import RouterOutput
from .router import Router

Recording = dict[str, list[Tensor]]
"""By the name of each router: expert ids [T, K] of its calls, in turn."""


@contextmanager
def record_routing(model: nn.Module) -> Iterator[Recording]:
    """What every router of the model chooses inside, on its device; int16, or int32 for more than 32768 experts.

    with record_routing(model) as recording:
        model(tokens)

    Raises:
        ValueError: the model has no `Router`.
    """
    routers = _routers("record_routing", model)
    recording: Recording = {name: [] for name, _ in routers}

    def record(router: Router, args: Any, output: RouterOutput, *, name: str) -> None:
        if not is_recomputed():
            dtype = torch.int16 if output.logits.shape[1] <= 2**15 else torch.int32
            recording[name].append(output.expert_ids.to(dtype))

    hooks = [router.register_forward_hook(partial(record, name=name)) for name, router in routers]
    try:
        yield recording
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def replay_routing(model: nn.Module, recording: Recording) -> Iterator[None]:
    """Inside, the routers of the model choose what was recorded, call by call; weights are of the logits of now.

    Raises:
        ValueError: the model has no `Router`, the recording has other routers, or one is called more or less often than was
            recorded; or twice before activation checkpointing makes a call once more, which could be either. Run
            backward inside, after each call.
    """
    routers = _routers("replay_routing", model)
    if recording.keys() != {name for name, _ in routers}:
        raise ValueError(f"replay_routing: the recording is of the routers {[*recording]}; the model has {[*dict(routers)]}.")
    calls, since = dict.fromkeys(recording, 0), dict.fromkeys(recording, 0)

    def give(router: Router, args: tuple, kwargs: dict[str, Any], *, name: str) -> tuple[tuple, dict[str, Any]]:
        if not is_recomputed():
            calls[name], since[name] = calls[name] + 1, since[name] + 1
        elif since[name] > 1:
            raise ValueError(f"replay_routing: {name!r} was called twice before a backward pass; run it after each call.")
        else:  # the last call, made once more
            since[name] = 0
        if calls[name] > len(recording[name]):
            raise ValueError(f"replay_routing: {name!r} is called more often than the {len(recording[name])} recorded times.")
        return args, kwargs | {"expert_ids": recording[name][calls[name] - 1]}

    hooks = [router.register_forward_pre_hook(partial(give, name=name), with_kwargs=True) for name, router in routers]
    try:
        yield
        short = {name: f"{calls[name]} of {len(ids)}" for name, ids in recording.items() if calls[name] < len(ids)}
        if short:
            raise ValueError(
                f"replay_routing: of the recorded calls some were not made: {short}. A compiled model must be compiled inside."
            )
    finally:
        for hook in hooks:
            hook.remove()


def _routers(function: str, model: nn.Module) -> list[tuple[str, Router]]:
    check_type(function, "model", model, nn.Module, "Give the model, or a dMoE.")
    routers = [(name, module) for name, module in model.named_modules() if isinstance(module, Router)]
    if not routers:
        raise ValueError(
            f"{function}: {type(model).__name__} has no Router, of its own or in a dMoE. A patched model of transformers keeps "
            "its routers."
        )
    return routers
