"""Public reports about speed, each as line-ups that would show the fault here: `python -m bench fault S1`."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A report, and what to run.

    Attributes:
        report: who reported what.
        good: what the figures should show.
        op, shapes, skews, stages: as on the command line.
        peers: whom to run beside; empty for none.
    """

    report: str
    good: str
    op: str
    shapes: tuple[str, ...]
    skews: tuple[float, ...] = (1.2, 0.0)
    stages: tuple[str, ...] = ("inference", "forward+backward")
    peers: tuple[str, ...] = ()


FAULTS = {
    "S1": Fault(
        "unsloth 2582, transformers PR 40016, Qwen3 736: a loop over experts is slower than a dense model many times larger.",
        "several times the speed of transformers eager; as many launches at E = 8 as at E = 128",
        "expert_mlp",
        ("8192,2048,768,128,8", "8192,2048,768,8,8"),
        skews=(0.0,),
        peers=("transformers eager",),
    ),
    "S2": Fault(
        "megablocks PR 24, issues 155 and 77: the block-sparse path is slower than a grouped GEMM on Hopper.",
        "both paths are measured; ours is not the slower one",
        "expert_mlp",
        ("4096,2048,2048,32,4",),
        peers=("torch grouped_mm", "transformers grouped_mm", "megablocks grouped", "megablocks sparse"),
    ),
    "S3": Fault(
        "scattermoe 10, vLLM PR 57100: tuned on even load only.",
        "uneven loads cost what their partly filled tiles cost, not 1.5 times that",
        "expert_mlp",
        ("qwen3-30b-a3b",),
        skews=(0.0, 1.5, math.inf),
    ),
    "S4": Fault(
        "torchtitan 4273: the router's product in fp32 leaves the tensor cores alone and takes 8 to 9 % of a step.",
        "little beside the layer",
        "router",
        ("8192,7168,2048,256,8",),
        skews=(0.0,),
    ),
}
