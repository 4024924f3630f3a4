"""Ahead-of-time compilation of the Triton kernels, without a GPU; `test_aot.py` asserts on what is reported here.

Launches are recorded instead of made, so that a kernel is compiled for exactly the arguments, flags and hints that its
launcher would give it. Under TRITON_INTERPRET=1 `triton.jit` makes interpreted functions, hence a process of its own:

    python -m tests.aot 90                     every configuration that sm_90 selects, a line each
    python -m tests.aot 90 forms               the other layouts, and the kernels that are not products
    python -m tests.aot 90 mxfp8               the products of MXFP8 operands, and what quantises
    python -m tests.aot 90 dsd --dtype fp16    the full product of flags and layouts of dsd
    python -m tests.aot 90 --json FILE         for test_aot.py
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.errors import CompilationError
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.errors import PTXASError

import blocksparse_moe_kernels.triton as kernel_package
from blocksparse_moe_kernels.config import GemmConfig
from blocksparse_moe_kernels.triton import gluon_rings, mxfp8_numbers
from blocksparse_moe_kernels.triton.descriptors import Described

from .aot_cases import DTYPES, PRODUCTS, Build, configurations, forms, full_product
from .aot_mxfp8 import MXFP8_ARCHITECTURES, mxfp8

POINTERS = {dtype: name for name, dtype in DTYPES.items()} | {torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64"}


@dataclass(frozen=True)
class Launch:
    """A launch that was recorded instead of made."""

    kernel: triton.JITFunction
    args: tuple
    kwargs: dict

    def source(self) -> tuple[ASTSource, dict[str, object]]:
        """What `triton.compile` takes, and the options. Specialised as a launch is: one and None are constants, and integers
        and addresses that 16 divides say so, unless the kernel forbids it."""
        names = self.kernel.arg_names
        values = dict(zip(names, self.args, strict=False)) | self.kwargs
        signature, constants, hints = {}, {}, {}
        for index, (name, parameter) in enumerate(zip(names, self.kernel.params, strict=True)):
            value = values.pop(name)
            specialised = not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and specialised):
                signature[name], constants[name] = "constexpr", value
                continue
            if isinstance(value, Tensor):
                signature[name], number = f"*{POINTERS[value.dtype]}", value.data_ptr()
            elif isinstance(value, int):
                signature[name], number = "i32" if -(2**31) <= value < 2**31 else "i64", value
            elif isinstance(value, Described):
                layout = "" if value.layout is None else f",{value.layout!r}"
                signature[name] = f"tensordesc<{POINTERS[value.base.dtype]}{list(value.block_shape)}{layout}>"
                continue
            else:
                raise TypeError(
                    f"{self.kernel.__name__}: {name}={value!r} is neither a tensor nor an integer; say here how Triton types it"
                )
            if number % 16 == 0 and specialised:
                hints[(index,)] = [["tt.divisibility", 16]]
        source = GluonASTSource if self.kernel.is_gluon() else ASTSource
        return source(self.kernel, signature, constants, hints), values


def record(build: Build) -> list[Launch]:
    """The launches of a build's call, none of which is made."""
    gluon_rings.architecture_of = mxfp8_numbers.architecture_of = lambda device: build.architecture
    launches: list[Launch] = []
    for kernel in kernels():
        kernel.run = recorder(kernel, launches)
    arguments = () if build.config is None else (build.config,)
    build.call(build.layer, *arguments, **build.factors)
    return launches


def recorder(kernel: triton.JITFunction, launches: list[Launch]) -> Callable:
    def run(*args, grid, warmup, **kwargs) -> None:
        launches.append(Launch(kernel, args, kwargs))

    return run


def kernels() -> Iterator[triton.JITFunction]:
    """Every kernel of the package, found in its modules."""
    for module in pkgutil.iter_modules(kernel_package.__path__, f"{kernel_package.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if name.endswith("_kernel") and isinstance(value, triton.JITFunction):
                yield value


@dataclass(frozen=True)
class Report:
    """What the compiler made of one launch.

    Attributes:
        build: the call, in words.
        kernel: name of the kernel.
        architecture, dtype, layout: of the build.
        config: tile, None for a helper.
        error: why it did not compile, else None; nothing below is meaningful then.
        registers: of a thread.
        stack: bytes of a thread's stack: its spilled registers.
        shared: bytes of shared memory of a block.
        instructions: occurrences in PTX of tensor-core instructions and asynchronous copies.
        opcodes: occurrences in SASS; None where it was not disassembled.
        loop_spills: STL and LDL inside the loops that multiply; None as opcodes.
    """

    build: str
    kernel: str
    architecture: int
    dtype: str
    layout: str
    config: GemmConfig | None
    error: str | None = None
    registers: int = 0
    stack: int = 0
    shared: int = 0
    instructions: dict[str, int] = field(default_factory=dict)
    opcodes: dict[str, int] | None = None
    loop_spills: int | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.build}, {self.kernel}: {self.error}"
        counts = {name: count for name, count in (self.instructions | (self.opcodes or {})).items() if count}
        if self.loop_spills:
            counts["spills in the loop"] = self.loop_spills
        sizes = f"{self.registers} registers, {self.stack} B stack, {self.shared} B shared"
        return f"{self.build}, {self.kernel}: {sizes}, {counts}"


