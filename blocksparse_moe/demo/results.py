"""What the demo found: differences, checks, and metrics.json."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from .settings import Settings

EAGER, GROUPED_MM, OURS = "eager", "grouped_mm", "blocksparse"

FIRST_STEPS = 25
BOUND = 1e-5
FACTOR = 3
WARM_UP_STEPS = 3


@dataclass
class Curve:
    """One training.

    Attributes:
        name: who computed the experts.
        losses: of every step.
        seconds: that every step took.
        gradient_difference: to eager's from the same weights on the same batch: the largest over all parameters of
            ||g - g_eager|| / ||g_eager||.
        gradient_parameter: the parameter where it is largest.
        obstacle: why it did not run, if it did not.
    """

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    gradient_difference: float = 0.0
    gradient_parameter: str = ""
    obstacle: str | None = None

    def tokens_per_second(self, tokens: int) -> float:
        """Of the median step after the warm-up, with `tokens` in a step."""
        return tokens / statistics.median(self.seconds[WARM_UP_STEPS:] or self.seconds)


@dataclass(frozen=True)
class Check:
    """Something promised: `value` is at most `bound`. Without a bound it is shown, not promised; `note` says why."""

    name: str
    value: float
    bound: float | None
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.bound is None or self.value <= self.bound


@dataclass(frozen=True)
class Results:
    """Everything that the demo reports.

    Attributes:
        model: sizes and optimizer, by name.
        backend: how the experts were computed, in words.
        curves: the trainings, by name.
        loads: [layers, E, steps] int64, rows of each expert in the schedule of every step of our training.
        dropped: slots that no tile of their own expert covered, over all layers and steps.
        slots: all slots, T * K * layers * steps.
        prompt, sample: what the trained model was given, and what it wrote.
        interrupted: whether Ctrl-C ended the training early.
    """

    settings: Settings
    text: str
    model: dict[str, Any]
    backend: str
    curves: dict[str, Curve]
    loads: Tensor
    dropped: int
    slots: int
    prompt: str
    sample: str
    interrupted: bool

    @property
    def steps(self) -> int:
        """Steps that every training has done."""
        return len(self.curves[EAGER].losses)

    def differences(self, name: str) -> list[float]:
        """Of the losses of a training to eager's, relative, step by step."""
        pairs = zip(self.curves[name].losses, self.curves[EAGER].losses, strict=True)
        return [abs(loss - eager) / abs(eager) for loss, eager in pairs]

    @property
    def checks(self) -> list[Check]:
        """What is promised of our training, with what came.

        Losses in fp32 stay close to eager's for some steps; rounding differs, and training amplifies that, so what comes later
        is measured by how far transformers' own two implementations part in the same run.
        """
        exact = self.settings.dtype == "float32"
        note = "" if exact else f"shown, not checked in {self.settings.dtype}"
        ours = self.differences(OURS)
        checks = [
            Check("gradients of one batch", self.curves[OURS].gradient_difference, BOUND if exact else None, note),
            Check(
                f"losses of steps 1 to {min(self.steps, FIRST_STEPS)}",
                largest(ours[:FIRST_STEPS]),
                BOUND if exact else None,
                note,
            ),
        ]
        if self.steps > FIRST_STEPS:
            bound = None
            if exact and self.curves[GROUPED_MM].obstacle:
                note = "shown, not checked without grouped_mm"
            elif exact:
                bound = max(BOUND, FACTOR * largest(self.differences(GROUPED_MM)[FIRST_STEPS:]))
            checks.append(Check("losses of later steps", largest(ours[FIRST_STEPS:]), bound, note))
        checks.append(Check("dropped rows", self.dropped, 0))
        return checks

    def metrics(self) -> dict[str, Any]:
        """The content of metrics.json."""
        settings = dataclasses.asdict(self.settings) | {
            "text": self.text,
            "output": str(self.settings.output),
            "device": str(self.settings.torch_device),
        }
        runs: dict[str, Any] = {}
        for name, curve in self.curves.items():
            if curve.obstacle:
                runs[name] = {"obstacle": curve.obstacle}
                continue
            runs[name] = {
                "losses": curve.losses,
                "tokens_per_second": curve.tokens_per_second(self.settings.tokens),
                "seconds": curve.seconds,
            }
            if name != EAGER:
                runs[name]["difference_to_eager"] = {
                    "gradients": curve.gradient_difference,
                    "first_steps": largest(self.differences(name)[:FIRST_STEPS]),
                    "later_steps": largest(self.differences(name)[FIRST_STEPS:]),
                }
        return {
            "configuration": settings | {"model": self.model},
            "backend": self.backend,
            "versions": versions(self.settings.torch_device),
            "steps": self.steps,
            "interrupted": self.interrupted,
            "runs": runs,
            "checks": [dataclasses.asdict(check) | {"holds": check.holds} for check in self.checks],
            "dropped": {"slots": self.dropped, "of": self.slots},
            "load": self.loads.tolist(),
            "sample": {"prompt": self.prompt, "text": self.sample},
        }

    def to_json(self) -> str:
        return json.dumps(_finite(self.metrics()), indent=None, allow_nan=False)


def largest(values: Iterable[float]) -> float:
    """The largest value, 0 of none; not a number counts as infinite."""
    return max((math.inf if math.isnan(value) else value for value in values), default=0.0)


def versions(device: torch.device) -> dict[str, str]:
    """Of everything that takes part."""
    named = ("blocksparse-moe", "torch", "triton", "transformers")
    found = {dist.name.lower(): dist.version for dist in metadata.distributions() if dist.name.lower() in named}
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {"python": platform.python_version(), **{name: found[name] for name in named if name in found}, "device": where}


def _finite(value: Any) -> Any:
    """`value` with null for every number that JSON cannot write."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
