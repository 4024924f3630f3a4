"""Models whose experts do not dispatch through transformers' experts interface: a row each, and what their forward becomes.

A row names the class of a module, either of the experts or of the block around them; its forward is replaced on the instance.
Parameters stay where they are, and whatever else the block does (router, shared expert, bias) is done as it does it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from blocksparse_moe_kernels import BlockSparse, Columns, Topology

from ...backends.execution import Execution
from ...ops import combine, dsd, sdd
from .experts import ExpertWeights, compute, is_theirs


@dataclass(frozen=True)
class Adapter:
    """How a class of modules is computed.

    Attributes:
        forward: (module, arguments of its forward; execution, activation) -> what its forward returns.
        up: name of the up-projection, whose device and dtype choose the backend.
        holders: names of the parts that hold the weights, where it is not the module itself.
        act_fn: name of the activation function; None where the activation is not between two products.
        logits: place of the logits in what the `router` inside the module returns; None for a module that is handed the ids.
        weights: its stacked weights as they are multiplied; None where no two products with the activation between them are.
    """

    forward: Callable[..., Any]
    up: str
    act_fn: str | None
    holders: tuple[str, ...] = ()
    logits: int | None = None
    weights: Callable[[Any], ExpertWeights] | None = None

    def why_not(self, module: nn.Module) -> str | None:
        """Why the module's weights are not what they should be read as; None when they are."""
        for name in self.holders:
            part = type(attrgetter(name)(module))
            if part.__module__.startswith("peft."):
                return (
                    f"its {name} is wrapped by PEFT's {part.__name__}, which acts only where that part is called itself; LoRA "
                    "on stacked weights is for models of the experts interface"
                )
        return None

    def replaced(self, module: nn.Module) -> str | None:
        """Whose forward, the module's or that of a part which holds weights, is not transformers' own; None for nobody's."""
        if ("forward" in module.__dict__ and "_blocksparse_patches" not in module.__dict__) or not _is_transformers_own(module):
            return f"this {type(module).__name__}"
        return next((f"its {name}" for name in self.holders if not _is_transformers_own(attrgetter(name)(module))), None)

    def weight_of(self, module: nn.Module) -> Tensor:
        return attrgetter(self.up)(module)

    def function_of(self, module: nn.Module) -> Callable[[Tensor], Tensor] | None:
        return None if self.act_fn is None else attrgetter(self.act_fn)(module)

    def gate_of(self, module: Any) -> Callable[[Tensor], Tensor] | None:
        """[M, 2I] -> [M, I]: the module's own gate, or one around its function."""
        function = self.function_of(module)
        return None if function is None else getattr(module, "_apply_gate", None) or gate_around(function)


def _is_transformers_own(module: nn.Module) -> bool:
    """Whether a module's forward is one of its class as transformers, or torch, has it; its own instance may hold ours, or
    accelerate's hook."""
    forward = getattr(type(module).forward, "__module__", "")
    replaced = module.__dict__.get("forward")
    is_known = is_theirs(replaced) or "_hf_hook" in module.__dict__ or "_blocksparse_patches" in module.__dict__
    return is_known and forward.startswith(("transformers.", "torch."))


def adapter_of(module: nn.Module) -> Adapter | None:
    """Derived classes too: parametrizations derive."""
    for base in type(module).__mro__:
        if base.__module__.startswith("transformers.models.") and base.__qualname__ in ADAPTERS:
            return ADAPTERS[base.__qualname__]
    return None


