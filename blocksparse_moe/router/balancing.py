"""Balancing without a loss: the correction biases of routers move after each optimizer step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from blocksparse_moe_kernels.launch import check_type

from ..checks import number
from ..hooks import Hook, is_recomputed, unless_recomputed
from .losses import count_slots
from .output import RouterOutput
from .router import Router


class BiasBalancer:
    """Moves the correction bias of every expert by gamma towards balance, once per optimizer step:
    bias_e += gamma * sign(mean load - load_e).

        balancer = BiasBalancer(model)
        optimizer.register_step_post_hook(lambda *_: balancer.step())

    The load is that of all tokens that the routers saw in training mode since the last step, whatever the micro-batches and
    ranks; what activation checkpointing computes once more is not counted again. Nothing waits for the device.

    Set `balancer.mask`, [T] or any shape of T elements, before a forward pass whose tokens are partly padding: true for those
    that count, None for all.

    Args:
        model: its `Router`s with `correction_bias` are balanced; others are left alone.
        gamma: what a bias moves by at a step; 1e-3 in DeepSeek-V3, 0 for its last tokens.
        ema: how much of the former load is kept at a step, in [0, 1): load = ema * load + (1 - ema) * new load.
        group: ranks that have other tokens; None for all of them if torch.distributed is initialised, else this one.
    Raises:
        ValueError: no router of the model has a correction bias.
    Source: arXiv:2408.15664; DeepSeek-V3, arXiv:2412.19437.
    """

    def __init__(
        self, model: nn.Module, *, gamma: float = 1e-3, ema: float = 0.0, group: dist.ProcessGroup | None = None
    ) -> None:
        check_type("BiasBalancer", "model", model, nn.Module, "Give the model, a dMoE or a Router.")
        number("BiasBalancer", "gamma", gamma, at_least=0)
        number("BiasBalancer", "ema", ema, at_least=0, below=1)
        self.gamma, self.ema, self.group = gamma, ema, group
        self.mask: Tensor | None = None
        routers = [module for module in model.modules() if isinstance(module, Router)]
        self.routers = [router for router in routers if router.correction_bias is not None]
        if not self.routers:
            raise ValueError(
                f"BiasBalancer: none of the {len(routers)} routers of the model has a correction bias; use "
                "RouterConfig(correction_bias=True)."
            )
        self._counts: list[Tensor | None] = [None] * len(self.routers)
        self._loads: list[Tensor | None] = [None] * len(self.routers)
        self._hooks = [
            router.register_forward_hook(Hook(partial(self._count, index))) for index, router in enumerate(self.routers)
        ]

    def _count(self, index: int, router: Router, args: Any, routing: RouterOutput) -> None:
        if router.training and not is_recomputed():
            so_far, counts = self._counts[index], count_slots(routing, self.mask)[0]
            self._counts[index] = counts if so_far is None else unless_recomputed(so_far + counts, so_far)

    @torch.no_grad()
    def step(self) -> None:
        """Move the biases by what was counted since the last step, and begin to count anew."""
        biases = [router.get_buffer("correction_bias") for router in self.routers]
        counts = [
            torch.zeros_like(bias, dtype=torch.int64) if count is None else count
            for bias, count in zip(biases, self._counts, strict=True)
        ]
        together = torch.cat([count.to(counts[0].device) for count in counts])  # a model may lie on several devices
        totals = sum_over_ranks(together, self.group).split([len(count) for count in counts])
        self._counts = [None] * len(self.routers)
        for index, (bias, total) in enumerate(zip(biases, totals, strict=True)):
            load, former = total.to(bias.device, torch.float32), self._loads[index]
            was_called = load.any()
            if self.ema:
                if former is not None:
                    former = former.to(load.device)
                    load = torch.where(was_called, self.ema * former + (1 - self.ema) * load, former)
                self._loads[index] = load
            bias.add_((load.mean() - load).sign() * was_called, alpha=self.gamma)

    def state_dict(self) -> dict[str, Any]:
        """What `ema` keeps of former steps; the biases are in the model's own."""
        return {"loads": list(self._loads)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another balancer, of as many routers, was."""
        loads = state["loads"]
        if len(loads) != len(self.routers):
            raise ValueError(f"BiasBalancer: the state is of {len(loads)} routers; the model has {len(self.routers)}.")
        for load, router in zip(loads, self.routers, strict=True):
            if load is not None and load.shape != router.get_buffer("correction_bias").shape:
                raise ValueError(f"BiasBalancer: the state is of {len(load)} experts; the router has {len(router.weight)}.")
        self._loads = list(loads)

    def remove(self) -> None:
        """Take the hooks off the routers."""
        for hook in self._hooks:
            hook.remove()


def sum_over_ranks(counts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """In place."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(counts, group=group)
    return counts
