"""Switching the experts of a model to this package, and back.

A patched module gets a shallow copy of its config that carries the name: models that share a config object stay independent,
and the switch survives `deepcopy` and pickling.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from blocksparse_moe_kernels import Columns
from blocksparse_moe_kernels.launch import check_type
from blocksparse_moe_kernels.versions import require

from ...backends import ExpertSpec, check_execution, check_layer, select
from ...backends.execution import Execution
from .adapters import OTHERS, Adapter, adapter_of
from .experts import (
    DTYPES,
    ExpertWeights,
    UnsupportedModelError,
    default_activation,
    dispatches,
    experts_forward,
    function_name,
    gate_facts,
    gate_of,
    looks_like_experts,
    proven_activation,
    spec_of,
    up_name,
    why_not,
    why_not_executed,
)

NAME = "blocksparse"
"""The value of `experts_implementation` that selects this package."""


@dataclass(frozen=True)
class PatchedLayer:
    """One experts module: where it is, its class, and the backend that runs it since it was patched.

    Attributes:
        activation: the name of the one that runs inside the kernels; None where the module's own gate runs in torch.
    """

    name: str
    experts_class: str
    backend: str
    activation: str | None

    def __str__(self) -> str:
        what = "its own gate in torch" if self.activation is None else f"{self.activation} fused"
        return f"{self.name or 'the module itself'}: {self.experts_class}, {what}, backend {self.backend}"


@dataclass(frozen=True)
class SkippedLayer:
    """One experts module that was left alone, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name or 'the module itself'}: left alone, {self.reason}"


@dataclass(frozen=True, eq=False)
class _Patch:
    """One switch of a module: how it is computed from then on, and its config before (None for one with an adapter)."""

    execution: Execution
    activation: str | None
    facts: tuple
    config: Any

    def __reduce__(self) -> tuple:
        """A model that is unpickled in another process finds the name registered."""
        return _unpickled, (self.execution, self.activation, self.facts, self.config)

    def computes_like(self, other: _Patch) -> bool:
        return (self.execution, self.activation, self.facts) == (other.execution, other.activation, other.facts)


def _unpickled(*fields: Any) -> _Patch:
    register_huggingface()
    return _Patch(*fields)


class PatchHandle:
    """What `patch_huggingface` did, and the way back. A context manager: leaving it restores the model.

    Patches nest: a handle gives each module the state that it had before, and leaves alone what it did not change.

    Keep `backward()` inside the `with` block when the model uses gradient checkpointing, which runs the forward again.

    Attributes:
        layers: one entry per experts module that was switched.
        skipped: one entry per experts module that was left alone; empty unless `strict=False` was asked for.
    """

    def __init__(
        self, patches: list[tuple[Any, _Patch]], layers: list[PatchedLayer], skipped: list[SkippedLayer] | None = None
    ) -> None:
        self._patches = patches
        self.layers = tuple(layers)
        self.skipped = tuple(skipped or ())

    @property
    def report(self) -> str:
        """Every MoE layer: what runs, and why; for people."""
        return "\n".join(str(layer) for layer in (*self.layers, *self.skipped))

    def __repr__(self) -> str:
        return f"PatchHandle\n{self.report}"

    def restore(self) -> None:
        """Undo the patch, and those made over it since. Does nothing where that has happened already."""
        for module, patch in self._patches:
            if patch in _patches(module):
                _restore(module, patch)

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

    ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)