def gate_around(act_fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """[M, 2I], gate then up -> [M, I]."""

    def gate(pre: Tensor) -> Tensor:
        gate, up = pre.chunk(2, dim=-1)
        return act_fn(gate) * up

    return gate


def _as_they_are(module: Any) -> ExpertWeights:
    return ExpertWeights(module.gate_up_proj, module.down_proj)


def _of_routed(module: Any) -> ExpertWeights:
    """Without the identities, which stand behind."""
    return ExpertWeights(module.gate_up_proj[: module.num_routed_experts], module.down_proj)


def _of_linears(module: Any) -> ExpertWeights:
    return ExpertWeights(module.input_linear.weight, module.output_linear.weight)


def _transposed(module: Any) -> ExpertWeights:
    return ExpertWeights(module.experts.gate_up_proj.transpose(1, 2), module.experts.down_proj.transpose(1, 2))


def _llama4(module: Any, hidden_states: Tensor, *, execution: Execution, activation: str | None) -> tuple[Tensor, Tensor]:
    """Llama4TextMoe: the routing weight scales the input of an expert, so every slot is a token of its own."""
    x = hidden_states.reshape(-1, module.hidden_dim)
    scores, router_logits = module.router(x)
    expert_ids = router_logits.topk(module.top_k, dim=1).indices
    slots = (x[:, None] * scores.gather(1, expert_ids)[..., None]).flatten(0, 1)
    weights, gate = _transposed(module), gate_around(module.experts.act_fn)
    topology = Topology.from_ids(expert_ids.reshape(-1, 1), weights.up.shape[0])
    routed = compute(slots, topology, weights, None, activation=activation, gate=gate, execution=execution)
    return module.shared_expert(x) + routed.view(-1, module.top_k, module.hidden_dim).sum(1), router_logits


def _dbrx(
    module: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    execution: Execution,
    activation: str | None,
) -> Tensor:
    """DbrxExperts: gate and up lie in two parameters, so they are two products."""
    mlp, E = module.mlp, module.num_experts
    x = hidden_states.reshape(-1, module.hidden_size)
    gate_proj, up_proj, down_proj = (weight.unflatten(0, (E, -1)) for weight in (mlp.w1, mlp.v1, mlp.w2))
    topology = Topology.from_ids(top_k_index, E)
    gate, up = (sdd(x, weight, topology, backend=execution.backend).values for weight in (gate_proj, up_proj))
    hidden = mlp.activation_fn(gate) * up
    y = dsd(BlockSparse(hidden, topology, Columns.equal(hidden.shape[1], E)), down_proj, backend=execution.backend)
    return combine(y, topology, top_k_weights, backend=execution.backend).view(hidden_states.shape[0], -1, module.hidden_size)


def _jetmoe(module: Any, layer_input: Tensor, *, execution: Execution, activation: str | None) -> Tensor:
    """JetMoeMoE: its router sorts on the host and gives the logits last, from which the choice is made again."""
    x = layer_input.reshape(-1, module.input_size)
    *_, router_logits = module.router(x)
    top_logits, expert_ids = router_logits.topk(module.router.top_k, dim=1)
    weights = _of_linears(module)
    topology = Topology.from_ids(expert_ids, weights.up.shape[0])
    routing_weights = torch.softmax(top_logits, dim=1).type_as(x)
    gate = gate_around(module.activation)
    y = compute(x, topology, weights, routing_weights, activation=activation, gate=gate, execution=execution)
    return y.view_as(layer_input) + module.bias


def _longcat_flash(
    module: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    execution: Execution,
    activation: str | None,
) -> Tensor:
    """LongcatFlashExperts: ids beyond the routed experts are identities, which give the token itself."""
    E, weights = module.num_routed_experts, _of_routed(module)
    topology, gate = Topology.from_ids(top_k_index, E), gate_around(module.act_fn)
    routed = compute(hidden_states, topology, weights, top_k_weights, activation=activation, gate=gate, execution=execution)
    identity = torch.where(top_k_index >= E, top_k_weights, 0).sum(1, keepdim=True)
    return routed + (hidden_states * identity).to(hidden_states.dtype)


def _step3p7(
    module: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    execution: Execution,
    activation: str | None,
) -> Tensor:
    """Step3p7Experts: as those of the interface, with a clamp in the gate."""
    weights = _as_they_are(module)
    topology = Topology.from_ids(top_k_index, weights.up.shape[0])
    return compute(
        hidden_states, topology, weights, top_k_weights, activation=activation, gate=module._apply_gate, execution=execution
    )


ADAPTERS = {
    "DbrxExperts": Adapter(_dbrx, "mlp.w1", None, ("mlp",)),
    "JetMoeMoE": Adapter(_jetmoe, "input_linear.weight", "activation", ("input_linear", "output_linear"), 4, _of_linears),
    "Llama4TextMoe": Adapter(_llama4, "experts.gate_up_proj", "experts.act_fn", ("experts",), 1, _transposed),
    "LongcatFlashExperts": Adapter(_longcat_flash, "gate_up_proj", "act_fn", weights=_of_routed),
    "Step3p7Experts": Adapter(_step3p7, "gate_up_proj", "act_fn", weights=_as_they_are),
}
"""By the class in transformers."""

OTHERS = ("JetMoeMoA",)
"""Modules that have parts called experts and no expert MLPs: JetMoE's attention."""
