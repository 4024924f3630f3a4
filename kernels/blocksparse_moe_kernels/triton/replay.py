"""A call made once more, with what the host decided the first time.

For few tokens the host takes longer to choose tiles, forms and addresses than the kernels take to run. All of that follows from
shapes, strides, dtypes and alignment of the arguments, never from values. So a later call of the same form need not decide
again: it makes its tensors and launches the same kernels on them.

A call is kept only if nothing else happened. While it is recorded every operator is seen, and two kinds are allowed: those that
make a tensor, and views that begin where their tensor does. A call that did more, or whose arguments share memory, is made in
full each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..launch import on_device
from .descriptors import Described
from .launcher import Launch, are_recorded, recorded_launches
from .tiles import fp32_precision

_MOST = 4096
"""Forms that are kept: a server meets many numbers of tokens."""

_recordings: dict[tuple, _Recording | None] = {}


def replay(function: Callable, *args: Any) -> Any:
    """`function(*args)`, where args are tensors, numbers, lists of numbers, names and None; it returns tensors that it made."""
    if are_recorded():  # within a call that is recorded: that one is to see the launches
        return function(*args)
    form = (function, fp32_precision(), *map(_form, args))
    recording = _recordings.get(form)
    if recording is not None:
        return recording.replay(args)
    if form in _recordings or _share_memory(args):
        return function(*args)
    with _Operators() as operators, recorded_launches() as launches:
        results = function(*args)
    if len(_recordings) >= _MOST:
        _recordings.pop(next(iter(_recordings)), None)
    _recordings[form] = _Recording.of(args, operators, launches, results)
    return results


def _form(arg: Any) -> Any:
    """All of an argument that a launcher may decide by."""
    if isinstance(arg, Tensor):
        return *_layout(arg), arg.data_ptr() % 16
    return tuple(arg) if isinstance(arg, list) else arg


def _layout(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _share_memory(args: Sequence[Any]) -> bool:
    """Whether two tensors begin at one address: which of them a kernel was given would not show."""
    addresses = [arg.data_ptr() for arg in args if isinstance(arg, Tensor)]
    return len(set(addresses)) < len(addresses)


_aten = torch.ops.aten
_MAKERS = (
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
)


class _Operators(TorchDispatchMode):
    """Sees the operators that run.

    Attributes:
        made: new tensors, in turn.
        are_harmless: whether all of them only made tensors or looked at them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []
        self.are_harmless = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in _MAKERS:
            self.made.append(result)
        elif not (func.is_view and args and isinstance(result, Tensor) and result.data_ptr() == args[0].data_ptr()):
            self.are_harmless = False
        return result


@dataclass
class _Step:
    """A launch whose tensors are to be filled in. Tensors have numbers, see `_Recording`.

    Attributes:
        run: launches, given the arguments of the kernel.
        arguments: of the kernel; None where a tensor goes.
        tensors: (place among the arguments, number of the tensor).
        descriptors: (place, number, class and form of a descriptor of that tensor).
        wanted: numbers of new tensors that it is the first to use.
        done: numbers of new tensors that it is the last to use.
    """

    run: Callable
    arguments: list[Any]
    tensors: list[tuple[int, int]]
    descriptors: list[tuple[int, int, Callable[..., Described], tuple]]
    wanted: tuple[int, ...] = ()
    done: tuple[int, ...] = ()

    @classmethod
    def of(cls, launch: Launch, addresses: dict[int, int]) -> _Step:
        """With the number of each tensor by its address. KeyError: a tensor that the call was not given and did not make."""
        step = cls(launch.run, [*launch.arguments], [], [])
        for place, argument in enumerate(launch.arguments):
            if isinstance(argument, Tensor):
                step.tensors.append((place, addresses[argument.data_ptr()]))
            elif isinstance(argument, Described):
                number = addresses[argument.base.data_ptr()]
                step.descriptors.append((place, number, type(argument), argument.form))
            else:
                continue
            step.arguments[place] = None
        return step

    @property
    def used(self) -> set[int]:
        return {number for _, number in self.tensors} | {number for _, number, *_ in self.descriptors}

    def launch(self, tensors: Mapping[int, Any]) -> None:
        arguments = [*self.arguments]
        for place, number in self.tensors:
            arguments[place] = tensors[number]
        for place, number, kind, form in self.descriptors:
            arguments[place] = kind(tensors[number], *form)
        self.run(*arguments)


@dataclass(frozen=True)
class _Recording:
    """What a call did. Tensors are numbered: arguments of the call by their places, behind them what it made.

    Attributes:
        device: of its results, and where it launched.
        layouts: shape, strides, dtype and device of each new tensor, by number.
        steps: launches, in turn.
        results: (number, shape and strides if it is a view) of each tensor that it returned.
        several: whether it returned a tuple.
    """

    device: torch.device
    layouts: dict[int, tuple]
    steps: list[_Step]
    results: list[tuple[int, tuple | None]]
    several: bool

    @classmethod
    def of(
        cls, args: Sequence[Any], operators: _Operators, launches: Sequence[Launch | None], results: Any
    ) -> _Recording | None:
        """None for a call that cannot be replayed."""
        several = isinstance(results, tuple)
        results = results if several else (results,)
        given = {number: arg for number, arg in enumerate(args) if isinstance(arg, Tensor)}
        made = dict(enumerate(operators.made + [result for result in results if result.numel() == 0], len(args)))
        addresses = {tensor.data_ptr(): number for number, tensor in (given | made).items()}
        try:
            steps = [_Step.of(launch, addresses) for launch in launches if launch is not None]
            returned = [_number(result, made, addresses) for result in results]
        except KeyError:
            return None
        if not steps or len(steps) < len(launches) or not operators.are_harmless:
            return None
        for number in made:
            users = [step for step in steps if number in step.used] or steps
            users[0].wanted += (number,)
            if number not in returned:
                users[-1].done += (number,)
        layouts = {number: _layout(tensor) for number, tensor in made.items()}
        views = [
            None if layouts[number] == _layout(result) else (result.shape, result.stride())
            for number, result in zip(returned, results, strict=True)
        ]
        return cls(results[0].device, layouts, steps, list(zip(returned, views, strict=True)), several)

    def replay(self, args: Sequence[Any]) -> Any:
        tensors = dict(enumerate(args))
        with on_device(self.device):
            for step in self.steps:
                for number in step.wanted:
                    shape, strides, dtype, device = self.layouts[number]
                    tensors[number] = torch.empty_strided(shape, strides, dtype=dtype, device=device)
                step.launch(tensors)
                for number in step.done:
                    del tensors[number]
        results = tuple(
            tensors[number] if view is None else tensors[number].as_strided(*view) for number, view in self.results
        )
        return results if self.several else results[0]


def _number(result: Tensor, made: Mapping[int, Tensor], addresses: Mapping[int, int]) -> int:
    """Of the new tensor that a result is, or is a view of. KeyError: it was given, or changed its dtype."""
    if result.numel() == 0:  # those lie at one address
        return next(number for number, tensor in made.items() if tensor is result)
    number = addresses[result.data_ptr()]
    if made[number].dtype != result.dtype:
        raise KeyError(number)
    return number