def patch_huggingface(
    model: nn.Module,
    *,
    backend: str = "auto",
    precision: str | None = None,
    require_fused: bool = False,
    strict: bool = True,
) -> PatchHandle:
    """Compute the experts of `model` by this package, in place.

    Args:
        model: a transformers model, or a part of one; `supports` tells which.
        backend: "auto", "triton", "torch" or "te", for every layer.
        precision, require_fused: of the experts' products, as in `dMoE`.
        strict: refuse a model that has an experts module which cannot be computed here, or not by that backend and in that
            precision; if false, such modules are left alone and listed in the report, as long as there is one that can.
    Returns:
        A handle with `report`, `restore()` and use as a context manager. Patching again with the same backend changes
        nothing; with another one it changes the backend until that handle is restored.
    Raises:
        TypeError: `model` is no module.
        UnsupportedModelError: the model has no experts module that can be computed here, or has one that cannot.
        ValueError: unknown backend or precision; NotImplementedError: the backend cannot run here, with the reason.
        ImportError: transformers is missing or too old.
    """
    register_huggingface()
    check_type("patch_huggingface", "model", model, nn.Module, "Load it first, as by AutoModelForCausalLM.from_pretrained.")
    chosen_execution = check_execution(Execution(backend, precision, require_fused))
    planned: list[tuple[Any, PatchedLayer, _Patch]] = []
    reasons: dict[str, str] = {}
    for name, module in candidates(model):
        try:
            planned.append((module, *_plan(name, module, replace(chosen_execution, memory={}))))
        except UnsupportedModelError as error:
            reasons[name] = str(error)
        except (NotImplementedError, ValueError) as error:  # of the backend
            if strict:
                raise
            reasons[name] = str(error).removesuffix(".")
    if not planned or (reasons and strict):
        found = [f"{name or type(model).__name__}: {reason}" for name, reason in list(reasons.items())[:4]]
        raise UnsupportedModelError(
            f"patch_huggingface: {type(model).__name__} "
            + (
                f"has experts that cannot be computed here ({'; '.join(found)})."
                if found
                else "has no mixture-of-experts layer."
            )
        )
    made = [(module, patch) for module, _, patch in planned if _switch(module, patch)]
    skipped = [SkippedLayer(name, reason) for name, reason in reasons.items()]
    return PatchHandle(made, [layer for _, layer, _ in planned], skipped)


def _plan(name: str, module: Any, execution: Execution) -> tuple[PatchedLayer, _Patch]:
    """What a module becomes; raises UnsupportedModelError of one that cannot be computed here, and what `select` does."""
    if (reason := why_not_patched(module)) is not None:
        raise UnsupportedModelError(reason)
    adapter = adapter_of(module)
    weight = adapter.weight_of(module) if adapter else getattr(module, up_name(module))
    activation = _proven_activation(module, adapter)
    runs = _what_runs(module, adapter, activation, weight, execution)
    patch = _Patch(execution, activation, _facts(module, adapter), None if adapter else module.config)
    return PatchedLayer(name, type(module).__name__, runs, activation), patch


def _what_runs(module: Any, adapter: Adapter | None, activation: str | None, weight: Tensor, execution: Execution) -> str:
    """The backend of a module, why, and its precision; raises what `select` does."""
    on_meta = weight.device.type == "meta"  # offloaded, or not loaded yet
    later = f"{execution.backend} (chosen where it runs; its weights are on meta now)"
    if execution.is_plain:
        if on_meta:
            return later
        # Its sizes do not matter, and partitioned weights have none until they are gathered.
        plain = ExpertSpec(Columns.equal(1, 1), 1, "swiglu", False, weight.dtype, weight.device, execution=execution)
        backend, reason = select(plain)
        return f"{backend.name} ({reason})"
    if activation is None:
        raise UnsupportedModelError(why_not_executed(execution))
    read = ExpertWeights.of if adapter is None else adapter.weights
    assert read is not None  # of one that has an activation
    asked = "" if execution.precision is None else f", precision {execution.precision}"
    if weight.ndim == 1:
        return f"{execution.backend} (chosen when its partitioned weights are gathered){asked}"
    spec = spec_of(read(module), activation, execution)
    if on_meta:
        check_layer(spec)
        return later + asked
    try:
        backend, reason = select(spec)
    except ValueError as error:
        if spec.dtype == torch.float64:  # which autocast leaves alone
            raise
        return f"none but under autocast ({error})"
    return f"{backend.name} ({reason}), precision {backend.brief(spec)}"


