"""Group K: few compilations, whatever the number of tokens. Host syncs, graphs and
torch.compile are in tests/test_moe.py and tests/test_moe_in_pytorch.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.6")


@pytest.mark.case("K4")
@pytest.mark.slow
def test_numbers_of_tokens_share_their_kernels():
    """sonic-moe 60: the exact number of tokens is part of the key, so every new one is tuned and compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernel_variants"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
    variants = json.loads(done.stdout)
    assert {"_sdd_tma_kernel", "_dsd_tma_kernel", "_dsd_transposed_tma_kernel", "_combine_kernel"} <= variants.keys()
    assert max(variants.values()) <= 8, variants  # two uses of each product, four tiles