INSTRUCTIONS = ("wgmma.mma_async", "tcgen05.mma", "mma.sync", "kind::mxf8f6f4", "cp.async.c", "cp.async.bulk.tensor")
OPCODES = ("HGMMA", "HMMA", "LDGSTS", "UTMALDG", "UTMASTG", "STL", "LDL")
TENSOR_CORE_OPCODES = ("HGMMA", "HMMA")


def compile_build(build: Build) -> list[Report]:
    """Compile all launches of a build. A kernel that the compiler refuses is reported, with its last words."""
    reports = []
    for launch in record(build):
        source, options = launch.source()
        report = Report(
            str(build), launch.kernel.__name__, build.architecture, build.layer.dtype, build.layer.layout, build.config
        )
        try:
            binary = triton.compile(source, target=GPUTarget("cuda", build.architecture, 32), options=options)
        except (CompilationError, PTXASError, RuntimeError) as error:
            reports.append(replace(report, error=f"{type(error).__name__}: {str(error)[-1000:]}"))
            continue
        cubin, ptx = binary.asm["cubin"], binary.asm["ptx"]
        registers, stack = resources(cubin)
        report = replace(
            report,
            registers=registers,
            stack=stack,
            shared=binary.metadata.shared,
            instructions={name: ptx.count(name) for name in INSTRUCTIONS},
        )
        wgmma = build.architecture == 90 and report.instructions["wgmma.mma_async"]
        if wgmma and (stack or (report.dtype, report.layout) == ("bf16", "rows")):
            opcodes, loop_spills = disassemble(cubin)
            report = replace(report, opcodes=opcodes, loop_spills=loop_spills)
        reports.append(report)
    return reports


def cuobjdump(option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread."""
    usage = cuobjdump("-res-usage", cubin)
    return tuple(int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))


def disassemble(cubin: bytes) -> tuple[dict[str, int], int]:
    """Occurrences of OPCODES, and spills inside the loops that use a tensor core. Takes most of a second."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9]*)(.*?);", cuobjdump("-sass", cubin))
    code = [(int(address, 16), opcode, operands) for address, opcode, operands in lines]
    in_loops = set()
    for address, opcode, operands in code:
        target = re.search(r"0x([0-9a-f]+)", operands) if opcode == "BRA" else None
        if target is not None and int(target[1], 16) < address:
            body = [entry for entry in code if int(target[1], 16) <= entry[0] <= address]
            if any(entry[1] in TENSOR_CORE_OPCODES for entry in body):
                in_loops.update(entry[0] for entry in body if entry[1] in ("STL", "LDL"))
    counts = Counter(opcode for _, opcode, _ in code)
    # ptxas waits for each wgmma by itself if it cannot keep the operands of several in flight; it marks the end of a batch.
    counts["HGMMA batches"] = sum(opcode == "HGMMA" and "gsb0" in operands for _, opcode, operands in code)
    return {name: counts[name] for name in (*OPCODES, "HGMMA batches")}, len(in_loops)


def compile_all(builds: list[Build], jobs: int) -> list[Report]:
    if jobs == 1:
        return [report for build in builds for report in compile_build(build)]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        return [report for reports in pool.map(compile_build, builds) for report in reports]


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.aot", description="Compile the kernels ahead of time, without a GPU.")
    parser.add_argument("architecture", type=int, choices=MXFP8_ARCHITECTURES)
    parser.add_argument(
        "part", nargs="?", choices=["configurations", "forms", "mxfp8", *PRODUCTS, "helpers"], default="configurations"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of a full product")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the reports there")
    options = parser.parse_args()
    if triton.knobs.runtime.interpret:
        sys.exit("tests.aot: TRITON_INTERPRET is set, and interpreted kernels cannot be compiled; unset it.")
    parts = {"configurations": configurations, "forms": forms, "mxfp8": mxfp8}
    if options.part in parts:
        builds = list(parts[options.part](options.architecture))
    else:
        builds = list(full_product(options.architecture, options.dtype, options.part))
    reports = compile_all(builds, options.jobs)
    if options.json is None:
        print(*reports, sep="\n")
    else:
        options.json.write_text(json.dumps([asdict(report) for report in reports]))


if __name__ == "__main__":
    main()
