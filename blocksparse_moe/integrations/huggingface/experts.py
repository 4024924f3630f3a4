"""An experts module of transformers' interface: what it computes, and its forward by this package.

The flags that the decorator sets say how weights lie; `_apply_gate` and `act_fn` are the activation. A gate that is known to
be one of `ACTIVATIONS` runs inside the kernels, any other one in torch between our two products, as the module itself
computes it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blocksparse_moe_kernels import ACTIVATIONS, BlockSparse, Columns, Topology

from ...ops import combine, dsd, expert_mlp, sdd
from ...products import constant_when_compiled

# Flags of transformers' experts interface that are known here.
_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class UnsupportedModelError(NotImplementedError):
    """No layer of the model can be computed here; the message names what was found and why not."""


@dataclass(frozen=True)
class ExpertWeights:
    """The parameters of an experts module as views that `expert_mlp` takes.

    Attributes:
        up: [E, N, H], N = 2I if gated; down: [E, H, I].
        up_bias: [E, N] or None; down_bias: [E, H] or None.
    """

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None

    @classmethod
    def of(cls, module: Any) -> ExpertWeights:
        """Every parameter is read once: parametrizations compute theirs at each access."""
        name = up_name(module)
        up, down = getattr(module, name), module.down_proj
        if module.is_transposed:
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        if not module.has_bias:
            return cls(up, down, None, None)
        return cls(up, down, getattr(module, f"{name}_bias"), module.down_proj_bias)


def up_name(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def is_experts(module: Any) -> bool:
    """Whether the module's class is decorated by `use_experts_implementation`."""
    return hasattr(module, "is_concatenated") and hasattr(module, "_apply_gate")


def looks_like_experts(module: nn.Module) -> bool:
    """Whether the module is, or by its name should be, one that computes routed experts."""
    name = type(module).__name__
    return is_experts(module) or (name.endswith("Experts") and "Shared" not in name)


def why_not(module: Any) -> str | None:
    """Why an experts module of transformers cannot be computed here; None when it can."""
    name = type(module).__name__
    if not is_experts(module):
        return f"{name} does not dispatch through transformers' experts interface"
    for flag, default in _unknown_flags().items():
        if getattr(module, flag, default) != default:
            return f"{name} has {flag}={getattr(module, flag)}, which this version does not know"
    for parameter in (up_name(module), "down_proj"):
        weight = getattr(module, parameter, None)
        if not isinstance(weight, Tensor) or weight.ndim not in (1, 3):  # partitioned weights are flat until they are gathered
            return f"{name} has no stacked weight {parameter} [E, ., .]"
        if weight.dtype not in _DTYPES:
            return f"its weights are {weight.dtype}, a quantised format"
    return None


@constant_when_compiled
def _unknown_flags() -> dict[str, object]:
    """Flags of the installed experts interface that this version does not know, with their defaults."""
    from transformers.integrations import moe

    parameters = inspect.signature(moe.use_experts_implementation).parameters.values()
    known = {"experts_class", "experts_interface", *_FLAGS}
    return {parameter.name: parameter.default for parameter in parameters if parameter.name not in known}


# -------------------------------------------------------------------- the activation


def fused_activation(module: Any) -> str | None:
    """The key of `ACTIVATIONS` that the module computes; None where its own gate runs in torch."""
    if getattr(module, "has_post_expert_norm", False):
        return None
    if module.has_gate and not _has_default_gate(module):
        return None
    function = _function_of(module.act_fn)
    keys = (key for key, one in ACTIVATIONS.items() if one.function == function and one.gated == module.has_gate)
    return next(keys, None)


def _has_default_gate(module: Any) -> bool:
    from transformers.integrations.moe import _default_apply_gate

    return getattr(module._apply_gate, "__func__", module._apply_gate) is _default_apply_gate


# Class of an activation module, or function -> key of `FUNCTIONS` that computes the same.
_FUNCTIONS = {
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.functional.silu": "silu",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "transformers.activations.SiLUActivation": "silu",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.GELUTanh": "gelu_tanh",
    "transformers.activations.PytorchGELUTanh": "gelu_tanh",
    "transformers.activations.NewGELUActivation": "gelu_tanh",
    "transformers.activations.ReLUSquaredActivation": "relu2",
}


def _function_of(act_fn: Any) -> str | None:
    if getattr(act_fn, "approximate", "none") == "tanh" and type(act_fn) is nn.GELU:
        return "gelu_tanh"
    named = type(act_fn) if isinstance(act_fn, nn.Module) else act_fn
    return _FUNCTIONS.get(f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', '')}")


@torch.no_grad()
def computes(module: Any, activation: str) -> bool:
    """Whether the module's gate agrees with the activation, on numbers small and large enough to meet any clamp."""
    random = torch.Generator().manual_seed(0)
    scale = torch.tensor([1.0, 4.0, 30.0, 1000.0]).repeat_interleave(16)[:, None]
    pre = scale * torch.randn(64, 32, generator=random, dtype=torch.float64)  # in fp32 two ways to write a function differ
    try:
        ours, theirs = ACTIVATIONS[activation](pre), gate(module, pre)
    except Exception:  # a gate that cannot run by itself, on a CPU or in fp64, proves nothing
        return False
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def gate(module: Any, pre: Tensor) -> Tensor:
    """The module's own activation: [M, N] -> [M, I]."""
    return module._apply_gate(pre) if module.has_gate else module.act_fn(pre)


# -------------------------------------------------------------------- the forward


def experts_forward(
    module: Any, hidden_states: Tensor, expert_ids: Tensor, weights: Tensor, *, backend: str, fused: bool
) -> Tensor:
    """[T, H], ids [T, K] (those outside [0, E) are "not here"), weights [T, K] -> [T, H] in the dtype of `hidden_states`."""
    experts = ExpertWeights.of(module)
    topology = Topology.from_ids(expert_ids, experts.up.shape[0])
    activation = fused_activation(module) if fused else None
    if activation is None:
        y = _around_the_gate(module, hidden_states.to(experts.up.dtype), topology, experts, weights, backend)
    else:
        y = expert_mlp(
            hidden_states,
            topology,
            experts.up,
            experts.down,
            weights,
            activation=activation,
            up_proj_bias=experts.up_bias,
            down_proj_bias=experts.down_bias,
            backend=backend,
        )
    return y.to(hidden_states.dtype)


def _around_the_gate(
    module: Any, x: Tensor, topology: Topology, experts: ExpertWeights, weights: Tensor, backend: str
) -> Tensor:
    """Our two products, and between them what the module computes itself."""
    row_experts = topology.row_experts().clamp(max=topology.num_experts - 1)
    pre = sdd(x, experts.up, topology, backend=backend).values
    if experts.up_bias is not None:
        pre = pre + experts.up_bias[row_experts]
    hidden = gate(module, pre)
    columns = Columns.equal(hidden.shape[1], topology.num_experts)
    y = dsd(BlockSparse(hidden.to(pre.dtype), topology, columns), experts.down.transpose(1, 2), backend=backend)
    if experts.down_bias is not None:
        y = y + experts.down_bias[row_experts]
    if getattr(module, "has_post_expert_norm", False):
        y = module.post_expert_norm(y)
    return combine(y, topology, weights, backend=backend)
