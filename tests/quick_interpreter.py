"""Triton's interpreter without what takes a quarter of its time: at each call of a kernel, and of each function in it, it goes
through all members of `triton.language` to find those that it must replace. Which they are never changes."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from triton import language
from triton.runtime import interpreter


@cache
def _builtins(package: Any) -> list[str]:
    """Names of the members to replace, asked for before any is."""
    return [name for name, member in inspect.getmembers(package) if language.core.is_builtin(member)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _builtins(package):
        member = getattr(package, name)
        if language.core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


def install() -> None:
    interpreter._patch_builtin = _patch_builtin
