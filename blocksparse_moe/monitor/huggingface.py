"""The MoE layers of transformers models, patched or not, as a monitor wants them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..hooks import Hook
from ..integrations.huggingface.adapters import adapter_of
from ..integrations.huggingface.experts import ExpertWeights, is_experts
from .layer import ExpertWeight, Layer, See


@dataclass(frozen=True)
class Gate:
    """Where the router logits of a layer are seen.

    Attributes:
        router: the whole router, for its parameters.
        module: it, or the part of it whose forward gives the logits.
        place: theirs in what that returns; None where it returns nothing else, or they are the first that have C columns.
    """

    router: nn.Module
    module: nn.Module
    place: int | None = None


class TransformersLayer(Layer):
    """An experts module, or a block around experts."""

    def __init__(self, name: str, named: dict[str, Any]) -> None:
        self.name, self.module = name, named[name]
        module, adapter = self.module, adapter_of(self.module)
        up = ExpertWeights.of(module).up if adapter is None else adapter.weight_of(module)
        self.num_experts = getattr(module, "num_routed_experts", None) or (up.shape[0] if up.ndim == 3 else module.num_experts)
        self.columns = self.num_experts + (getattr(module, "zero_expert_num", None) or 0)
        self.init_std = float(getattr(getattr(module, "config", None), "initializer_range", 0.02))
        # A block holds its own router, so nobody hands it the ids.
        self.is_block = adapter is not None and adapter.logits is not None
        if adapter is not None and adapter.logits is not None:
            self.gate: Gate | None = Gate(module.router, module.router, adapter.logits)
        else:
            self.gate = _recorded_gate(name, named) or _nearest_gate(name, named, self.columns)
        self.router = None if self.gate is None else self.gate.router
        # How the gate was called last, but for the tokens: dimensions of its input, and other arguments.
        self._gate_call: tuple[int, tuple, dict[str, Any]] = (2, (), {})

    def watch(self, see_logits: See, see_ids: See) -> list[Any]:
        def see_gate(gate: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            if (logits := self._logits(output)) is None:
                return
            # A bias of all experts may be given again; token ids (hash routers) or the states of another layer (ZAYA) may not.
            others = (*args[1:], *kwargs.values())
            again = len(args) > 0 and all(other is None or other.shape == (self.columns,) for other in others)
            if again:
                self._gate_call = (args[0].ndim, args[1:], kwargs)
            see_logits(gate, _rows(args[0]) if again else None, logits, "softmax")
            if self.is_block:
                top_k = getattr(self.module, "top_k", None) or gate.top_k
                see_ids(gate, None, logits.topk(top_k, dim=1).indices)

        def see_experts(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            given = [*args, *kwargs.values()]
            x = kwargs["hidden_states"] if "hidden_states" in kwargs else given[0]
            named = (kwargs.get(name) for name in ("top_k_index", "router_indices"))
            ids = next((ids for ids in named if ids is not None), None)
            see_ids(module, _rows(x), given[1] if ids is None else ids)

        hooks = [] if self.is_block else [self.module.register_forward_pre_hook(Hook(see_experts), with_kwargs=True)]
        if self.gate is not None:
            hooks.append(self.gate.module.register_forward_hook(Hook(see_gate), with_kwargs=True))
        return hooks

    def logits_of(self, x: Tensor) -> Tensor:
        assert self.gate is not None
        dims, others, named = self._gate_call
        with _evaluating(self.gate.module):
            logits = self._logits(self.gate.module.forward(x.view(*(1,) * (dims - 2), *x.shape), *others, **named))
        assert logits is not None
        return logits

    def _logits(self, output: Any) -> Tensor | None:
        """[T, .], of what the gate's module returned."""
        assert self.gate is not None
        if not isinstance(output, tuple):
            return _rows(output)
        if self.gate.place is not None:
            return _rows(output[self.gate.place])
        found = (part for part in output if isinstance(part, Tensor) and part.is_floating_point())
        return next((_rows(part) for part in found if part.shape[-1:] == (self.columns,)), None)

    def outputs_of(self, x: Tensor, expert_ids: Tensor) -> Tensor:
        slots = x.repeat_interleave(expert_ids.shape[1], dim=0)
        ids = expert_ids.reshape(-1, 1).expand(-1, 2)  # LongCat-Flash cannot compute one expert per token
        weights = x.new_zeros(len(ids), 2)
        weights[:, :1].fill_(1)
        with _evaluating(self.module):
            return _rows(self.module.forward(slots, ids, weights))

    @property
    def gate_weights(self) -> list[Tensor]:
        return [] if self.router is None else [weight for weight in self.router.parameters() if weight.ndim > 1]

    def expert_weights(self) -> Iterator[ExpertWeight]:
        E = self.num_experts
        routers = set() if self.router is None else set(self.router.parameters())
        for name, parameter in self.module.named_parameters():
            if parameter in routers or parameter.ndim < 2:
                continue
            if E <= len(parameter) <= self.columns:
                yield ExpertWeight(name, parameter, None)
            elif parameter.ndim == 2 and len(parameter) % E == 0:  # DBRX
                yield ExpertWeight(name, parameter, [len(parameter) // E] * E)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Nothing at random, which would also change what is drawn afterwards."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _recorded_gate(name: str, named: dict[str, Any]) -> Gate | None:
    """The router nearest to the experts, of the class whose output the model itself records as its `router_logits`."""
    recorders = [
        recorder
        for module in named.values()
        for recorder in _as_list((getattr(module, "_can_record_outputs", None) or {}).get("router_logits"))
    ]
    for parts in _neighbourhoods(name, named):
        for recorder in recorders:
            wanted = getattr(recorder, "layer_name", None) or ""
            routers = [part for key, part in parts.items() if isinstance(part, recorder.target_class) and wanted in key]
            if routers:
                holds_experts = any(is_experts(part) for part in routers[0].modules())
                return None if len(routers) > 1 or holds_experts else Gate(routers[0], routers[0], recorder.index)
    return None


def _nearest_gate(name: str, named: dict[str, Any], columns: int) -> Gate | None:
    """The module called gate or router nearest to the experts: the linear layer in it that has a row for each expert, or else
    all of it."""
    for parts in _neighbourhoods(name, named):
        routers = [part for key, part in parts.items() if key.rpartition(".")[2] in ("gate", "router")]
        if routers:
            linear = [part for part in routers[0].modules() if type(part) is nn.Linear and part.out_features == columns]
            return Gate(routers[0], linear[0] if len(linear) == 1 else routers[0]) if len(routers) == 1 else None
    return None


def _neighbourhoods(name: str, named: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The module and its parts, its parent and its parts, and so on up to the model."""
    while True:
        yield {key: part for key, part in named.items() if not name or key == name or key.startswith(f"{name}.")}
        if not name:
            return
        name = name.rpartition(".")[0]


def _as_list(value: Any) -> list[Any]:
    found = list(value) if isinstance(value, (list, tuple)) else [value]
    return [one for one in found if hasattr(one, "target_class")]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
