"""transformers' own tensor, expert and data parallel plans, on two processes: what a shard of experts computes here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.9")
pytest.importorskip("accelerate")
from transformers.distributed import DistributedConfig

from .hf_families import build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(DistributedConfig, "ep_size"), reason="the installed transformers shards by another interface"
    ),
]
ROOT = Path(__file__).parents[1]
FAMILIES = ("gpt_oss", "mixtral", "qwen3_moe")
SHARES = {"tensor parallel": (1, 2), "expert parallel": (2, 1), "sharded data": (1, 1), "sharded data, expert parallel": (2, 1)}
"""Into how many parts the experts and their columns are cut."""


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in FAMILIES:
        build(name).save_pretrained(folder / name)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        "-m",
        "tests.hf_distributed",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, str(folder)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("route", ["by name", "patched"])
@pytest.mark.parametrize("plan", SHARES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_plan(name, plan, route, found):
    experts = next(module for module in build(name).modules() if type(module).__name__.endswith("Experts"))
    E, *sizes = experts.down_proj.shape
    expert_parts, column_parts = SHARES[plan]
    if name == "gpt_oss":
        column_parts = 1  # its plan leaves the columns of experts whole
    for rank in found:
        one = rank[f"{name}, {plan}, {route}"]
        assert one["shapes"], "no layer ran here"
        for count, *others in one["shapes"]:
            assert count == E // expert_parts
            assert sorted(others) in ([sizes[0] // column_parts, sizes[1]], sorted([sizes[0], sizes[1] // column_parts]))
        assert not one["missing"]
        assert one["difference"] <= 1e-5, one["worst"]
