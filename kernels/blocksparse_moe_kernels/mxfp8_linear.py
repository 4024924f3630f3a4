"""Products that quantise: the launchers of an implementation, of operands in high precision that are multiplied in MXFP8.

A linear layer y = x W^T has three products, each a sum over another axis, and so quantises everything twice:

    forward              y  = x W^T        x and W along columns
    gradient of input    dx = dy W         dy along columns, W along rows
    gradient of weight   dW = dy^T x       both along the rows of each expert

All copies are made from high precision, as Transformer Engine does. What is not a product stays as it is.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .activations import Activation
from .block_sparse import BlockSparse, Columns
from .mxfp8 import BLOCK
from .reference import Order
from .topology import Topology


class QuantizedProducts:
    """The launchers of `plain`, with those of the products in MXFP8.

    Experts have one size; weights are [E, N, H] or [E, halves, N, H].
    """

    def __init__(self, plain: Any, mxfp8: Any) -> None:
        """`plain`: launchers in high precision; `mxfp8`: quantize, quantize_columns and the products of what they return."""
        self._plain, self._mxfp8 = plain, mxfp8

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def sdd(
        self, x: Tensor, w: Tensor, topology: Topology, *, order: Order = "tokens", columns: Columns | None = None
    ) -> BlockSparse:
        """s_e = x_e w_e^T."""
        rows, weight = self._mxfp8.quantize(x), self._mxfp8.quantize(_stacked(w))
        return self._mxfp8.sdd(rows, weight, topology, order=order)

    def sdd_activation(
        self,
        x: Tensor,
        w: Tensor,
        topology: Topology,
        activation: Activation,
        *,
        columns: Columns | None = None,
        bias: Tensor | None = None,
        save_pre: bool = True,
    ) -> tuple[BlockSparse | None, BlockSparse]:
        """(pre-activation or None, activation of it)."""
        rows, weight = self._mxfp8.quantize(x), self._mxfp8.quantize(_stacked(w))
        bias = None if bias is None else bias.flatten(1)
        return self._mxfp8.sdd_activation(rows, weight, topology, activation, bias=bias, save_pre=save_pre)

    def dsd(self, s: BlockSparse, w: Tensor, *, bias: Tensor | None = None) -> Tensor:
        """y_e = s_e w_e (+ bias_e)."""
        rows, weight = self._mxfp8.quantize(s.values), self._mxfp8.quantize(_stacked(w).mT)
        return self._mxfp8.dsd(rows, weight.mT, s.topology, bias=bias)

    def dsd_transposed(self, s: BlockSparse, x: Tensor, *, order: Order = "rows", like: Tensor | None = None) -> Tensor:
        """w_e = s_e^T x_e."""
        topology = s.topology.with_schedules((BLOCK,))
        left = self._mxfp8.quantize_columns(s.values, topology)
        right = self._mxfp8.quantize_columns(x, topology, order=order)
        return self._mxfp8.dsd_transposed(left, right, like=like)


def _stacked(w: Tensor) -> Tensor:
    """[E, halves, N, H] as [E, halves * N, H]: a copy, if the halves lie apart."""
    return w.flatten(1, 2) if w.ndim == 4 else w
