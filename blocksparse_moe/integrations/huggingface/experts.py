"""An experts module of transformers' interface: what it computes, and its forward by this package.

The flags that the decorator sets say how weights lie; `_apply_gate` and `act_fn` are the activation. A gate that is proven to
be an `Activation`, limits included, runs inside the kernels, any other one in torch between our two products, as the module
itself computes it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from blocksparse_moe_kernels import Activation, BlockSparse, Columns, Topology

from ...autocast import autocast_dtype
from ...backends import ExpertSpec, select
from ...backends import ExpertWeights as BackendWeights
from ...backends.execution import Execution
from ...ops import combine, dsd, expert_mlp, sdd
from ...products import constant_when_compiled

# Flags of transformers' experts interface that are known here.
_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


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
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @classmethod
    def of(cls, module: Any) -> ExpertWeights:
        """Every parameter is read once: parametrizations compute theirs at each access."""
        name = up_name(module)
        up, down = getattr(module, name), module.down_proj
        if module.is_transposed:
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        if not module.has_bias:
            return cls(up, down)
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
    for flag, default in _unknown_flags():
        if getattr(module, flag, default) != default:
            return f"{name} has {flag}={getattr(module, flag)}, which this version does not know"
    for parameter in (up_name(module), "down_proj"):
        weight = getattr(module, parameter, None)
        if not isinstance(weight, Tensor) or weight.ndim not in (1, 3):  # partitioned weights are flat until they are gathered
            return f"{name} has no stacked weight {parameter} [E, ., .]"
        if weight.dtype not in DTYPES:
            return f"its weights are {weight.dtype}, a quantised format"
    return None


def is_theirs(forward: Any) -> bool:
    """Whether a forward that was put on an instance is none, or of transformers, accelerate or torch."""
    return forward is None or str(getattr(forward, "__module__", "")).startswith(("transformers.", "accelerate.", "torch."))


def dispatches(module: Any) -> bool:
    """Whether the module's forward is the one that the decorator made, perhaps with one of accelerate's or of transformers' own
    plans over it: not that of a derived class, nor one that somebody else put on the class or on the instance."""
    from transformers.integrations import moe

    if not is_theirs(module.__dict__.get("forward")) and "_hf_hook" not in module.__dict__:
        return False
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and code.co_filename == moe.__file__


@constant_when_compiled
def _unknown_flags() -> tuple[tuple[str, object], ...]:
    """Flags of the installed experts interface that this version does not know, with their defaults. No dict: Dynamo cannot go
    through one that is a constant."""
    from transformers.integrations import moe

    parameters = inspect.signature(moe.use_experts_implementation).parameters.values()
    known = {"experts_class", "experts_interface", *_FLAGS}
    return tuple((parameter.name, parameter.default) for parameter in parameters if parameter.name not in known)


# -------------------------------------------------------------------- the activation


def default_activation(module: Any) -> str | None:
    """The name of the activation of a module whose gate is that of the interface, by its class; None of others."""
    plain = _plain_activation(module)
    if plain is None or plain.interleaved or getattr(module, "has_post_expert_norm", False):
        return None
    return None if plain.gated and not _has_default_gate(module) else str(plain)


def proven_activation(module: Any, gate: Callable[[Tensor], Tensor], act_fn: Any = None) -> str | None:
    """The name of the activation that the module's `gate` computes; None where it runs in torch.

    Candidates are made from the limit and alpha that the module has; a probe of the gate decides.
    """
    plain = _plain_activation(module, act_fn)
    if plain is None or getattr(module, "has_post_expert_norm", False) or "_apply_gate" in module.__dict__:
        return None  # a gate that was put on the instance may be put there again, and look the same
    _, limit, alpha, _ = gate_facts(module)
    found, largest = [plain], 1000.0
    if plain.gated and limit is not None and 0 < limit < math.inf:
        clamped, largest = replace(plain, gate_limit=limit, up_limit=limit), max(largest, 10 * limit)
        found += [clamped, replace(clamped, gate_limit=_silu_inverse(limit))]  # the latter limits silu(gate)
        if alpha is not None:
            found.append(replace(clamped, alpha=alpha, up_offset=1.0))
    return next((str(activation) for activation in found if agrees(activation, gate, largest)), None)


def gate_facts(module: Any) -> tuple[str, float | None, float | None, str | None]:
    """What the module's gate depends on, cheap to ask at every call: its name, limit, alpha and function."""
    gate = getattr(module, "_apply_gate", None)
    name = "" if "_apply_gate" in module.__dict__ else getattr(getattr(gate, "__func__", gate), "__qualname__", "")
    limit, alpha = (_number(module, *names) for names in (("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")))
    return name, limit, alpha, function_name(getattr(module, "act_fn", None))


def _number(module: Any, *names: str) -> float | None:
    """The first of the attributes that is a number."""
    for name in names:
        if isinstance(value := getattr(module, name, None), (int, float)):
            return float(value)
    return None


def _plain_activation(module: Any, act_fn: Any = None) -> Activation | None:
    """Without limits, from the function of the module; gates without one that is named are those of silu."""
    act_fn = getattr(module, "act_fn", None) if act_fn is None else act_fn
    function = "silu" if act_fn is None else function_name(act_fn)
    gated = getattr(module, "has_gate", True)
    if function is None:
        return None
    return Activation(function, gated, interleaved=gated and not getattr(module, "is_concatenated", True))


