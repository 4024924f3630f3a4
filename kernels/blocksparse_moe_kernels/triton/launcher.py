"""Launching a kernel at little cost to the host.

At each launch Triton works out anew which compiled form of a kernel suits the arguments. That takes longer than many a kernel
for few tokens runs; here what it found is kept by all that the choice can depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.jit import JITFunction

from ..launch import on_device

_compiled: dict[tuple, tuple[Any, tuple, Any]] = {}
"""What to call, and with which constants behind the arguments; and the kernel, so that no other one gets its id."""


class Launch(NamedTuple):
    """`run(*arguments)` launches a kernel on the current device."""

    run: Callable
    arguments: tuple[Any, ...]


_launches: ContextVar[list[Launch | None] | None] = ContextVar("launches", default=None)


def are_recorded() -> bool:
    """Whether launches made now are recorded."""
    return _launches.get() is not None


@contextmanager
def recorded_launches() -> Iterator[list[Launch | None]]:
    """The launches made inside, in turn; None for one that cannot be made again."""
    launches: list[Launch | None] = []
    token = _launches.set(launches)
    try:
        yield launches
    finally:
        _launches.reset(token)


def launch(kernel: Any, device: torch.device, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """`kernel[grid](*args, **constants)` on `device`, whichever is current.

    Args:
        args: what is not a constant of the compilation: tensors, descriptors of tensors, integers, None.
        constants: `tl.constexpr` parameters and options of the compiler.
    """
    with on_device(device):
        if isinstance(kernel, JITFunction):
            run, rest = _launch_compiled(kernel, device, grid, args, constants)
        else:
            run, rest = partial(kernel[grid], **constants), ()
            with _disable_current_modes():  # the interpreter's operators are no part of what it runs
                run(*args)
    launches = _launches.get()
    if launches is not None:
        launches.append(None if run is None else Launch(run, (*args, *rest)))


def _launch_compiled(
    kernel: Any, device: torch.device, grid: tuple[int, ...], args: tuple, constants: dict[str, Any]
) -> tuple[Callable | None, tuple]:
    """Launch, and return what does so again and the constants that it wants behind the arguments."""
    key = (id(kernel), device, *compiled_for(args), *constants, *constants.values())
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[grid](*args, **constants)
        if compiled is None:  # what records launches instead of making them returns nothing
            return None, ()
        rest = tuple(constants[name] for name in kernel.arg_names[len(args) :])
        _compiled[key] = compiled, rest, kernel
        return compiled[(*grid, 1, 1)[:3]], rest
    compiled, rest, _ = found
    run = compiled[(*grid, 1, 1)[:3]]
    run(*args, *rest)
    return run, rest


def compiled_for(args: tuple) -> list:
    """All that Triton may compile a kernel for: dtypes, whether 16 divides an address or an integer, ones, 64-bit integers."""
    forms: list = []
    for arg in args:
        if type(arg) is int:
            forms += (arg % 16 == 0, arg == 1, arg >= 2**31)
        elif isinstance(arg, Tensor):
            forms += (arg.dtype, arg.data_ptr() % 16 == 0)
        elif arg is None:
            forms.append(None)
        else:
            forms += (arg.base.dtype, *arg.block_shape, arg.layout)
    return forms
