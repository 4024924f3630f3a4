"""Agreement with the reference, before anything is timed."""

from __future__ import annotations

import torch
from torch import Tensor

# (of a whole tensor, of its worst row), relative. A few roundings of the dtype; a row may be the unluckiest of a million.
_TOLERANCES = {
    torch.float64: (1e-12, 1e-10),
    torch.float32: (1e-5, 1e-4),
    torch.float16: (2e-3, 1e-2),
    torch.bfloat16: (1e-2, 5e-2),
}


def reference_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of the reference for results of `dtype`."""
    return torch.float32 if dtype.itemsize < 4 else torch.float64


def disagreement(
    results: tuple[Tensor, ...],
    expected: tuple[Tensor, ...],
    dtype: torch.dtype,
    tolerance: tuple[float, float] | None = None,
) -> str | None:
    """Why `results` are not those `expected`, for a computation in `dtype`; None when they agree.

    Integers must be equal. Of floating tensors two relative errors are bounded, so that neither a small error everywhere nor
    a wrong row hides: ‖error‖ / ‖expected‖ of the whole, and the largest of a row over its norm plus the root mean square.
    """
    if len(results) != len(expected):
        return f"{len(results)} results instead of {len(expected)}"
    for index, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        if result.shape != wanted.shape:
            return f"result {index} is {list(result.shape)} instead of {list(wanted.shape)}"
        if not wanted.is_floating_point():
            if not torch.equal(result, wanted):
                return f"result {index} differs"
            continue
        whole, row = tolerance or _TOLERANCES[dtype]
        found_whole, found_row = _errors(result.detach(), wanted.detach())
        if not (found_whole <= whole and found_row <= row):
            return (
                f"result {index}: relative error {found_whole:.1e} of the whole, {found_row:.1e} of a row; "
                f"allowed {whole:.0e} and {row:.0e}"
            )
    return None


def largest_error(results: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """Relative error of the whole of a result, ‖error‖ / ‖expected‖: the largest of all results."""
    pairs = zip(results, expected, strict=True)
    return max((_errors(one.detach(), wanted.detach())[0] for one, wanted in pairs if wanted.is_floating_point()), default=0.0)


def _errors(result: Tensor, expected: Tensor) -> tuple[float, float]:
    if expected.numel() == 0:
        return 0.0, 0.0
    expected = expected.reshape(-1, expected.shape[-1])
    error = (result.reshape_as(expected).to(expected.dtype) - expected).norm(dim=1)
    norm = expected.norm(dim=1)
    mean = norm.square().mean().sqrt()
    if mean == 0:
        return error.max().item(), error.max().item()
    return (error.square().mean().sqrt() / mean).item(), (error / (norm + mean)).max().item()
