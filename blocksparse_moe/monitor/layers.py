"""The layers of a model that can be watched: where their routing is seen, and how they are probed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from blocksparse_moe_kernels import Topology

from ..autocast import without_autocast
from ..hooks import Hook
from ..integrations.huggingface.patch import candidates, why_not_patched
from ..moe import dMoE
from ..router import RouterOutput
from ..router.gate import gate_logits
from .huggingface import TransformersLayer
from .layer import ExpertWeight, Layer, See


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
            see_logits(router, args[0], output.logits, output.score)
            see_ids(router, args[0], output.expert_ids)

        return [self.router.register_forward_hook(Hook(see))]

    def logits_of(self, x: Tensor) -> Tensor:
        router = self.module.router
        with without_autocast(x.device):
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


def find_layers(model: nn.Module) -> list[Layer]:
    """Every MoE layer of the model, ours and those of transformers that can be computed here, in its order."""
    named = dict(model.named_modules())
    ours = {name: OurLayer(name, module) for name, module in named.items() if isinstance(module, dMoE)}
    theirs = {name: TransformersLayer(name, named) for name, module in candidates(model) if why_not_patched(module) is None}
    layers: dict[str, Layer] = {**theirs, **ours}
    return [layers[name] for name in named if name in layers]
