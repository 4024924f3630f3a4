"""The MXFP8 kernels compile for every architecture: multiplied natively on sm_100 and sm_120, widened elsewhere, on sm_121 as
well; no spills on sm_90."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.6")

from blocksparse_moe.backends.products import NATIVE_MXFP8
from blocksparse_moe_kernels.config import SHARED_MEMORY_KB
from blocksparse_moe_kernels.triton import __path__ as kernel_folders

from .aot import Report
from .aot_mxfp8 import MXFP8_ARCHITECTURES, known_architecture
from .test_aot import WITHOUT_HINTS, compile_ahead

NATIVE = "kind::mxf8f6f4"
"""Of an instruction that multiplies E4M3 by blocks with their scales."""


def faults(report: Report) -> list[str]:
    """What is wrong with a compiled kernel."""
    if report.error is not None:
        return [f"does not compile: {report.error}"]
    found, architecture = [], report.architecture
    if report.shared > 1024 * SHARED_MEMORY_KB[known_architecture(architecture)]:
        found.append("needs more shared memory than a block has")
    if report.config is None:
        return found
    is_native = architecture in NATIVE_MXFP8
    of_weights_only = "quantized=False" in report.build
    if report.dtype != "fp32" or not of_weights_only:
        expected = {90: "wgmma.mma_async", 100: "tcgen05.mma"}.get(architecture, "mma.sync")
        multiplies = [name for name, count in report.instructions.items() if "mma" in name and count]
        if multiplies != [expected]:
            found.append(f"multiplies with {multiplies or 'no tensor core'} instead of {expected}")
        if not of_weights_only and (report.instructions[NATIVE] == report.instructions[expected]) != is_native:
            found.append(f"{'does not multiply' if is_native else 'multiplies'} blocks with their scales")
    if architecture == 90 and report.layout not in WITHOUT_HINTS and report.stack:
        found.append("spills registers")
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(one, marks=[] if one in (90, 100, 120, 121) else pytest.mark.aot_full, id=f"sm_{one}")
        for one in MXFP8_ARCHITECTURES
    ],
)
def test_mxfp8(architecture, tmp_path):
    reports = compile_ahead(tmp_path, architecture, "mxfp8")
    wrong = [f"{report}\n    {fault}" for report in reports for fault in faults(report)]
    assert not wrong, f"{len(wrong)} faults in {len(reports)} kernels\n" + "\n".join(wrong)
    files = [path for folder in kernel_folders for path in Path(folder).glob("mxfp8_*.py")]
    sources = "\n".join(path.read_text() for path in files)
    assert {report.kernel for report in reports} == set(re.findall(r"^def (\w+_kernel)\(", sources, re.M))
