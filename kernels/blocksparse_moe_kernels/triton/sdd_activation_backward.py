"""SDD and the backward pass of the activation: from the gradient of the output to that of the pre-activation.

    dA' = dO w_down^T                       kept in fp32 and never written, where it can be
    dp[slot] = <dA', a>                     a = activation(pre)
    scaled = p a                            the operand of the down-projection's gradient
    dpre = p dA' activation'(pre)

One kernel in Gluon, where it applies; else `sdd` and then `activation_backward`, which say where the formulas come from.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from ..activations import Activation
from ..block_sparse import BlockSparse, Columns, values_shape
from ..config import GemmConfig, row_product_config
from ..launch import check_dense, fold_halves, stack_weight
from ..topology import Topology
from ..versions import gluon_is_known
from .activation_backward import activation_backward, sum_dots
from .descriptors import weight_form
from .sdd import sdd
from .tiles import INTERPRETED
from .zero_tail import zero_tail

_gluon = import_module(".sdd_activation_backward_gluon", __package__) if gluon_is_known() and not INTERPRETED else None
"""The kernel in Gluon; None where it cannot be used."""


def sdd_activation_backward(
    x: Tensor,
    w: Tensor,
    topology: Topology,
    pre: BlockSparse,
    activation: Activation,
    weights: Tensor | None = None,
    bias_dot: Tensor | None = None,
    *,
    columns: Columns | None = None,
    config: GemmConfig | None = None,
) -> tuple[BlockSparse, BlockSparse, Tensor | None]:
    """Gradients of `activation_backward`, of grad = sdd(x, w).

    Args:
        x: [T, H], gradient of the output, read through topology.tokens.
        w: the down-projection as the products see it, [E, F, H]; flat [sum F_e, H] with `columns`. Any strides.
        topology, columns, config: as of `sdd`.
        pre, activation, weights, bias_dot: as of `activation_backward`.
    Returns:
        gradient of `pre` (zero where there are no rows), scaled hidden activation, gradient of `weights` in its shape and dtype
        (exactly zero for dropped slots; None without weights).
    """
    weight = fold_halves(stack_weight("sdd", w, topology, columns))
    check_dense("sdd", x, topology, "tokens", w)
    form = weight_form(weight)
    if _gluon is not None and form is not None and topology.num_slots:
        sizes = (topology.num_slots, topology.num_experts, weight.columns.widest)
        tile = config or row_product_config(*sizes, x.dtype, x.device, tma=True)
        if _gluon.applies(x, weight, form, pre.values, activation, tile):
            grad_pre = BlockSparse(torch.empty_like(pre.values), topology, pre.columns)
            scaled = BlockSparse(x.new_empty(values_shape(topology.num_slots, weight.columns)), topology, weight.columns)
            dots = None
            if weights is not None:
                dots = x.new_empty((_gluon.num_column_tiles(weight), topology.num_slots), dtype=torch.float32)
            values = (grad_pre.values, scaled.values)
            _gluon.launch_sdd_activation_backward(x, weight, form, topology, pre.values, activation, weights, *values, dots)
            zero_tail(grad_pre.values, *grad_pre.end())
            grad_weights = None if weights is None or dots is None else sum_dots(dots, topology, weights, bias_dot)
            return grad_pre, scaled, grad_weights
    grad = sdd(x, w, topology, columns=columns, config=config)
    return activation_backward(grad, pre, activation, weights, bias_dot)
