"""What the installed Transformer Engine says about itself and one device. It is imported when it is first asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module, metadata
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple, ParamSpec, TypeVar

import torch

from blocksparse_moe_kernels.versions import release

Given = ParamSpec("Given")
Answer = TypeVar("Answer")

DISTRIBUTION = "transformer-engine"
MINIMUM = "2.17"
"""The first release whose grouped modules take splits as a tensor and whose fused grouped MLP has the form used here. Its
pre-releases are taken for it."""

UNKNOWN = "unknown"
"""In place of a version that nothing tells."""

FUSED_VARIABLE = "NVTE_CUTEDSL_FUSED_GROUPED_MLP"
"""Of the environment, read by Transformer Engine when it is imported: without it the fused grouped MLP is never registered."""

QUESTIONS = {
    "fp8": "is_fp8_available",
    "fp8_block": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
    "nvfp4": "is_nvfp4_available",
}
"""What can be asked, and the function of `transformer_engine.pytorch` that answers (bool, reason)."""


@dataclass(frozen=True)
class Engine:
    """The answers.

    Attributes:
        version: of the distribution.
        capability: compute capability of the device.
        available: for each of `QUESTIONS`, None if it runs, else Transformer Engine's reason, which may be empty.
        cublaslt: version of the library that multiplies, as 130100 for 13.1; None if it does not say.
        fused_variable: value of `FUSED_VARIABLE` when Transformer Engine was imported, None if it was not set.
        imported_before: somebody else imported it, so that the value is the one that was found when it was first asked here.
        cudnn_frontend: version of nvidia-cudnn-frontend, None if it is not installed.
        fused_obstacle: None if the fused grouped MLP says that it is supported, else why it is not.
    """

    version: str
    capability: tuple[int, int]
    available: Mapping[str, str | None]
    cublaslt: int | None
    fused_variable: str | None
    cudnn_frontend: str | None
    fused_obstacle: str | None
    imported_before: bool = False


class AtImport(NamedTuple):
    """As the attributes of `Engine`."""

    fused_variable: str | None
    imported_before: bool


@lru_cache(maxsize=1)
def at_import() -> AtImport:
    """What was found before Transformer Engine was imported here: `load` asks first."""
    return AtImport(os.environ.get(FUSED_VARIABLE), "transformer_engine" in sys.modules)


class Failure(str):
    """What was raised, in one line."""


def attempt(call: Callable[Given, Answer], *arguments: Given.args, **named: Given.kwargs) -> Answer | Failure:
    """A call into a package that is not ours: it may raise anything, and must not end the process."""
    try:
        return call(*arguments, **named)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Failure(_words(error))


def installed() -> str | None:
    """Version of the distribution, "unknown" where nothing tells it; None if there is none."""
    version = _version(DISTRIBUTION)
    return UNKNOWN if version is None and attempt(find_spec, "transformer_engine") is not None else version


@lru_cache(maxsize=1)
def load() -> ModuleType | str:
    """`transformer_engine.pytorch`, or why there is none."""
    version, needs = installed(), f"needs Transformer Engine >= {MINIMUM}"
    if version is None:
        return f"{needs}, which is not installed (pip install 'blocksparse-moe[te]')"
    cure = f"(pip install --upgrade 'transformer-engine[pytorch]>={MINIMUM}')"
    try:
        is_old = release(version.rpartition("!")[2]) < release(MINIMUM)  # without the epoch
    except ValueError:
        return f"{needs}; found one whose version is {version!r}, which cannot be compared {cure}"
    if is_old:
        return f"{needs}; found {version} {cure}"
    at_import()
    module = attempt(import_module, "transformer_engine.pytorch")
    if isinstance(module, Failure):
        return (
            f"found Transformer Engine {version}, which cannot be imported beside torch {torch.__version__} "
            f"(CUDA {torch.version.cuda}): {module}"
        )
    return module


@lru_cache(maxsize=16)
def ask(device: torch.device) -> Engine | str:
    """The answers for a CUDA device, or why Transformer Engine cannot be asked."""
    te = load()
    if isinstance(te, str):
        return te
    engine = attempt(_answers, te, device)
    return f"found Transformer Engine {installed()}, which does not answer: {engine}" if isinstance(engine, Failure) else engine


def _answers(te: ModuleType, device: torch.device) -> Engine:
    """Each by itself: one that fails is a reason against what it was asked about."""
    with torch.cuda.device(device):
        cublaslt = attempt(_cublaslt)
        return Engine(
            version=str(installed()),
            capability=torch.cuda.get_device_capability(device),
            available={name: attempt(_obstacle, te, question) for name, question in QUESTIONS.items()},
            cublaslt=None if isinstance(cublaslt, Failure) else cublaslt,
            **at_import()._asdict(),
            cudnn_frontend=_version("nvidia-cudnn-frontend"),
            fused_obstacle=attempt(_fused_obstacle),
        )


def _obstacle(te: ModuleType, question: str) -> str | None:
    runs, reason = getattr(te, question)(return_reason=True)
    return None if runs else _one_line(reason or "")


def _cublaslt() -> int:
    return int(import_module("transformer_engine_torch").get_cublasLt_version())


def _fused_obstacle() -> str | None:
    """By an internal class, which is not in every release."""
    fused = import_module("transformer_engine.pytorch.ops.fused.grouped_mlp").GroupedMLP_CuTeGEMMGLU
    return None if fused.is_supported() else "not registered"


def _words(error: BaseException) -> str:
    try:
        said = _one_line(error)
    except Exception:  # of its own __str__
        said = ""
    return f"{type(error).__name__}: {said}" if said else f"{type(error).__name__}, which gave no reason"


def _one_line(words: object) -> str:
    return " ".join(str(words).split())


def _version(distribution: str) -> str | None:
    """As `installed`."""
    try:
        return metadata.version(distribution) or UNKNOWN
    except metadata.PackageNotFoundError:
        return None
    except Exception:  # metadata that cannot be read
        return UNKNOWN