def _silu_inverse(value: float) -> float:
    """The x > 0 with silu(x) = value > 0, by Newton's method."""
    x = value + 1
    for _ in range(64):
        sigmoid = 1 / (1 + math.exp(-x))
        x -= (x * sigmoid - value) / (sigmoid * (1 + x * (1 - sigmoid)))
    return x


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


def function_name(act_fn: Any) -> str | None:
    """The key of `FUNCTIONS` of an activation function, by its class; None if it is not known, or something was put over it."""
    if isinstance(act_fn, nn.Module) and ("forward" in act_fn.__dict__ or _has_hooks(act_fn)):
        return None
    if getattr(act_fn, "approximate", "none") == "tanh" and type(act_fn) is nn.GELU:
        return "gelu_tanh"
    named = type(act_fn) if isinstance(act_fn, nn.Module) else act_fn
    return _FUNCTIONS.get(f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', '')}")


def _has_hooks(module: nn.Module) -> bool:
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(map(len, kinds))


@torch.no_grad()
def agrees(activation: Activation, gate: Callable[[Tensor], Tensor], largest: float = 1000.0) -> bool:
    """Whether a module's gate computes the activation, on small numbers and on some around `largest`, to meet any clamp."""
    random = torch.Generator().manual_seed(0)
    scale = torch.tensor([1.0, 4.0, 30.0, largest], dtype=torch.float64).repeat_interleave(16)[:, None]
    pre = scale * torch.randn(64, 32, generator=random, dtype=torch.float64)  # in fp32 two ways to write a function differ
    try:
        ours, theirs = activation(pre), gate(pre)
    except Exception:  # a gate that cannot run by itself, on a CPU or in fp64, proves nothing
        return False
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def gate_of(module: Any) -> Callable[[Tensor], Tensor]:
    """The module's own activation: [M, N] -> [M, I]."""
    return module._apply_gate if module.has_gate else module.act_fn


# -------------------------------------------------------------------- the forward


def experts_forward(
    module: Any, hidden_states: Tensor, expert_ids: Tensor, weights: Tensor, *, execution: Execution, activation: str | None
) -> Tensor:
    """[T, H], ids [T, K] (those outside [0, E) are "not here"), weights [T, K] -> [T, H] in the dtype of `hidden_states`."""
    experts = ExpertWeights.of(module)
    return compute(
        hidden_states,
        Topology.from_ids(expert_ids, experts.up.shape[0]),
        experts,
        weights,
        activation=activation,
        gate=gate_of(module),
        norm=module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None,
        execution=execution,
    )


def compute(
    x: Tensor,
    topology: Topology,
    experts: ExpertWeights,
    weights: Tensor | None,
    *,
    activation: str | None,
    gate: Callable[[Tensor], Tensor],
    norm: Callable[[Tensor], Tensor] | None = None,
    execution: Execution,
) -> Tensor:
    """x [T, H] -> [T, H] in its dtype: all in the kernels with an activation, else our two products around `gate`.

    Args:
        activation: the name of one, or None.
        gate: [M, N] -> [M, I], what the module computes itself.
        norm: [M, H] -> [M, H], of each row before it is weighted.
    """
    backend = execution.backend
    if not execution.is_plain:
        if activation is None or norm is not None:
            raise UnsupportedModelError(why_not_executed(execution))
        spec = spec_of(experts, activation, execution)
        parameters = BackendWeights(experts.up, experts.down, experts.up_bias, experts.down_bias)
        return select(spec)[0].experts(x, topology, weights, parameters, spec).to(x.dtype)
    if activation is not None and norm is None:
        y = expert_mlp(
            x,
            topology,
            experts.up,
            experts.down,
            weights,
            activation=activation,
            up_proj_bias=experts.up_bias,
            down_proj_bias=experts.down_bias,
            backend=backend,
        )
        return y.to(x.dtype)
    pre = _add_bias(sdd(x.to(experts.up.dtype), experts.up, topology, backend=backend).values, experts.up_bias, topology)
    hidden = gate(pre)
    columns = Columns.equal(hidden.shape[1], topology.num_experts)
    y = dsd(BlockSparse(hidden.to(pre.dtype), topology, columns), experts.down.transpose(1, 2), backend=backend)
    y = _add_bias(y, experts.down_bias, topology)
    if norm is not None:
        y = norm(y)
    return combine(y, topology, weights, backend=backend).to(x.dtype)


def why_not_executed(execution: Execution) -> str:
    return (
        f"its gate is its own and runs between two products, which backend {execution.backend!r} with precision "
        f"{execution.precision!r} does not have; choose backend='auto', and neither precision nor require_fused"
    )


def spec_of(experts: ExpertWeights, activation: str, execution: Execution) -> ExpertSpec:
    """What a backend is asked for."""
    E, H, F = experts.down.shape
    dtype = autocast_dtype(experts.up) or experts.up.dtype
    bias = experts.up_bias is not None
    contiguous = experts.up.is_contiguous() and experts.down.is_contiguous()
    columns, device = Columns.equal(F, E), experts.up.device
    return ExpertSpec(columns, H, activation, bias, dtype, device, contiguous=contiguous, execution=execution)


def _add_bias(rows: Tensor, bias: Tensor | None, topology: Topology) -> Tensor:
    """rows [M, N] plus the bias [E, N] of the expert of each."""
    return rows if bias is None else rows + bias[topology.row_experts().clamp(max=topology.num_experts - 1)]
