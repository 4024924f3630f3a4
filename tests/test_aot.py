"""Every kernel compiles for every architecture, and what comes out uses the hardware: tensor cores, pipelined loads, no spills.

Needs no GPU. `make aot` compiles the full product of flags and layouts instead of the representative part.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.6")

from blocksparse_moe_kernels.config import SHARED_MEMORY_KB, GemmConfig
from blocksparse_moe_kernels.triton import __path__ as kernel_folders
from blocksparse_moe_kernels.versions import gluon_is_known

from .aot import Report
from .aot_cases import ARCHITECTURES, DTYPES, PRODUCTS

ROOT = Path(__file__).parents[1]
WITHOUT_HINTS = ("odd", "varied_odd", "strided")
"""Layouts of which the compiler knows nothing, so that elements are loaded one by one. They need to be right, not fast."""

NOT_TUNED = [
    ("_sdd_kernel", "columns"),  # two halves hide that the columns of a gated weight lie side by side
    ("_sdd_kernel", "varied"),  # widths from memory: nothing says that 16 divides them
    ("_dsd_kernel", "varied"),
    ("_dsd_transposed_kernel", "varied"),
]
"""Kernels and layouts that hints could make fast."""

ALLOWED_STACK = {
    ("_sdd_tma_kernel", GemmConfig(128, 256, 64, 8, 3, tma=True)): (160, "erf of all columns, once a tile"),
    ("_sdd_tma_kernel", GemmConfig(64, 256, 64, 4, 4, tma=True)): (96, "8 warps spill nothing and are up to 11 % slower"),
    ("_sdd_tma_kernel", GemmConfig(32, 256, 64, 4, 4, tma=True)): (16, "erf of all columns, once a tile"),
    ("_sdd_kernel", GemmConfig(128, 256, 64, 8, 3)): (320, "once a tile; 128x128 spills nothing and is 13 to 26 % slower"),
}
"""Bytes of spilled registers that a configuration of sm_90 may have outside the loop of its product, and why."""

STORE_BUFFER = {
    "_sdd_tma_kernel": 1, "_sdd_gluon_kernel": 1, "_dsd_gluon_kernel": 1, "_dsd_tma_kernel": 2, "_dsd_transposed_tma_kernel": 2,
    "_dsd_transposed_gluon_kernel": 1,
}  # fmt: skip
"""Bytes of the buffer from which TMA stores, for each element of the tile (1 where half a tile is stored at a time). A
transposed product whose store shared the buffers of its loads (128x256, both operands by TMA; Triton 3.6, H200) wrote wrong
results."""

BOTH_COPIES = ("_sdd_gluon_kernel", "_dsd_transposed_gluon_kernel")
"""Kernels that gather one operand, and load the other one by TMA."""

COPIES = ("cp.async.c", "cp.async.bulk.tensor")
"""Asynchronous copies: of 4 to 16 bytes by a thread, and of tiles by TMA."""


def compile_ahead(folder: Path, architecture: int, *options: str) -> list[Report]:
    """Reports of `python -m tests.aot`, compiled from an empty cache on this worker's share of the cores."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    workers = int(environment.get("PYTEST_XDIST_WORKER_COUNT", 1))
    jobs = max(1, len(os.sched_getaffinity(0)) // workers)
    file = folder / "reports.json"
    command = [sys.executable, "-m", "tests.aot", str(architecture), *options, "--jobs", str(jobs), "--json", str(file)]
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-4000:]}"
    reports = [Report(**fields) for fields in json.loads(file.read_text())]
    return [replace(report, config=report.config and GemmConfig(**report.config)) for report in reports]


