"""Hugging Face transformers: the experts of a model computed by this package, weights where they are.

transformers dispatches the forward of a decorated experts module by the name in its config
(`transformers.integrations.moe.ExpertsInterface`). `register_huggingface` makes the name "blocksparse" legal there;
`patch_huggingface` switches an existing model. Routers, parameters, their names and `module.forward` stay untouched, so
checkpoints, auxiliary losses and hooks keep working.

A patched module gets a shallow copy of its config that carries the name: models that share a config object stay independent,
and the switch survives `deepcopy` and pickling.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blocksparse_moe_kernels import Topology
from blocksparse_moe_kernels.launch import check_type
from blocksparse_moe_kernels.versions import require

from ..backends import check_name
from ..ops import expert_mlp
from ..products import choose, constant_when_compiled

NAME = "blocksparse"
"""The value of `experts_implementation` that selects this package."""


@dataclass(frozen=True)
class Family:
    """A family of models whose experts are computed here: the class of its experts, by module and name."""

    module: str
    experts: str


FAMILIES = {"mixtral": Family("transformers.models.mixtral.modeling_mixtral", "MixtralExperts")}

# Class of an activation module -> gated activation that computes the same.
_GATED = {
    "SiLU": "swiglu",
    "SiLUActivation": "swiglu",
    "GELUActivation": "geglu",
    "GELU": "geglu",
    "GELUTanh": "geglu_tanh",
    "PytorchGELUTanh": "geglu_tanh",
    "ReLU": "reglu",
    "ReLUSquaredActivation": "relu2_glu",
}

# Flags of transformers' experts interface, with the value that `_experts_forward` implements.
_FLAGS = {
    "has_gate": True,
    "has_bias": False,
    "is_transposed": False,
    "is_concatenated": True,
    "has_post_expert_norm": False,
}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class UnsupportedModelError(NotImplementedError):
    """No layer of the model can be computed here; the message names what was found and why not."""


@dataclass(frozen=True)
class PatchedLayer:
    """One experts module: where it is, its class, and the backend that runs it since it was patched."""

    name: str
    experts_class: str
    backend: str
    activation: str

    def __str__(self) -> str:
        return f"{self.name or 'the module itself'}: {self.experts_class}, {self.activation} fused, backend {self.backend}"


@dataclass(frozen=True, eq=False)
class _Patch:
    """One switch of an experts module: the backend that runs from then on, and the config of the module before."""

    backend: str
    config: Any


class PatchHandle:
    """What `patch_huggingface` did, and the way back. A context manager: leaving it restores the model.

    Patches nest: a handle gives each module the state that it had before, and leaves alone what it did not change.

    Keep `backward()` inside the `with` block when the model uses gradient checkpointing, which runs the forward again.

    Attributes:
        layers: one entry per experts module that was switched.
    """

    def __init__(self, patches: list[tuple[Any, _Patch]], layers: list[PatchedLayer]) -> None:
        self._patches = patches
        self.layers = tuple(layers)

    @property
    def report(self) -> str:
        """Every MoE layer: what runs, and why; for people."""
        return "\n".join(str(layer) for layer in self.layers)

    def restore(self) -> None:
        """Undo the patch, and those made over it since. Does nothing where that has happened already."""
        for module, patch in self._patches:
            patches = _patches(module)
            if patch in patches:
                module.config = patch.config
                module._blocksparse_patches = patches[: patches.index(patch)]
                if not module._blocksparse_patches:
                    del module._blocksparse_patches

    def __enter__(self) -> PatchHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()


def register_huggingface() -> None:
    """Make `experts_implementation="blocksparse"` legal in `from_pretrained`, `from_config` and `set_experts_implementation`.

    Registering twice is registering once. Raises ImportError without transformers >= 5.9.
    """
    require("transformers", "5.9", "the Hugging Face integration")
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts_forward)


def patch_huggingface(model: nn.Module, *, backend: str = "auto") -> PatchHandle:
    """Compute the experts of `model` by this package, in place.

    Args:
        model: a transformers model; for now of the Mixtral family.
        backend: "auto", "triton" or "torch", for every layer.
    Returns:
        A handle with `report`, `restore()` and use as a context manager. Patching again with the same backend changes
        nothing; with another one it changes the backend until that handle is restored.
    Raises:
        TypeError: `model` is no module.
        UnsupportedModelError: the model has no experts module that can be computed here, or has one that cannot.
        ValueError: unknown backend; NotImplementedError: the backend cannot run here, with the reason.
        ImportError: transformers is missing or too old.
    """
    register_huggingface()
    check_type("patch_huggingface", "model", model, nn.Module, "Load it first, as by AutoModelForCausalLM.from_pretrained.")
    check_name(backend)
    candidates = {name: module for name, module in model.named_modules() if _looks_like_experts(module)}
    reasons = {name: reason for name, module in candidates.items() if (reason := why_not(module)) is not None}
    if reasons or not candidates:
        found = [f"{name or type(model).__name__}: {reason}" for name, reason in list(reasons.items())[:4]]
        raise UnsupportedModelError(
            f"patch_huggingface: {type(model).__name__} "
            + (f"has experts that cannot be computed here ({'; '.join(found)})" if found else "has no mixture-of-experts layer")
            + f". Supported families: {', '.join(FAMILIES)}."
        )
    layers = []
    for name, module in candidates.items():
        weight = module.gate_up_proj
        chosen, reason = choose(backend, weight.device, weight.dtype)
        layers.append(PatchedLayer(name, type(module).__name__, f"{chosen} ({reason})", str(_activation(module))))
    made = []
    for module in candidates.values():
        patches = _patches(module)
        if patches and patches[-1].backend == backend:
            continue
        patch = _Patch(backend, module.config)
        module._blocksparse_patches = (*patches, patch)
        module.config = copy.copy(module.config)
        # The public property would switch sub-configs as well, which the copy shares with the original.
        module.config._experts_implementation_internal = NAME
        made.append((module, patch))
    return PatchHandle(made, layers)


def _patches(module: Any) -> tuple[_Patch, ...]:
    """The patches of a module that have not been restored, the one in force last."""
    return module.__dict__.get("_blocksparse_patches", ())


def why_not(module: Any) -> str | None:
    """Why an experts module of transformers cannot be computed here; None when it can."""
    if not _is_known(module):
        return f"{type(module).__name__} is of a family that is not supported"
    from transformers.integrations.moe import _default_apply_gate

    for flag, value in _FLAGS.items():
        if getattr(module, flag, value) != value:
            return f"{type(module).__name__} has {flag}={getattr(module, flag)}; only {value} is supported"
    for flag, default in _unknown_flags().items():
        if getattr(module, flag, default) != default:
            return f"{type(module).__name__} has {flag}={getattr(module, flag)}, which this version does not know"
    if getattr(module._apply_gate, "__func__", module._apply_gate) is not _default_apply_gate:
        return f"{type(module).__name__} has a gate of its own"
    if _activation(module) is None:
        return f"its activation {type(module.act_fn).__name__} is not known here"
    if module.gate_up_proj.dtype not in _DTYPES:
        return f"its weights are {module.gate_up_proj.dtype}, a quantised format"
    return None


def _looks_like_experts(module: nn.Module) -> bool:
    return hasattr(module, "is_concatenated") or type(module).__name__.endswith("Experts")


def _is_known(module: nn.Module) -> bool:
    """Whether the module is an experts class of `FAMILIES`, or derived from one (parametrizations derive)."""
    known = {(family.module, family.experts) for family in FAMILIES.values()}
    return any((base.__module__, base.__qualname__) in known for base in type(module).__mro__)


def _activation(module: Any) -> str | None:
    """The gated activation, a key of `ACTIVATIONS`, that the module computes; None if it is not known."""
    if getattr(module.act_fn, "approximate", "none") == "tanh":
        return "geglu_tanh"
    return _GATED.get(type(module.act_fn).__name__)


@constant_when_compiled
def _unknown_flags() -> dict[str, object]:
    """Flags of the installed experts interface that this version does not know, with their defaults."""
    from transformers.integrations import moe

    parameters = inspect.signature(moe.use_experts_implementation).parameters.values()
    known = {"experts_class", "experts_interface", *_FLAGS}
    return {parameter.name: parameter.default for parameter in parameters if parameter.name not in known}


def _experts_forward(module: Any, hidden_states: Tensor, *routing: Tensor, **named: Tensor) -> Tensor:
    """Forward of an experts module, in the form of transformers' interface: [T, H], ids [T, K], weights [T, K] -> [T, H].

    Ids outside [0, E) are "not here", as expert-parallel plans send them. The result has the dtype of `hidden_states`.
    """
    aliases = (("top_k_index", "router_indices"), ("top_k_weights", "routing_weights"))
    expert_ids, weights = (
        *routing,
        *(named[first] if first in named else named[second] for first, second in aliases[len(routing) :]),
    )
    patches = _patches(module)
    if not patches and (reason := why_not(module)) is not None:
        raise UnsupportedModelError(f'experts_implementation="{NAME}": {reason}. Supported families: {", ".join(FAMILIES)}.')
    gate_up_proj, down_proj = module.gate_up_proj, module.down_proj
    y = expert_mlp(
        hidden_states,
        Topology.from_ids(expert_ids, gate_up_proj.shape[0]),
        gate_up_proj,
        down_proj,
        weights,
        activation=str(_activation(module)),
        backend=patches[-1].backend if patches else "auto",
    )
    return y.to(hidden_states.dtype)
