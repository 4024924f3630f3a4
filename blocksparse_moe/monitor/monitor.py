"""MoEMonitor: what the routers and experts of a model do, while it trains or serves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from blocksparse_moe_kernels.launch import check_type

from ..checks import number, one_of, positive_integer
from ..hooks import is_recomputed
from .alarms import Alarm
from .counters import Counters, are_finite, over_window
from .layer import ExpertWeight, Layer
from .layers import find_layers
from .reading import LayerReading, Reading, measure
from .writers import Writer


class MoEMonitor:
    """Counts on the device what every MoE layer of a model does; nothing waits for the device until it is read.

        monitor = MoEMonitor(model, writers=[JsonLines("moe.jsonl")], alarms=[Alarm("load_max_over_mean", above=8)])
        for batch in data:
            ...                     # forward, backward, optimizer.step()
            monitor.step()          # before optimizer.zero_grad()
        print(monitor.read()["layers.0.mlp"].scalars["load_max_over_mean"])

    What is computed once more by activation checkpointing is not counted again. Padding is counted like any token.

    Args:
        model: its `dMoE` layers and the MoE layers of a transformers model, patched or not, are watched; make the monitor
            before the model is compiled. Copies and pickles of the model are not watched.
        window: steps that a reading looks back on, at least `write_every`.
        ema: how much of the exponential moving average a step keeps, in [0, 1).
        interval: at the first of so many steps norms are measured, and how many of `sample` tokens changed their expert.
        sample: tokens that this is done with, the first of a forward pass.
        writers: get a reading every `write_every` steps; see `blocksparse_moe.monitor`.
        alarms: are checked at the same steps.
        first_step: steps that were done before, where a training goes on.
        training_only: count only modules in training mode, so that evaluation in between does not mix in.
        group: ranks over which readings sum up what was counted, all of which must then read; None for this rank alone. What is
            measured at intervals is that of this rank.
    Raises:
        ValueError: the model has no MoE layer that is known here.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        window: int = 100,
        ema: float = 0.99,
        interval: int = 50,
        sample: int = 1024,
        writers: Iterable[Writer] = (),
        alarms: Iterable[Alarm] = (),
        write_every: int = 50,
        first_step: int = 0,
        training_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        check_type("MoEMonitor", "model", model, nn.Module, "Give the model, or a dMoE.")
        number("MoEMonitor", "ema", ema, at_least=0, below=1)
        number("MoEMonitor", "first_step", first_step, at_least=0)
        check_type("MoEMonitor", "training_only", training_only, bool, "Give True or False.")
        self.window, self.interval, self.sample, self.write_every = (
            positive_integer("MoEMonitor", name, value)
            for name, value in dict(window=window, interval=interval, sample=sample, write_every=write_every).items()
        )
        self.ema, self.training_only, self.group = ema, training_only, group
        self.writers = _all_of(
            "writers", writers, lambda one: hasattr(one, "write") and hasattr(one, "close"), "JsonLines(path)"
        )
        given = _all_of("alarms", alarms, lambda one: isinstance(one, Alarm), 'Alarm("drop_rate", above=0.01)')
        self.alarms = [replace(alarm) for alarm in given]  # what they count is of this monitor
        if self.writers and self.write_every > self.window:
            raise ValueError(f"MoEMonitor: with write_every={write_every} a window of {window} steps would leave some out.")
        self.first_step = self.steps = int(first_step)
        found = find_layers(model)
        if not found:
            raise ValueError(
                f"MoEMonitor: {type(model).__name__} has no dMoE, and no MoE layer of transformers that is known here "
                "(blocksparse_moe.supports says which are)."
            )
        self.layers = [_WatchedLayer(layer, self) for layer in found]

    @torch.no_grad()
    def step(self) -> None:
        """A step of training is over: what was counted since the last one moves into the window. Call it while the gradients
        are there, that is after `backward()` and before `zero_grad()`."""
        due = (self.steps - self.first_step) % self.interval == 0
        for layer in self.layers:
            layer.close_step(self.steps, due)
        self.steps += 1
        for layer in self.layers:
            layer.is_due = (self.steps - self.first_step) % self.interval == 0
        if self.steps % self.write_every == 0 and (self.writers or self.alarms or self.group is not None):
            reading = self.read()
            for alarm in self.alarms:  # before a writer can fail
                alarm.check(reading)
            for writer in self.writers:
                writer.write(reading)

    def read(self, over: str = "window") -> Reading:
        """The metrics of all layers now; waits for the device.

        Args:
            over: "window", the last steps and what has been counted since, or "ema", the moving average of steps ("tokens" and
                "logit_max" are then those of a step).
        """
        one_of("MoEMonitor.read", "over", over, ("window", "ema"))
        return Reading(self.steps, tuple(layer.read(over) for layer in self.layers))

    def close(self) -> None:
        """Take the hooks off the model and close the writers. What was counted can still be read."""
        for layer in self.layers:
            layer.remove()
        writers, self.writers = self.writers, []
        with ExitStack() as stack:  # closes the others where one of them fails
            for writer in writers:
                stack.callback(writer.close)

    def __enter__(self) -> MoEMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _WatchedLayer:
    """A layer, what was counted of it, and what was measured last."""

    def __init__(self, layer: Layer, monitor: MoEMonitor) -> None:
        self.layer, self.monitor = layer, monitor
        weight = next(layer.expert_weights()).parameter
        self.counters = Counters(layer.columns, monitor.window, weight.device)
        self.is_due = True
        self.measured: dict[str, Tensor] = {}
        self._sample: tuple[Tensor, Tensor] | None = None
        self._gate_input: Tensor | None = None
        self._experts_input: tuple[Tensor, Tensor] | None = None
        self._hooks = layer.watch(self._see_logits, self._see_ids)

    def _counts(self, module: nn.Module) -> bool:
        return (module.training or not self.monitor.training_only) and not is_recomputed()

    @torch.no_grad()
    def _see_logits(self, module: nn.Module, x: Tensor | None, logits: Tensor, score: str) -> None:
        if not self._counts(module):
            return
        self.counters.move_to(logits.device)
        self.counters.once(self.counters.add_logits, logits.detach(), score)
        if x is None:
            return
        # Compiled code asks for nothing that changes from step to step, lest it be compiled again: it leaves its input behind.
        if torch.compiler.is_compiling():
            self._gate_input = x[: self.monitor.sample].detach().clone()
        elif self.is_due and len(x):
            self._measure_gate(x[: self.monitor.sample].detach())

    @torch.no_grad()
    def _see_ids(self, module: nn.Module, x: Tensor | None, expert_ids: Tensor) -> None:
        if not self._counts(module):
            return
        self.counters.move_to(expert_ids.device)
        self.counters.once(self.counters.add_ids, expert_ids.detach())
        sample = self.monitor.sample
        if torch.compiler.is_compiling():
            self._experts_input = None if x is None else (x[:sample].detach().clone(), expert_ids[:sample].detach().clone())
        elif self.is_due and len(expert_ids):
            self.is_due = False
            if x is not None:
                self._measure_outputs(x[:sample].detach(), expert_ids[:sample])

    def _measure_gate(self, x: Tensor) -> None:
        if self._sample is not None:
            former, best = self._sample
            now = self.layer.logits_of(former.to(x.device, x.dtype)).argmax(dim=1)
            self.measured["changed"] = (now != best.to(x.device)).double().mean()
        self._sample = x.clone(), self.layer.logits_of(x).argmax(dim=1)

    def _measure_outputs(self, x: Tensor, expert_ids: Tensor) -> None:
        E, ids = self.layer.num_experts, expert_ids.reshape(-1).long()
        norms = torch.linalg.vector_norm(self.layer.outputs_of(x, expert_ids), dim=1, dtype=torch.float32).double()
        here = (ids >= 0) & (ids < E)
        ids = ids.where(here, E)
        sums = norms.new_zeros(2, E + 1).scatter_add(1, ids.expand(2, -1), torch.stack((norms, torch.ones_like(norms))))
        self.measured["output_norm"] = sums[0, :E] / sums[1, :E]

    def close_step(self, step: int, due: bool) -> None:
        self.counters.close_step(step, self.monitor.ema)
        if due:
            self._measure_what_was_compiled()
            if not any(weight.parameter.device.type == "meta" for weight in self.layer.expert_weights()):  # offloaded
                self._measure_weights()

    def _measure_what_was_compiled(self) -> None:
        gate_input, experts_input = self._gate_input, self._experts_input
        self._gate_input = self._experts_input = None
        if gate_input is not None and len(gate_input):
            with _autocast_to(gate_input):
                self._measure_gate(gate_input)
        if experts_input is not None and len(experts_input[0]):
            with _autocast_to(experts_input[0]):
                self._measure_outputs(*experts_input)

    def _measure_weights(self) -> None:
        if gates := self.layer.gate_weights:
            norms = torch.stack([_whole(torch.linalg.vector_norm(gate, dtype=torch.float32)) for gate in gates])
            self.measured["gate_norm"] = norms.double().norm()
        weights, gradients = [], []
        for weight in self.layer.expert_weights():
            weights.append(_squares(weight, weight.parameter)[: self.layer.num_experts])
            if weight.parameter.grad is not None:
                gradients.append(_squares(weight, weight.parameter.grad)[: self.layer.num_experts])
        self.measured["weight_norm"] = torch.stack(weights).sum(dim=0).sqrt()
        self.measured.pop("gradient_norm", None)
        if gradients:
            self.measured["gradient_norm"] = torch.stack(gradients).sum(dim=0).sqrt()

    def read(self, over: str) -> LayerReading:
        counters, E, steps = self.counters, self.layer.num_experts, self.monitor.steps
        done = steps - self.monitor.first_step
        window = torch.cat((counters.past, counters.now[None]))
        counted = counters.average if over == "ema" else over_window(window)
        skipped = (~are_finite(window)).sum().double()
        kept = min(done, len(counters.past))
        order = [(steps - kept + index) % len(counters.past) for index in range(kept)]
        history = counters.past[order, : counters.columns]
        if self.monitor.group is not None:
            dist.all_reduce(counted[:-1], group=self.monitor.group)
            dist.all_reduce(counted[-1:], op=dist.ReduceOp.MAX, group=self.monitor.group)
            dist.all_reduce(history, group=self.monitor.group)
            dist.all_reduce(skipped, group=self.monitor.group)
        nothing = counted.new_full((E,), torch.nan)
        measured = {name: value.to(counted.device) for name, value in self.measured.items()}  # the layer may have moved
        single = [skipped, *(measured.get(name, nothing[0]) for name in ("changed", "gate_norm"))]
        several = [measured.get(name, nothing) for name in ("output_norm", "weight_norm", "gradient_norm")]
        flat = torch.cat((counted, history.flatten(), torch.stack(single), *several)).cpu()
        counted, history, single_values, *rows = flat.split([len(counted), history.numel(), 3, E, E, E])
        scalars, load = measure(counted, E)
        scalars |= dict(zip(("skipped_steps", "changed", "gate_norm"), single_values.tolist(), strict=True))
        experts = {"load": load, **dict(zip(("output_norm", "weight_norm", "gradient_norm"), rows, strict=True))}
        return LayerReading(self.layer.name, E, scalars, experts, history.view(kept, counters.columns))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _all_of(name: str, given: Iterable[Any], fits: Callable[[Any], bool], example: str) -> list[Any]:
    """The list of what was given; TypeError where it is none of such."""
    found = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [None]
    if not all(map(fits, found)):
        raise TypeError(f"MoEMonitor: {name} must be a list, such as [{example}]; got {given!r}.")
    return found


def _autocast_to(x: Tensor) -> AbstractContextManager:
    """As it may have been where x was computed: weights can be wider."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(x.device.type, x.dtype) if half else nullcontext()


def _squares(weight: ExpertWeight, tensor: Tensor) -> Tensor:
    """[E] fp64: the square of each expert's norm, of the weight or its gradient."""
    if weight.rows is None:
        norms = torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.ndim)), dtype=torch.float32)
    else:
        norms = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float32) for part in weight.of_each(tensor)])
    return _whole(norms).double().square()


def _whole(tensor: Any) -> Tensor:
    """All shards of a distributed tensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