def faults(report: Report) -> list[str]:
    """What is wrong with a compiled kernel."""
    if report.error is not None:
        return ["does not compile"]
    found = []
    limit = 1024 * SHARED_MEMORY_KB[report.architecture]
    if report.shared > limit:
        found.append(f"needs more shared memory than the {limit} B of a block")
    config = report.config
    if config is None or report.dtype == "fp32":
        return found

    wide = config.block_m >= 64
    expected = {90: "wgmma.mma_async", 100: "tcgen05.mma"}.get(report.architecture, "mma.sync") if wide else "mma.sync"
    multiplies = [name for name, count in report.instructions.items() if "mma" in name and count]
    if multiplies != [expected]:
        found.append(f"multiplies with {multiplies or 'no tensor core'} instead of {expected}")
    opcodes = report.opcodes
    if opcodes is not None and opcodes["HGMMA"] < opcodes["HGMMA batches"] * (config.block_k // 16):
        found.append("waits for each wgmma before the next")

    if report.layout in WITHOUT_HINTS or (report.kernel, report.layout) in NOT_TUNED:
        return found
    # mma.sync reads its operands into registers, so the stage that is multiplied needs no buffer.
    buffers = config.num_stages - (expected == "mma.sync")
    pipelined = 2 * buffers * config.block_k * (config.block_m + config.block_n)
    store_buffer = STORE_BUFFER.get(report.kernel, 0) * config.block_m * config.block_n
    copies = sum(report.instructions[name] for name in COPIES)
    if not copies or report.shared < pipelined:
        found.append(f"does not load ahead: {buffers} buffers of both operands take {pipelined} B")
    if report.kernel in BOTH_COPIES and not all(report.instructions[name] for name in COPIES):
        found.append(f"does not copy by both of {COPIES}")
    if report.architecture == 90 and store_buffer and report.shared < pipelined + store_buffer:
        found.append("has no buffer of its own for the store: see STORE_BUFFER")
    if report.architecture == 90:
        allowed, reason = ALLOWED_STACK.get((report.kernel, config), (0, "no spill is worth it"))
        if report.stack > allowed:
            found.append(f"spills more registers than {allowed} B ({reason})")
        if report.loop_spills and report.kernel not in STORE_BUFFER:  # a persistent loop has its epilogue inside
            found.append(f"spills {report.loop_spills} times in the loop")
    return found


def check(reports: list[Report]) -> None:
    wrong = [f"{report}\n    {fault}" for report in reports for fault in faults(report)]
    assert not wrong, f"{len(wrong)} faults in {len(reports)} kernels\n" + "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids="sm_{}".format)
def test_configurations(architecture, tmp_path):
    check(compile_ahead(tmp_path, architecture))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_other_forms(tmp_path):
    reports = compile_ahead(tmp_path, 90, "forms")
    check(reports)
    files = [path for folder in kernel_folders for path in Path(folder).glob("*.py")]
    sources = "\n".join(path.read_text() for path in files if gluon_is_known() or "gluon" not in path.name)
    others = set(re.findall(r"^def (_(?!mxfp8)\w+_kernel)\(", sources, re.M))  # those are in test_mxfp8_aot.py
    assert {report.kernel for report in reports} == others, "a kernel is left out"


@pytest.mark.aot_full
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("part", [*PRODUCTS, "helpers"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids="sm_{}".format)
def test_full_product(architecture, dtype, part, tmp_path):
    check(compile_ahead(tmp_path, architecture, part, "--dtype", dtype))


TILE = GemmConfig(128, 128, 64, 8, 3)
GOOD = Report(
    build="a good kernel",
    kernel="_dsd_kernel",
    architecture=90,
    dtype="bf16",
    layout="rows",
    config=TILE,
    registers=128,
    shared=3 * 64 * (128 + 128) * 2,
    instructions={"wgmma.mma_async": 4, "tcgen05.mma": 0, "mma.sync": 0, "cp.async.c": 24, "cp.async.bulk.tensor": 0},
    opcodes={"HGMMA": 4, "HMMA": 0, "LDGSTS": 24, "STL": 0, "LDL": 0, "HGMMA batches": 1},
    loop_spills=0,
)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"error": "CompilationError"}, "does not compile"),
        ({"shared": 233_000}, "more shared memory"),
        ({"instructions": GOOD.instructions | {"wgmma.mma_async": 0}}, "no tensor core"),
        ({"instructions": GOOD.instructions | {"wgmma.mma_async": 0, "mma.sync": 64}}, "instead of wgmma"),
        ({"opcodes": GOOD.opcodes | {"HGMMA batches": 4}}, "waits for each wgmma"),
        ({"instructions": GOOD.instructions | {"cp.async.c": 0}}, "does not load ahead"),
        ({"shared": 2 * 64 * (128 + 128) * 2}, "does not load ahead"),
        ({"kernel": "_dsd_tma_kernel"}, "no buffer of its own"),
        ({"kernel": "_sdd_gluon_kernel", "shared": 229_608}, "does not copy by both"),
        ({"stack": 8}, "spills more registers"),
        ({"loop_spills": 2}, "in the loop"),
    ],
)
def test_the_gate_finds(change, fault):
    assert faults(GOOD) == []
    (found,) = faults(replace(GOOD, **change))
    assert fault in found
