"""Precisions of Transformer Engine: which recipe each is, what it wants of the rows, and where it runs.

Source: the recipes of Transformer Engine 2.17 to 2.20; MXFP8 after the OCP Microscaling Formats (MX) specification 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass

from .engine import Engine

FUSED_ALIGNMENT = 256
"""Rows of each expert, of the kernels of the fused grouped MLP."""


@dataclass(frozen=True)
class Recipe:
    """One precision.

    Attributes:
        name: class in `transformer_engine.common.recipe`; None for plain GEMMs in the dtype of the computation.
        question: key of `engine.QUESTIONS` that decides; None for what always runs.
        alignment: rows of each expert are padded to a multiple of it.
        size_multiple: what H, F and the columns of both projections must be multiples of.
        nearest: precisions to offer in its place, the closest first; that of the weights comes last and is not named.
        proven: whether it has run on hardware in this project's hands.
    """

    name: str | None
    question: str | None
    alignment: int
    size_multiple: int
    nearest: tuple[str, ...] = ()
    proven: bool = True


RECIPES = {
    "bf16": Recipe(None, None, 1, 1),
    "fp8_current": Recipe("Float8CurrentScaling", "fp8", 16, 16, ("fp8_block", "mxfp8")),
    "fp8_delayed": Recipe("DelayedScaling", "fp8", 16, 16, ("fp8_block", "mxfp8")),
    "fp8_block": Recipe("Float8BlockScaling", "fp8_block", 16, 16, ("fp8_current", "mxfp8")),
    "mxfp8": Recipe("MXFP8BlockScaling", "mxfp8", 32, 32, ("fp8_block", "fp8_current"), proven=False),
    "nvfp4": Recipe("NVFP4BlockScaling", "nvfp4", 128, 32, ("mxfp8", "fp8_block", "fp8_current"), proven=False),
}
"""By the name that `precision` takes."""


def never(precision: str, sizes: tuple[int, ...]) -> str | None:
    """Why `precision` multiplies matrices of those sizes nowhere; None when it may."""
    multiple = RECIPES[precision].size_multiple
    odd = sorted({size for size in sizes if size % multiple})
    if not odd:
        return None
    return f"cannot compute in {precision} with sizes {', '.join(map(str, odd))}: H and F must be multiples of {multiple}"


def why_not(precision: str, engine: Engine, device: str) -> str | None:
    """Why `precision` does not run on the device that `engine` speaks of; None when it does.

    Transformer Engine itself refuses to enter a recipe that is not available, NVFP4 apart (2.20): all are asked about here.
    """
    question = RECIPES[precision].question
    if question is None or (reason := engine.available[question]) is None:
        return None
    return f"cannot compute in {precision} on {device} (compute capability {engine.capability[0]}.{engine.capability[1]}): " + (
        reason.strip().rstrip(".") or "Transformer Engine gave no reason"
    )
