"""The examples run as they are, and what they train gets better."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text())

pytest.importorskip("transformers", minversion="5.9")
pytest.importorskip("peft")
pytest.importorskip("accelerate")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_example(script):
    few_threads = os.environ | {"OMP_NUM_THREADS": "2"}  # other tests run beside it, and threads that outnumber the cores crawl
    command = [sys.executable, str(EXAMPLES / script)]
    result = subprocess.run(command, env=few_threads, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "swiglu fused" in result.stdout
    before, after = map(float, re.search(r"^loss (\S+) -> (\S+)$", result.stdout, re.MULTILINE).groups())
    assert after < before - 1, result.stdout
