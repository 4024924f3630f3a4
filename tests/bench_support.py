"""What the tests of the benchmarks share: a tiny shape, a case of it, and the command line."""

from __future__ import annotations

import torch
from typer.testing import CliRunner

from bench.__main__ import app
from bench.inputs import Case, make_case
from bench.shapes import Shape

TINY = Shape("tiny", T=24, H=16, F=20, E=6, K=2)
QUICK = ["--shape", "24,16,20,6,2", "--device", "cpu", "--seconds", "0", "--windows", "1"]
ARGUMENTS = [*QUICK, "--backend", "torch"]


def tiny_case() -> Case:
    return make_case(TINY, 1.2, dtype=torch.float32, device=torch.device("cpu"))


def bench(*arguments: str):
    return CliRunner().invoke(app, arguments)
