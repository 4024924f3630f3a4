"""The examples run as they are, and what they train gets better."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text())
SHORTER = {"balance.py": ["--steps", "16"], "low_precision.py": ["--steps", "20", "--batch-size", "2"]}
"""Those of several trainings."""

pytest.importorskip("transformers", minversion="5.9")
pytest.importorskip("peft")
pytest.importorskip("accelerate")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_example(script, tmp_path):
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # other tests run beside it, and threads that outnumber the cores crawl
    command = [sys.executable, str(EXAMPLES / script), *SHORTER.get(script, [])]
    environment = one_thread | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-2000:]
    if script.startswith("finetune"):
        assert "swiglu fused" in result.stdout
    else:
        name = script.removesuffix(".py")
        assert (tmp_path / f"runs/{name}/{name}.png").stat().st_size > 10_000
    before, after = map(float, re.search(r"^loss (\S+) -> (\S+)$", result.stdout, re.MULTILINE).groups())
    assert after < before - 1, result.stdout
