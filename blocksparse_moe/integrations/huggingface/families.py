"""Which models of transformers can be computed here: told from its sources, without weights and without a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from torch import nn

from blocksparse_moe_kernels.versions import require

from .adapters import ADAPTERS, adapter_of
from .patch import candidates, why_not_patched

REFUSED = {
    "aria": "before transformers 5.18 its experts do not dispatch through transformers' experts interface",
    "doge": "its experts are single vectors, not MLPs",
    "nllb_moe": "its experts are modules of their own and drop tokens beyond a capacity",
    "switch_transformers": "its experts are modules of their own and drop tokens beyond a capacity",
    "vitpose": "its experts are heads for datasets, not routed",
}
"""Folders of transformers with experts that cannot be computed here, and why."""


@dataclass(frozen=True)
class Support:
    """Whether a model can be computed here; true if so.

    Attributes:
        model_type: of its config; for a model its class.
        tier: "interface": its experts dispatch through transformers' experts interface; "adapter": its modules are adapted one
            by one; "refused": it has experts that cannot be computed here; "dense": it has none.
        experts: classes of experts that are computed here.
        reason: why not; empty if it can.
    """

    model_type: str
    tier: Literal["interface", "adapter", "refused", "dense"]
    experts: tuple[str, ...] = ()
    reason: str = ""

    def __bool__(self) -> bool:
        return self.tier in ("interface", "adapter")

    def __str__(self) -> str:
        return f"{self.model_type}: {', '.join(self.experts) if self else f'no, {self.reason}'}"


def supports(subject: nn.Module | Any) -> Support:
    """Whether `patch_huggingface` can compute the experts of a model.

    Args:
        subject: a model, a config of transformers, or a model type such as "mixtral".
    Raises:
        ValueError: the installed transformers does not know the model type; TypeError: `subject` is none of these.
        ImportError: transformers is missing or too old.
    """
    require("transformers", "5.9", "the Hugging Face integration")
    if isinstance(subject, nn.Module):
        return _of_model(subject)
    if isinstance(subject, str):
        return _of_type(subject)
    if isinstance(getattr(subject, "model_type", None), str):
        found = [_of_type(model_type) for model_type in dict.fromkeys(_model_types(subject))]
        best = max(found, key=lambda support: ("dense", "refused", "adapter", "interface").index(support.tier))
        if best and getattr(subject, "quantization_config", None):
            return Support(best.model_type, "refused", reason="its config asks for quantised weights; load it dequantised")
        return best
    raise TypeError(f"supports: expected a model, a config or a model type; got {type(subject).__name__}.")


def _of_model(model: nn.Module) -> Support:
    name = type(model).__name__
    modules = [module for _, module in candidates(model)]
    reasons = [reason for module in modules if (reason := why_not_patched(module)) is not None]
    if reasons:
        return Support(name, "refused", reason=reasons[0])
    if modules:
        tier: Literal["interface", "adapter"] = "adapter" if any(map(adapter_of, modules)) else "interface"
        return Support(name, tier, tuple(dict.fromkeys(type(module).__name__ for module in modules)))
    return Support(name, "dense", reason="it has no mixture-of-experts layer")


def _model_types(config: Any) -> Iterator[str]:
    """Of a config and of those inside it: a model of several modalities has its experts in one of them."""
    yield config.model_type
    for name in getattr(config, "sub_configs", {}):
        if getattr(getattr(config, name, None), "model_type", None):
            yield from _model_types(getattr(config, name))


def _of_type(model_type: str) -> Support:
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    folder = model_type_to_module_name(model_type)
    if folder not in _folders():
        folder = _folders_of_types().get(model_type, "")
    if folder not in _folders():
        raise ValueError(
            f"supports: the installed transformers has no model type {model_type!r}. If its code comes with the checkpoint, "
            "load the model and give it instead."
        )
    experts = _folders()[folder]
    if experts:
        return Support(model_type, "adapter" if set(experts) & ADAPTERS.keys() else "interface", experts)
    if folder in REFUSED:
        return Support(model_type, "refused", reason=REFUSED[folder])
    return Support(model_type, "dense", reason="it has no mixture-of-experts layer")


def all_supports() -> list[Support]:
    """Every folder of models with experts in the installed transformers, by name."""
    require("transformers", "5.9", "the Hugging Face integration")
    return [_of_type(folder) for folder, experts in sorted(_folders().items()) if experts or folder in REFUSED]


def markdown(found: list[Support]) -> str:
    """A table for a document."""
    rows = [f"| `{one.model_type}` | {', '.join(one.experts) if one else f'no: {one.reason}'} |" for one in found]
    return "\n".join(("| model type | experts computed here |", "|---|---|", *rows))


@cache
def _folders_of_types() -> dict[str, str]:
    """Model types that configs declare, those of parts of a model too -> their folder."""
    (root,) = import_module("transformers.models").__path__
    files = Path(root).glob("*/configuration_*.py")
    return {
        found: file.parent.name
        for file in files
        for found in re.findall(r'^    model_type = "(\w+)"', file.read_text("utf-8"), re.MULTILINE)
    }


_EXPERTS = rf"^(?:@use_experts_implementation.*\nclass |class (?=(?:{'|'.join(ADAPTERS)})\b))(\w+)"


@cache
def _folders() -> dict[str, tuple[str, ...]]:
    """Folders of models of the installed transformers -> their classes that can be computed here."""
    (root,) = import_module("transformers.models").__path__
    return {
        file.parent.name: tuple(re.findall(_EXPERTS, file.read_text("utf-8"), re.MULTILINE))
        for file in sorted(Path(root).glob("*/modeling_*.py"))
        if file.name == f"modeling_{file.parent.name}.py"
    }