def unpatch_huggingface(model: nn.Module) -> None:
    """Undo every patch of `model`: also where the handle is not at hand, or belongs to the model that this is a copy of.

    `model.set_experts_implementation` does not undo a patch, nor does it change what a patched layer runs.
    """
    check_type("unpatch_huggingface", "model", model, nn.Module, "Give the model that was patched, or a copy of it.")
    for module in model.modules():
        if patches := _patches(module):
            _restore(module, patches[0])


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that compute routed experts, or should by their name; not the parts of one that has an adapter."""
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(prefix) for prefix in inside):
            continue
        adapted, other = adapter_of(module) is not None, type(module).__name__ in OTHERS
        if adapted or other:
            inside.append(f"{name}." if name else "")
        if adapted or (looks_like_experts(module) and not other):
            yield name, module


def why_not_patched(module: Any) -> str | None:
    """Why `patch_huggingface` cannot compute a module; None when it can."""
    if (adapter := adapter_of(module)) is None:
        if (reason := why_not(module)) is None and not dispatches(module):
            reason = _replaced(f"this {type(module).__name__}")
        return reason
    if (reason := adapter.why_not(module)) is not None:
        return reason
    if (whose := adapter.replaced(module)) is not None:
        return _replaced(whose)
    weight = adapter.weight_of(module)
    return None if weight.dtype in DTYPES else f"its weights are {weight.dtype}, a quantised format"


def _replaced(whose: str) -> str:
    return (
        f"the forward of {whose} was replaced by something else, which would run no more or never reach ours; patch before that"
    )


def _proven_activation(module: Any, adapter: Adapter | None) -> str | None:
    """The activation that may run inside the kernels."""
    if adapter is None:
        return proven_activation(module, gate_of(module))
    gate = adapter.gate_of(module)
    return None if gate is None else proven_activation(module, gate, adapter.function_of(module))


def _facts(module: Any, adapter: Adapter | None) -> tuple:
    return *gate_facts(module), None if adapter is None else function_name(adapter.function_of(module))


def _activation_in_force(module: Any, adapter: Adapter | None, patch: _Patch) -> str | None:
    """What was proven, unless what the gate depends on has changed since."""
    return patch.activation if _facts(module, adapter) == patch.facts else None


def _switch(module: Any, patch: _Patch) -> bool:
    """Whether there was anything to switch."""
    patches = _patches(module)
    if patches and patches[-1].computes_like(patch):
        return False
    module._blocksparse_patches = (*patches, patch)
    if patch.config is None:
        module.forward = partial(_adapted_forward, module)
        return True
    module.config = copy.copy(module.config)
    # The public property would switch sub-configs as well, which the copy shares with the original.
    module.config._experts_implementation_internal = NAME
    return True


def _restore(module: Any, patch: _Patch) -> None:
    """Undo one of the module's patches, and those made over it."""
    patches = _patches(module)
    module._blocksparse_patches = patches[: patches.index(patch)]
    if not module._blocksparse_patches:
        del module._blocksparse_patches
    if patch.config is not None:
        module.config = patch.config
    elif not _patches(module):
        if _is_ours(module.__dict__.get("forward")):
            del module.forward
        elif _is_ours(module.__dict__.get("_old_forward")):  # accelerate has put a hook over it since
            module._old_forward = type(module).forward.__get__(module)


def _is_ours(forward: Any) -> bool:
    return isinstance(forward, partial) and forward.func is _adapted_forward


def _adapted_forward(module: Any, *args: Any, **named: Any) -> Any:
    """Forward of a module with an adapter."""
    adapter, patch = adapter_of(module), _patches(module)[-1]
    assert adapter is not None
    if (reason := adapter.why_not(module)) is not None:
        raise UnsupportedModelError(f"{type(module).__name__}: {reason}. Call unpatch_huggingface(model).")
    activation = _activation_in_force(module, adapter, patch)
    return adapter.forward(module, *args, **named, execution=patch.execution, activation=activation)


def _patches(module: Any) -> tuple[_Patch, ...]:
    """The patches of a module that have not been restored, the one in force last."""
    return module.__dict__.get("_blocksparse_patches", ())


def _forward(module: Any, hidden_states: Tensor, *routing: Tensor, **named: Tensor) -> Tensor:
    """Forward of an experts module, in the form of transformers' interface: [T, H], ids [T, K], weights [T, K] -> [T, H]."""
    aliases = (("top_k_index", "router_indices"), ("top_k_weights", "routing_weights"))
    expert_ids, weights = (
        *routing,
        *(named[first] if first in named else named[second] for first, second in aliases[len(routing) :]),
    )
    patches = _patches(module)
    if not patches and (reason := why_not(module)) is not None:
        raise UnsupportedModelError(f'experts_implementation="{NAME}": {reason}.')
    execution = patches[-1].execution if patches else Execution()
    activation = _activation_in_force(module, None, patches[-1]) if patches else default_activation(module)
    return experts_forward(module, hidden_states, expert_ids, weights, execution=execution, activation=activation)
