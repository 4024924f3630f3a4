"""Versions of optional packages, checked when the code that needs them is loaded."""

from __future__ import annotations

import re
from importlib import metadata

GLUON = ((3, 6), (3, 7))
"""Releases of Triton whose Gluon, an experimental part that may change, compiles our kernels: by 3.6 the first one ran on an
H200, by 3.7 it was only compiled, to the same copies, products and barriers in the main loop."""


def require(distribution: str, minimum: str, purpose: str) -> None:
    """Refuse a missing or too old package now, not in the middle of a run.

    Args:
        distribution: the name that pip knows, which may differ from the module's.
        minimum: the oldest release that works, such as "3.6".
        purpose: what needs it; the subject of the error message.
    Raises:
        ImportError: names the version that was found, the one that is needed, and the cure.
    """
    try:
        found = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        found = None
    if found is None or release(found) < release(minimum):
        came = "it is not installed" if found is None else f"found {distribution} {found}"
        raise ImportError(
            f"{purpose} needs {distribution} >= {minimum}; {came}. "
            f"Install it: pip install --upgrade '{distribution}>={minimum}'"
        )


def release(version: str) -> tuple[int, ...]:
    """The release part of a version, comparable as numbers: 3.10.0rc1+cu130 -> (3, 10)."""
    digits = re.match(r"\d+(?:\.\d+)*", version)
    if digits is None:
        raise ValueError(f"versions: expected a version such as 3.6.0; got {version!r}")
    return tuple(int(part) for part in re.sub(r"(\.0+)+$", "", digits[0]).split("."))


def gluon_is_known() -> bool:
    """Whether the installed Triton is one of `GLUON`."""
    return release(metadata.version("triton"))[:2] in GLUON
