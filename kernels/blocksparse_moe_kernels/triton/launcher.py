"""Launching a kernel at little cost to the host.

At each launch Triton works out anew which compiled form of a kernel suits the arguments. That takes longer than many a kernel
for few tokens runs; here what it found is kept by all that the choice can depend on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from ..launch import on_device

_compiled: dict[tuple, tuple[Any, tuple, Any]] = {}
"""What to call, and with which constants behind the arguments; and the kernel, so that no other one gets its id."""


def launch(kernel: Any, device: torch.device, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """`kernel[grid](*args, **constants)` on `device`, whichever is current.

    Args:
        args: what is not a constant of the compilation: tensors, descriptors of tensors, integers, None.
        constants: `tl.constexpr` parameters and options of the compiler.
    """
    with on_device(device):
        if not isinstance(kernel, JITFunction):
            kernel[grid](*args, **constants)
            return
        key = (id(kernel), device, *compiled_for(args), *constants, *constants.values())
        found = _compiled.get(key)
        if found is None:
            compiled = kernel[grid](*args, **constants)
            if compiled is not None:  # what records launches instead of making them returns nothing
                _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :]), kernel
        else:
            compiled, rest, _ = found
            compiled[(*grid, 1, 1)[:3]](*args, *rest)


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
            forms += (arg.base.dtype, *arg.block_shape)
    return forms
