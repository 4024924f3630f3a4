"""The forward pass of the backend `te`; backward passes come from autograd. Loaded where Transformer Engine is."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blocksparse_moe_kernels import Topology, get_activation
from blocksparse_moe_kernels.launch import check_operands, check_shape, check_type, check_weights, on_device
from blocksparse_moe_kernels.padding import PaddedRows, pad_rows

from ...autocast import autocast_dtype, without_autocast
from ...products import choose, implementation
from .engine import load
from .products import Form, FusedModules, Modules
from .recipes import FUSED_ALIGNMENT, RECIPES
from .rows import Collect, ScaledActivation, Spread, SpreadWeights

if TYPE_CHECKING:
    from .. import ExpertSpec, ExpertWeights


@torch.compiler.disable(reason="Transformer Engine reads the rows of each expert on the host")
def experts(
    x: Tensor,
    topology: Topology,
    routing_weights: Tensor | None,
    weights: ExpertWeights,
    spec: ExpertSpec,
    *,
    fused: bool,
) -> Tensor:
    """x [T, H] -> [T, H] in its dtype, or autocast's."""
    _check(x, topology, routing_weights, weights, spec)
    out_dtype = autocast_dtype(x) or x.dtype
    halves = get_activation(spec.activation).halves
    form = Form(
        topology.num_experts, spec.hidden_size, spec.columns.widest, halves, spec.bias, spec.dtype, spec.device,
        spec.execution.precision or "bf16",
    )  # fmt: skip
    modules = _remembered(spec.execution.memory, form, FusedModules if fused else Modules)
    kernels = implementation(choose("auto", spec.device, spec.dtype)[0])
    alignment = FUSED_ALIGNMENT if fused else RECIPES[form.precision].alignment
    with without_autocast(spec.device), on_device(spec.device):
        padded = pad_rows(topology, alignment)
        rows = Spread.apply(x.to(spec.dtype), padded, kernels)
        p = _row_weights(routing_weights, padded, kernels)
        up, down = weights.up_proj.to(spec.dtype), weights.down_proj.to(spec.dtype)
        if fused:
            y = modules(rows, padded.counts, p, up, (down, weights.down_proj))
            if not modules.ran_fused:
                raise RuntimeError(
                    f"backend 'te': Transformer Engine took {', '.join(modules.ran)} in place of the fused grouped MLP, though "
                    "all conditions hold (backend_report() lists them). Unset NVTE_CUTEDSL_FUSED_GROUPED_MLP to run unfused."
                )
        else:
            up_bias = None if weights.up_proj_bias is None else weights.up_proj_bias.to(spec.dtype)
            with modules.precision():
                pre = modules.project(modules.up, rows, padded.counts, up, weights.up_proj, up_bias)
                hidden = ScaledActivation.apply(pre, p, get_activation(spec.activation), padded, kernels)
                y = modules.project(modules.down, hidden, padded.counts, down, weights.down_proj)
        y = Collect.apply(y, padded, kernels)
        if weights.down_proj_bias is not None:
            y = y + _bias(weights.down_proj_bias.to(spec.dtype), topology, routing_weights)
    return y.to(out_dtype)


def _remembered(memory: MutableMapping[Any, Any], form: Form, kind: type[Modules] | type[FusedModules]) -> Any:
    key = (kind, form)
    if key not in memory:
        te = load()
        assert not isinstance(te, str)  # `why_not` has asked
        memory[key] = kind(te, form)
    return memory[key]


def _row_weights(routing_weights: Tensor | None, padded: PaddedRows, kernels: Any) -> Tensor:
    """[P] of the padded rows, zero where padding is."""
    if routing_weights is None:
        return (padded.slots >= 0).float()
    return SpreadWeights.apply(routing_weights, padded, kernels)


def _bias(bias: Tensor, topology: Topology, routing_weights: Tensor | None) -> Tensor:
    """[T, H]: of each token the biases [E, H] of its experts, by its weights: p (h w + b) = (p h) w + p b."""
    slots = topology.slots[: topology.num_slots].long()
    expert = topology.row_experts()
    kept = expert < topology.num_experts
    weights = torch.ones_like(slots, dtype=torch.float32) if routing_weights is None else routing_weights.reshape(-1)[slots]
    index = topology.tokens.long() * topology.num_experts + expert.clamp(max=topology.num_experts - 1)
    share = weights.new_zeros(topology.num_tokens * topology.num_experts)
    share = share.index_add(0, index, torch.where(kept, weights, 0))
    return share.view(topology.num_tokens, topology.num_experts).to(bias.dtype) @ bias


def _check(x: Tensor, topology: Topology, routing_weights: Tensor | None, weights: ExpertWeights, spec: ExpertSpec) -> None:
    operands = {"x": x, "up_proj": weights.up_proj, "down_proj": weights.down_proj, "routing_weights": routing_weights}
    check_operands("backend te", topology, **operands)
    check_weights("backend te", topology, routing_weights)
    E, H, F = topology.num_experts, spec.hidden_size, spec.columns.widest
    halves = get_activation(spec.activation).halves
    check_shape("backend te", "x", x, ((topology.num_tokens, H),))
    of_bias = (("up_proj_bias", weights.up_proj_bias, halves * F), ("down_proj_bias", weights.down_proj_bias, H))
    for name, bias, width in of_bias:
        if bias is not None:
            check_shape("backend te", name, bias, ((E, width),))
    for name, weight, shape in (("up_proj", weights.up_proj, (E, halves * F, H)), ("down_proj", weights.down_proj, (E, H, F))):
        check_shape("backend te", name, weight, (shape,))
        if not weight.is_contiguous():
            raise ValueError(f"backend te: {name} must be contiguous; its strides are {weight.stride()}. Call .contiguous().")
        if (main_grad := getattr(weight, "main_grad", None)) is not None:
            check_type(
                "backend te", f"main_grad of {name}", main_grad, Tensor, "Give a buffer of the parameter's shape, or None."
            )
            check_shape("backend te", f"main_grad of {name}", main_grad, (shape,))
        elif torch.is_grad_enabled() and weight.requires_grad and getattr(weight._base, "main_grad", None) is not None:
            raise NotImplementedError(
                f"backend te: {name} is a part of a parameter, whose main_grad would get nothing. Take main_grad from that "
                "parameter, so that gradients go to grad, or choose backend='auto', which does not read it."
            )
