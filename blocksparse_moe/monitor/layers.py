"""The layers of a model that can be watched: where their routing is seen, and how they are probed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from blocksparse_moe_kernels import Topology

from ..integrations.huggingface.adapters import adapter_of
from ..integrations.huggingface.experts import ExpertWeights, is_experts
from ..integrations.huggingface.patch import candidates, why_not_patched
from ..moe import dMoE
from ..router import RouterOutput
from ..router.gate import gate_logits

See = Callable[..., None]


class Layer(ABC):
    """One mixture-of-experts layer.

    Attributes:
        name: of the watched module in its model.
        num_experts: E. columns: C, with those experts behind them that compute nothing.
        router: the module that holds the gate; None where it is not known.
        gate_weights: of its products, [C, H] as a rule.
        init_std: standard deviation of the weights at the beginning.
    """

    name: str
    num_experts: int
    columns: int
    router: nn.Module | None
    init_std: float

    @abstractmethod
    def watch(self, see_logits: See, see_ids: See) -> list[Any]:
        """At every forward pass call `see_logits(module, x, logits [T, .], score)` and `see_ids(module, x, ids [T, K])`; x is
        [T, H], or None where the layer cannot be probed with it. Returns the handles of the hooks."""

    @abstractmethod
    def logits_of(self, x: Tensor) -> Tensor:
        """[S, C]: what the gate says of x [S, H], without noise."""

    @abstractmethod
    def outputs_of(self, x: Tensor, expert_ids: Tensor) -> Tensor:
        """[S * K, H]: the output of every expert of ids [S, K] for its token, not weighed."""

    @property
    @abstractmethod
    def gate_weights(self) -> list[Tensor]: ...

    @abstractmethod
    def expert_weights(self) -> Iterator[ExpertWeight]: ...


class ExpertWeight(NamedTuple):
    """A parameter of all experts.

    Attributes:
        rows: of each expert in the first dimension, one after the other; None for [E, ...].
    """

    name: str
    parameter: nn.Parameter
    rows: list[int] | None

    def of_each(self, tensor: Tensor) -> Sequence[Tensor]:
        """Views of the part of each expert, of the parameter or of what has its shape."""
        return tensor if self.rows is None else tensor.split(self.rows)  # type: ignore[return-value]


class OurLayer(Layer):
    """A dMoE."""

    def __init__(self, name: str, module: dMoE) -> None:
        self.name, self.module, self.router = name, module, module.router
        self.num_experts = module.config.num_experts
        self.columns = self.num_experts + module.config.router.num_cheap_experts
        self.init_std = module.config.init_std

    router: nn.Module

    def watch(self, see_logits: See, see_ids: See) -> list[Any]:
        def see(router: nn.Module, args: tuple, output: RouterOutput) -> None:
            logits = output.logits if output.clean_logits is None else output.clean_logits
            see_logits(router, args[0], logits, output.score)
            see_ids(router, args[0], output.expert_ids)

        return [self.router.register_forward_hook(_Hook(see))]

    def logits_of(self, x: Tensor) -> Tensor:
        router = self.module.router
        return gate_logits(x, router.weight, router.bias, narrow=router.config.narrow_gate)

    def outputs_of(self, x: Tensor, expert_ids: Tensor) -> Tensor:
        slots = x.repeat_interleave(expert_ids.shape[1], dim=0)
        topology = Topology.from_ids(expert_ids.reshape(-1, 1), self.num_experts)
        return self.module.experts(slots, topology)

    @property
    def gate_weights(self) -> list[Tensor]:
        return [self.module.router.weight]

    def expert_weights(self) -> Iterator[ExpertWeight]:
        experts = self.module.experts
        columns = experts.config.columns
        for name, parameter in experts.named_parameters(recurse=False):
            if columns.are_equal or name == "down_proj_bias":
                yield ExpertWeight(name, parameter, None)
            else:
                halves = len(parameter) // columns.total
                yield ExpertWeight(name, parameter, [halves * size for size in columns.widths])


class TransformersLayer(Layer):
    """An experts module of a transformers model, or a block around experts, whether it is patched or not."""

    def __init__(self, name: str, module: Any, router: nn.Module | None, logits_index: int) -> None:
        self.name, self.module, self.router, self.logits_index = name, module, router, logits_index
        adapter = adapter_of(module)
        up = ExpertWeights.of(module).up if adapter is None else adapter.weight_of(module)
        self.num_experts = getattr(module, "num_routed_experts", None) or (up.shape[0] if up.ndim == 3 else module.num_experts)
        self.columns = self.num_experts + (getattr(module, "zero_expert_num", None) or 0)
        self.init_std = float(getattr(getattr(module, "config", None), "initializer_range", 0.02))
        self._router_dims = 2  # of its input
        # Whether the module holds its own router, so that nobody hands it the ids.
        self.is_block = any(part is router for part in module.modules())

    def _logits(self, output: Any) -> Tensor:
        logits = output[self.logits_index] if isinstance(output, tuple) else output
        return _rows(logits)

    def watch(self, see_logits: See, see_ids: See) -> list[Any]:
        def see_router(router: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            logits = self._logits(output)
            others = [*args[1:], *kwargs.values()]  # hash routers want the token ids, ZAYA's the states of the layer before
            alone = len(args) > 0 and all(other is None for other in others)
            self._router_dims = args[0].ndim if alone else 0
            see_logits(router, _rows(args[0]) if alone else None, logits, "softmax")
            if self.is_block:
                top_k = getattr(self.module, "top_k", None) or router.top_k
                see_ids(router, None, logits.topk(top_k, dim=1).indices)

        def see_experts(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            given = [*args, *kwargs.values()]
            x = kwargs["hidden_states"] if "hidden_states" in kwargs else given[0]
            named = (kwargs.get(name) for name in ("top_k_index", "router_indices"))
            ids = next((ids for ids in named if ids is not None), None)
            see_ids(module, _rows(x), given[1] if ids is None else ids)

        hooks = [] if self.is_block else [self.module.register_forward_pre_hook(_Hook(see_experts), with_kwargs=True)]
        if self.router is not None:
            hooks.append(self.router.register_forward_hook(_Hook(see_router), with_kwargs=True))
        return hooks

    def logits_of(self, x: Tensor) -> Tensor:
        assert self.router is not None
        return self._logits(self.router.forward(x.view(*(1,) * (self._router_dims - 2), *x.shape)))

    def outputs_of(self, x: Tensor, expert_ids: Tensor) -> Tensor:
        slots = x.repeat_interleave(expert_ids.shape[1], dim=0)
        ids = expert_ids.reshape(-1, 1).expand(-1, 2)  # LongCat-Flash cannot compute one expert per token
        weights = torch.tensor([1.0, 0.0], dtype=x.dtype, device=x.device).expand(len(ids), 2)
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


def find_layers(model: nn.Module) -> list[Layer]:
    """Every MoE layer of the model, ours and those of transformers that can be computed here, in its order."""
    named = dict(model.named_modules())
    ours = [OurLayer(name, module) for name, module in named.items() if isinstance(module, dMoE)]
    theirs = [
        TransformersLayer(name, module, *_router_of(name, named))
        for name, module in candidates(model)
        if not isinstance(module, dMoE) and (is_experts(module) or adapter_of(module)) and why_not_patched(module) is None
    ]
    order = list(named)
    return sorted([*ours, *theirs], key=lambda layer: order.index(layer.name))


def _router_of(name: str, named: dict[str, Any]) -> tuple[nn.Module | None, int]:
    """The router of an experts module and the place of its logits in what it returns: of the class whose output the model
    itself records as its `router_logits`, the one nearest to the experts."""
    recorders = [
        recorder
        for module in named.values()
        for recorder in _as_list((getattr(module, "_can_record_outputs", None) or {}).get("router_logits"))
    ]
    while True:
        inside = {key: part for key, part in named.items() if not name or key == name or key.startswith(f"{name}.")}
        for recorder in recorders:
            wanted = getattr(recorder, "layer_name", None)
            routers = [
                part
                for key, part in inside.items()
                if isinstance(part, recorder.target_class) and (wanted is None or wanted in key)
            ]
            if len(routers) == 1 and not any(is_experts(part) for part in routers[0].modules()):
                return routers[0], recorder.index
            if routers:
                return None, 0
        if not name:
            return None, 0
        name = name.rpartition(".")[0]


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    found = list(value) if isinstance(value, (list, tuple)) else [value]
    return [one for one in found if hasattr(one, "target_class")]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class _Hook:
    """A hook that copies of the model, and pickles of it, do not take along: they are not watched."""

    def __init__(self, see: See | None) -> None:
        self.see = see

    def __call__(self, *args: Any) -> None:
        if self.see is not None:
            self.see(*args)

    def __reduce__(self) -> tuple[type[_Hook], tuple[None]]:
        return _Hook, (None,)
