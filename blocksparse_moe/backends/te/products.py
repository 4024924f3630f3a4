"""The two grouped products by Transformer Engine's modules. They own no weights: each call gives them views of ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from threading import Lock
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .fused import INTERLEAVE
from .recipes import RECIPES
from .weights import accumulates, views_of


@dataclass(frozen=True)
class Form:
    """What modules are made for: they are made anew when it changes."""

    num_experts: int
    hidden_size: int
    columns: int
    halves: int
    bias: bool
    dtype: torch.dtype
    device: torch.device
    precision: str


def recipe_of(precision: str) -> Any:
    """Transformer Engine's recipe; None for plain GEMMs."""
    name = RECIPES[precision].name
    return None if name is None else getattr(import_module("transformer_engine.common.recipe"), name)()


class Modules:
    """The modules of one layer. They hold what a recipe remembers from step to step: the largest values of delayed scaling.

    Args:
        te: `transformer_engine.pytorch`.
        form: sizes and precision.
    """

    def __init__(self, te: ModuleType, form: Form) -> None:
        self.te, self.form, self.lock = te, form, Lock()
        self.recipe = recipe_of(form.precision)
        self.up = self._grouped_linear(form.hidden_size, form.halves * form.columns, form.bias)
        self.down = self._grouped_linear(form.columns, form.hidden_size, False)

    def _grouped_linear(self, in_features: int, out_features: int, bias: bool) -> Any:
        # On meta, as its own parameters are thrown away. Splits are numbers on the host, whatever the environment asks for.
        known = signature(self.te.GroupedLinear.__init__).parameters
        options = {"use_grouped_tensor": False} if "use_grouped_tensor" in known else {}
        module = self.te.GroupedLinear(
            self.form.num_experts, in_features, out_features, bias=bias, params_dtype=self.form.dtype, device="meta", **options
        )
        for name in list(module._parameters):
            del module._parameters[name]
        return module

    def precision(self) -> AbstractContextManager:
        """The region in which both products compute in the recipe."""
        return self.te.autocast(enabled=self.recipe is not None, recipe=self.recipe)

    def project(
        self, module: Any, x: Tensor, counts: Sequence[int], weight: Tensor, parameter: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """x [P, K] -> [P, N] by weight [E, N, K] and bias [E, N]; x has `counts` rows of each expert."""
        named = {f"weight{i}": view for i, view in enumerate(views_of(weight, parameter))}
        if bias is not None:
            named |= {f"bias{i}": view for i, view in enumerate(bias.unbind())}
        with self.lock:  # threads may share a layer
            module.fuse_wgrad_accumulation = accumulates(parameter)
            module.__dict__.update(named)
            try:
                return module(x, list(counts))
            finally:  # what was given is the caller's to keep or to free
                for name in named:
                    del module.__dict__[name]


class FusedModules:
    """The whole expert MLP as Transformer Engine's ops, which it fuses where it can: see `fused.conditions`.

    The first weight is copied in each call: the fused kernel wants 32 rows of the gate and 32 of the up-projection in turn.
    """

    def __init__(self, te: ModuleType, form: Form) -> None:
        self.te, self.form, self.lock = te, form, Lock()
        ops = import_module("transformer_engine.pytorch.ops")
        self.sequential = ops.Sequential
        self.recipe = recipe_of(form.precision)
        sizes = ((form.hidden_size, 2 * form.columns), (form.columns, form.hidden_size))
        self.up, self.down = (
            ops.GroupedLinear(form.num_experts, inside, outside, bias=False, dtype=form.dtype, device="meta")
            for inside, outside in sizes
        )
        self.activation = ops.ScaledSwiGLU(glu_interleave_size=INTERLEAVE)
        for op in (self.up, self.down):
            for number in range(form.num_experts):
                del op._parameters[f"weight{number}"]
        self.ran: tuple[str, ...] = ()

    @property
    def ran_fused(self) -> bool:
        """Whether the last call ran as one fused op."""
        return any("GroupedMLP" in name for name in self.ran)

    def __call__(
        self, x: Tensor, counts: Sequence[int], routing_weights: Tensor, up: Tensor, down: tuple[Tensor, Tensor]
    ) -> Tensor:
        """x [P, H], routing_weights [P], up [E, 2F, H], down [E, H, F] and its parameter -> [P, H], each row weighed."""
        # The gradient of the copy comes in the order of the copy: it cannot be added to a main_grad.
        copy = interleave(up)
        splits = torch.tensor(counts, dtype=torch.int64, device=x.device)
        sequence = self.sequential(self.up, self.activation, self.down)
        with self.lock, self.te.autocast(enabled=self.recipe is not None, recipe=self.recipe):  # threads may share a layer
            self._give(self.up, copy, copy)
            self._give(self.down, *down)
            y = sequence(x, splits, routing_weights, splits)
        self.ran = tuple(type(op).__name__ for group in sequence._module_groups for op, _ in getattr(group, "_forward_ops", ()))
        return y

    def _give(self, op: Any, weight: Tensor, parameter: Tensor) -> None:
        views = views_of(weight, parameter)
        op.__dict__.update({f"weight{i}": view for i, view in enumerate(views)})
        op.__dict__["_accumulate_into_main_grad"] = accumulates(parameter)

        def parameters(recurse: bool = True) -> Iterator[Tensor]:
            return iter(views)

        op.__dict__["parameters"] = parameters


def interleave(weight: Tensor) -> Tensor:
    """[E, 2F, H], gate rows then up rows -> 32 of the gate and 32 of the up-projection in turn: a copy."""
    halves = weight.unflatten(1, (2, -1, INTERLEAVE))
    return halves.transpose(1, 2).flatten(1, 3)
