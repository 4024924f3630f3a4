"""Checks of what a config is given, with messages that name it."""

from __future__ import annotations

import math
from numbers import Integral, Real


def positive_integer(config: str, name: str, value: object) -> int:
    """`value` as an int of at least 1; TypeError or ValueError names the config and the argument."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{config}: {name} must be an integer; got {value!r} of type {type(value).__name__}.")
    if value < 1:
        raise ValueError(f"{config}: {name} must be at least 1; got {value}.")
    return int(value)


def one_of(config: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    """ValueError that names the config and the argument, unless `value` is one of the choices."""
    if value not in choices:
        raise ValueError(f"{config}: {name} must be one of {', '.join(map(repr, choices))}; got {value!r}.")


def number(
    config: str, name: str, value: object, *, above: float | None = None, at_least: float | None = None, below: float = math.inf
) -> None:
    """TypeError or ValueError that names the config and the argument, unless `value` is a finite number within the bounds."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{config}: {name} must be a number; got {value!r} of type {type(value).__name__}.")
    size = float(value)
    too_small = (above is not None and size <= above) or (at_least is not None and size < at_least)
    if too_small or size >= below or not math.isfinite(size):
        bounds = [
            f"{words} {bound}"
            for words, bound in (("above", above), ("at least", at_least), ("below", below))
            if bound is not None and math.isfinite(bound)
        ]
        raise ValueError(f"{config}: {name} must be {' and '.join(bounds)}; got {value!r}.")
