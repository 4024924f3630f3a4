"""Why a peer is left out."""

from __future__ import annotations

from collections.abc import Collection

import torch

from blocksparse_moe_kernels.versions import require

from ..inputs import Case


def missing(distribution: str, minimum: str) -> str | None:
    """That a package is not installed, or too old; None when it is there."""
    try:
        require(distribution, minimum, "this peer")
    except ImportError:
        return f"needs {distribution} >= {minimum}"
    return None


def unsupported(case: Case, dtypes: Collection[torch.dtype], capability: tuple[int, int] = (8, 0)) -> str | None:
    """Why a peer that is written for GPUs of `capability` and newer, and for `dtypes`, cannot run on a case."""
    if case.device.type != "cuda":
        return "runs on CUDA only"
    if (found := torch.cuda.get_device_capability(case.device)) < capability:
        return f"needs compute capability {capability[0]}.{capability[1]}; this is {found[0]}.{found[1]}"
    if case.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"computes in {names}; this run is in {str(case.dtype).removeprefix('torch.')}"
    return None


def rows_of_other_sizes(case: Case) -> str | None:
    """Why torch's grouped product cannot run on a case."""
    if any(size * case.dtype.itemsize % 16 for size in (case.shape.H, case.shape.F)):
        return f"needs rows of a multiple of 16 bytes; H={case.shape.H} and F={case.shape.F} are not all so"
    return None
