"""What the installed Transformer Engine says about itself and one device. It is imported when it is first asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module, metadata
from types import ModuleType
from typing import NamedTuple

import torch

from blocksparse_moe_kernels.versions import release

DISTRIBUTION = "transformer-engine"
MINIMUM = "2.17"
"""The first release whose grouped modules take splits as a tensor and whose fused grouped MLP has the form used here. Its
pre-releases are taken for it."""

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
        cublaslt: version of the library that multiplies, as 130100 for 13.1.
        fused_variable: value of `FUSED_VARIABLE` when Transformer Engine was imported, None if it was not set.
        imported_before: somebody else imported it, so that the value is the one that was found when it was first asked here.
        cudnn_frontend: version of nvidia-cudnn-frontend, None if it is not installed.
        fused_registered: whether the fused grouped MLP says that it is supported.
    """

    version: str
    capability: tuple[int, int]
    available: Mapping[str, str | None]
    cublaslt: int
    fused_variable: str | None
    cudnn_frontend: str | None
    fused_registered: bool
    imported_before: bool = False


class AtImport(NamedTuple):
    """As the attributes of `Engine`."""

    fused_variable: str | None
    imported_before: bool


@lru_cache(maxsize=1)
def at_import() -> AtImport:
    """What was found before Transformer Engine was imported here: `load` asks first."""
    return AtImport(os.environ.get(FUSED_VARIABLE), "transformer_engine" in sys.modules)


def installed() -> str | None:
    """Version of the distribution; None if there is none."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None


@lru_cache(maxsize=1)
def load() -> ModuleType | str:
    """`transformer_engine.pytorch`, or why there is none."""
    version = installed()
    if version is None:
        return f"needs Transformer Engine >= {MINIMUM}, which is not installed (pip install 'blocksparse-moe[te]')"
    try:
        is_old = release(version) < release(MINIMUM)
    except ValueError:
        return f"needs Transformer Engine >= {MINIMUM}; found one whose version is {version!r}, which cannot be compared"
    if is_old:
        return (
            f"needs Transformer Engine >= {MINIMUM}; found {version} "
            f"(pip install --upgrade 'transformer-engine[pytorch]>={MINIMUM}')"
        )
    at_import()
    try:
        return import_module("transformer_engine.pytorch")
    except (Exception, SystemExit) as error:  # a package that is not ours may raise anything here, and must not end the process
        return (
            f"found Transformer Engine {version}, which cannot be imported beside torch {torch.__version__} "
            f"(CUDA {torch.version.cuda}): {_words(error)}"
        )


@lru_cache(maxsize=16)
def ask(device: torch.device) -> Engine | str:
    """The answers for a CUDA device, or why Transformer Engine cannot be asked."""
    te = load()
    if isinstance(te, str):
        return te
    try:
        return _answers(te, device)
    except (Exception, SystemExit) as error:  # the same
        return f"found Transformer Engine {installed()}, which does not answer: {_words(error)}"


def _answers(te: ModuleType, device: torch.device) -> Engine:
    with torch.cuda.device(device):
        answers = {name: getattr(te, question)(return_reason=True) for name, question in QUESTIONS.items()}
        return Engine(
            version=str(installed()),
            capability=torch.cuda.get_device_capability(device),
            available={name: None if runs else str(reason or "") for name, (runs, reason) in answers.items()},
            cublaslt=import_module("transformer_engine_torch").get_cublasLt_version(),
            **at_import()._asdict(),
            cudnn_frontend=_version("nvidia-cudnn-frontend"),
            fused_registered=_fused_is_supported(),
        )


def _fused_is_supported() -> bool:
    """An internal class, which is not in every release."""
    try:
        module = import_module("transformer_engine.pytorch.ops.fused.grouped_mlp")
    except ImportError:
        return False
    fused = getattr(module, "GroupedMLP_CuTeGEMMGLU", None)
    return fused is not None and fused.is_supported()


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else f"{type(error).__name__}, which gave no reason"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
