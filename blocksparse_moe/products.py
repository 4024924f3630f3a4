"""The two implementations of the products, by name: which can run where, and which is chosen."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module, metadata
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, Literal

import torch

from blocksparse_moe_kernels import mxfp8, mxfp8_products, torch_products
from blocksparse_moe_kernels.mxfp8_linear import QuantizedProducts

Implementation = Literal["torch", "triton"]

_TORCH_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_TRITON_LAUNCHERS = {
    "sdd": "sdd",
    "sdd_activation": "sdd",
    "dsd": "dsd",
    "dsd_transposed": "dsd_transposed",
    "combine": "combine",
    "sum_slots": "combine",
    "gather_rows": "padding",
    "scaled_activation": "scaled_activation",
    "activation_backward": "activation_backward",
    "expert_sum": "bias",
    "expert_sum_tokens": "bias",
    "bias_dot": "bias",
    "zero_tail": "zero_tail",
    "replay": "replay",
}
_QUANTIZERS = {"quantize": "mxfp8_quantize", "quantize_columns": "mxfp8_quantize"}
_MXFP8_LAUNCHERS = _QUANTIZERS | {
    "sdd": "mxfp8_rows",
    "sdd_activation": "mxfp8_rows",
    "dsd": "mxfp8_rows",
    "dsd_transposed": "mxfp8_transposed",
}


def constant_when_compiled(function: Callable) -> Callable:
    """What `torch.compiler.assume_constant_result` does, which would import torch._dynamo here and cost seconds."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def unknown(name: str) -> str:
    """Why there are no products by `name`."""
    if name == "te":
        return "computes whole layers, as dMoE and patch_huggingface do; for single products choose one of auto, triton, torch"
    return "is not known; choose one of auto, triton, torch"


@constant_when_compiled
def why_not(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why implementation `name` cannot multiply tensors of `dtype` on `device`; None when it can."""
    if name == "torch":
        return None if dtype in _TORCH_DTYPES else f"computes in fp64, fp32, fp16 and bf16; got {dtype}"
    if name != "triton":
        return unknown(name)
    if find_spec("triton") is None:
        return "needs Triton, which is not installed (pip install triton)"
    if dtype not in _TRITON_DTYPES:
        return f"computes in fp32, fp16 and bf16; got {dtype}"
    if device.type == "cuda":
        if torch.version.hip is not None:
            return "needs an NVIDIA GPU; this torch is built for ROCm"
        capability = _capability(device)
        return None if capability >= (8, 0) else f"needs compute capability 8.0 or newer; {device} has {capability}"
    if device.type == "cpu" and _interpreting():
        return None
    return f"needs a CUDA device; the tensors are on {device.type} (TRITON_INTERPRET=1 runs kernels on a CPU, slowly)"


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@constant_when_compiled
def choose(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Implementation, str]:
    """The implementation that runs for `name` ("auto" included), and why.

    Raises:
        ValueError: an unknown name; TypeError: no floating dtype; NotImplementedError: the named one cannot run here.
    """
    if dtype not in _TORCH_DTYPES:
        raise TypeError(
            f"backend {name!r} needs a floating dtype of 16 bits or more; got {dtype}. Convert operands and weights, as by "
            ".float()."
        )
    if name == "auto":
        if device.type != "cuda":
            return "torch", f"the default on {device.type}"
        reason = why_not("triton", device, dtype)
        return ("triton", "the default on CUDA") if reason is None else ("torch", f"triton {reason}")
    reason = why_not(name, device, dtype)
    if reason is None:
        return name, "asked for"  # type: ignore[return-value]
    if name not in ("torch", "triton"):
        raise ValueError(f"backend: {name!r} {reason}.")
    raise NotImplementedError(f"backend {name!r} {reason}.")


@lru_cache(maxsize=4)
def implementation(name: str) -> Any:
    """The launchers of an implementation: sdd, dsd, combine, ... with the same signatures in all.

    "torch+mxfp8" and "triton+mxfp8" are those of torch and triton, whose products quantise their operands.
    """
    name, _, precision = name.partition("+")
    if precision:
        return QuantizedProducts(implementation(name), mxfp8_launchers(name))
    if name == "torch":
        return torch_products
    modules = {
        launcher: import_module(f"blocksparse_moe_kernels.triton.{file}") for launcher, file in _TRITON_LAUNCHERS.items()
    }
    return SimpleNamespace(**{launcher: getattr(module, launcher) for launcher, module in modules.items()})


@lru_cache(maxsize=2)
def mxfp8_launchers(name: str) -> Any:
    """How implementation `name` quantises to MXFP8, and its products of what is in MXFP8."""
    if name == "torch":
        modules = {launcher: mxfp8_products for launcher in _MXFP8_LAUNCHERS} | {launcher: mxfp8 for launcher in _QUANTIZERS}
    else:
        modules = {
            launcher: import_module(f"blocksparse_moe_kernels.triton.{file}") for launcher, file in _MXFP8_LAUNCHERS.items()
        }
    return SimpleNamespace(**{launcher: getattr(module, launcher) for launcher, module in modules.items()})


def describe_versions() -> str:
    """Versions that a report should name."""
    found = [f"torch {torch.__version__}"]
    if find_spec("triton") is not None:
        found.append(f"triton {metadata.version('triton')}")
    return ", ".join(found)


def _interpreting() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)
