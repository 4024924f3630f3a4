"""Tensor descriptors: operands as the tensor memory accelerator (TMA) of Hopper and newer reads and writes them.

The copy engine computes addresses and clips at the edges, which takes both off the threads: a tile that hangs over the end of
an operand is filled with zeros, and one that hangs over the end of a result is cut.

Rows of one expert are clipped too (*ragged* rows): two leading dimensions of strides -s and s, modulo 2**64, move the end of
the row dimension to wherever the last row of a tile lies. The trick is that of `triton.tools.ragged_tma`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..launch import StackedWeight

_HOST_END = 2**30
END = tl.constexpr(_HOST_END)
_UNBOUNDED = 2**31 - 2**16


class Described:
    """A descriptor of a tensor that `describable` has passed: Triton would check it again, at each launch.

    Attributes:
        layout: how a tile lies in shared memory, where a kernel is compiled for that.
    """

    base: Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: Sequence[int]
    layout: Any = None

    def __post_init__(self) -> None:
        pass

    @property
    def form(self) -> tuple:
        """All but the tensor, as the class takes it behind a tensor."""
        layouts = () if self.layout is None else (self.layout,)
        return self.shape, self.strides, self.block_shape, *layouts


class Descriptor(Described, TensorDescriptor):
    """A descriptor as Triton takes it."""


def describable(tensor: Tensor) -> bool:
    """Whether the TMA kernels can read `tensor`: 16-bit elements, the last axis dense, its start and other strides multiples
    of 16 bytes."""
    return (
        tensor.element_size() == 2 and tensor.data_ptr() % 16 == 0 and _lies_describably(tuple(tensor.shape), tensor.stride())
    )


@lru_cache(maxsize=1024)
def _lies_describably(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether 16-bit elements of these strides do."""
    *others, last = strides
    return (
        last == 1
        and all(0 < stride < 2**33 and stride % 8 == 0 for stride in others)
        and 0 < min(shape) <= max(shape) < _HOST_END
    )


def describe(tensor: Tensor, *block: int) -> Descriptor:
    """Tiles of a tensor, not clipped but at its own edges."""
    return Descriptor(tensor, tensor.shape, tensor.stride(), block)


def weight_form(weight: StackedWeight) -> Tensor | None:
    """The weight as [E, halves, N, H] or, of one half, [E, 1, H, N], whichever has a dense last axis; None if neither has."""
    if not weight.columns.are_equal:
        return None
    forms = (weight.data, weight.data.transpose(2, 3))[: 3 - weight.halves]
    return next((form for form in forms if describable(form)), None)


def describe_weight(form: Tensor, weight: StackedWeight, block_n: int, block_h: int) -> Descriptor:
    """Tiles of block_n columns of every half x block_h of the hidden size, of one expert; the dense axis last."""
    block = (block_n, block_h) if form is weight.data else (block_h, block_n)
    return describe(form, 1, weight.halves, *block)


def rows_are_describable(values: Tensor | None, halves: int = 1) -> bool:
    """Whether `describe_rows` can: values [M, halves * N], or None for a result that is not wanted."""
    return values is None or (values.ndim == 2 and values.shape[1] % (8 * halves) == 0 and describable(values))


def describe_rows(values: Tensor | None, block_m: int, block_n: int, halves: int = 1) -> Descriptor | None:
    """Tiles of block_m x block_n of one half of values [M, halves * N]; `load_rows` and `store_rows` clip their rows."""
    if values is None:
        return None
    row, columns = values.stride(0), values.shape[1] // halves
    shape, strides = [_UNBOUNDED, _UNBOUNDED, _HOST_END, halves, columns], [2**34 - row, row, row, columns, 1]
    return Descriptor(values, shape, strides, [1, 1, block_m, 1, block_n])


@triton.jit
def load_weight_tile(descriptor, expert, column, k, DENSE_HIDDEN: tl.constexpr):
    """[HALVES * columns, hidden] of the weight of one expert: gate columns, then up columns."""
    if DENSE_HIDDEN:
        tile = descriptor.load([expert, 0, column, k])
        return tl.reshape(tile, (tile.shape[1] * tile.shape[2], tile.shape[3]))
    else:
        tile = descriptor.load([expert, 0, k, column])
        return tl.reshape(tile, (tile.shape[2], tile.shape[3])).T


@triton.jit
def store_weight_tile(descriptor, expert, column, k, tile, DENSE_HIDDEN: tl.constexpr):
    """Write a tile [columns, hidden] of the weight of one expert, in the dtype of the target."""
    tile = tile.to(descriptor.dtype)
    if DENSE_HIDDEN:
        descriptor.store([expert, 0, column, k], tl.reshape(tile, (1, 1, tile.shape[0], tile.shape[1])))
    else:
        tile = tile.T
        descriptor.store([expert, 0, k, column], tl.reshape(tile, (1, 1, tile.shape[0], tile.shape[1])))


@triton.jit
def load_rows(descriptor, first_row, length, half, column):
    """[BLOCK_M, BLOCK_N] of `length` rows from first_row on; zeros behind them."""
    tile = descriptor.load([END, first_row + length, END - length, half, column])
    return tl.reshape(tile, (tile.shape[2], tile.shape[4]))


@triton.jit
def store_rows(descriptor, first_row, length, half, column, tile):
    """Write `length` rows of the tile from first_row on, in the dtype of the target."""
    tile = tl.reshape(tile.to(descriptor.dtype), (1, 1, tile.shape[0], 1, tile.shape[1]))
    descriptor.store([END, first_row + length, END - length, half, column], tile)
