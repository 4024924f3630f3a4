"""The launchers of `triton/mxfp8_*.py` in plain PyTorch: products of MXFP8 operands, which are widened and multiplied exactly.

    sdd              s_r = x_r w_e^T              blocks of x and w along H
    dsd              y_r = s_r w_e                blocks of s and w along N
    dsd_transposed   w_e = s_e^T x_e              blocks of s and x along the rows of each expert

w [E, N, H], e the expert of row r; experts have one size. Sums are taken in fp32, or fp64, and rounded once to the dtype that
was quantised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import torch_products
from .activations import Activation
from .block_sparse import BlockSparse, Columns
from .config import ceil_div
from .launch import check_shape, check_type
from .mxfp8 import BLOCK, MXFP8
from .reference import Order
from .topology import Topology


def sdd(x: MXFP8 | Tensor, w: MXFP8, topology: Topology, *, order: Order = "tokens", bias: Tensor | None = None) -> BlockSparse:
    """s_e = x_e w_e^T (+ bias_e); see `triton.mxfp8_rows.sdd`."""
    check_row_product("sdd", x, w, topology, order, bias)
    wide = _wide(x.dtype)
    s = torch_products.sdd(_numbers(x), w.dequantize(wide), topology, order=order, bias=_cast(bias, wide))
    return BlockSparse(s.values.to(x.dtype), topology, s.columns)


def sdd_activation(
    x: MXFP8 | Tensor,
    w: MXFP8,
    topology: Topology,
    activation: Activation,
    *,
    bias: Tensor | None = None,
    save_pre: bool = True,
) -> tuple[BlockSparse | None, BlockSparse]:
    """(pre-activation or None, activation of it); see `triton.mxfp8_rows.sdd_activation`."""
    check_row_product("sdd", x, w, topology, "tokens", bias, activation)
    wide = _wide(x.dtype)
    pre, act = torch_products.sdd_activation(
        _numbers(x), w.dequantize(wide), topology, activation, bias=_cast(bias, wide), save_pre=save_pre
    )
    saved = None if pre is None else BlockSparse(pre.values.to(x.dtype), topology, pre.columns)
    return saved, BlockSparse(act.values.to(x.dtype), topology, act.columns)


def dsd(s: MXFP8 | Tensor, w: MXFP8, topology: Topology, *, bias: Tensor | None = None) -> Tensor:
    """y_e = s_e w_e (+ bias_e); see `triton.mxfp8_rows.dsd`."""
    check_row_product("dsd", s, w.mT, topology, "rows", bias)
    wide, columns = _wide(s.dtype), Columns.equal(s.shape[1], topology.num_experts)
    y = torch_products.dsd(BlockSparse(_numbers(s), topology, columns), w.dequantize(wide), bias=_cast(bias, wide))
    return y.to(s.dtype)


def dsd_transposed(s: MXFP8, x: MXFP8, *, like: Tensor | None = None) -> Tensor:
    """w_e = s_e^T x_e; see `triton.mxfp8_transposed.dsd_transposed`."""
    topology, wide = check_transposed_product(s, x, like), _wide(x.dtype)
    columns = Columns.equal(s.shape[1], topology.num_experts)
    w = torch_products.dsd_transposed(BlockSparse(s.dequantize(wide), topology, columns), x.dequantize(wide))
    return w.to(x.dtype) if like is None else torch.empty_like(like).copy_(w.view(like.shape))


def check_row_product(
    operation: str,
    x: MXFP8 | Tensor,
    w: MXFP8,
    topology: Topology,
    order: Order,
    bias: Tensor | None,
    activation: Activation | None = None,
) -> None:
    """x [T or M, K], quantised along K or not at all, and w [E, N, K], quantised along K, can be multiplied."""
    if order not in ("tokens", "rows"):
        raise ValueError(f'{operation}: order must be "tokens" or "rows"; got {order!r}.')
    check_type(operation, "the weight", w, MXFP8, "Make one with quantize(w).")
    if not isinstance(x, MXFP8):
        check_type(operation, "x", x, Tensor, "Make one with torch.as_tensor, or an MXFP8 with quantize(x).")
    if w.codes.ndim != 3 or w.axis != -1 or (isinstance(x, MXFP8) and (x.axis != -1 or x.topology is not None)):
        raise ValueError(
            f"{operation}: operands must be quantised along the contraction, the weight as a stack [E, N, H]; the weight is "
            f"{list(w.shape)}. Use quantize(x, -1), and quantize(w, -1) for sdd, quantize(w, -2) for dsd."
        )
    E, N, K = w.shape
    if topology.num_experts != E:
        raise ValueError(
            f"{operation}: the topology covers {topology.num_experts} experts; the weight has {E}. Was it built for another "
            "layer?"
        )
    rows = topology.num_tokens if order == "tokens" else topology.num_slots
    if tuple(x.shape) != (rows, K):
        raise ValueError(f'{operation}: with order="{order}" x must be [{rows}, {K}]; got {list(x.shape)}.')
    for name, operand in (("the weight", w), ("x", x)):
        if isinstance(operand, MXFP8):
            wanted = (*operand.shape[:-1], ceil_div(K, BLOCK))
            check_shape(operation, f"scales of {name}", operand.scales, (wanted,))
    if activation is not None and N % activation.halves:
        raise ValueError(f"{operation}: a gated weight is [E, 2F, H], gate rows then up rows; got {list(w.shape)}.")
    if bias is not None:
        check_shape(operation, "the bias", bias, ((E, N),))
    if not x.device == w.device == topology.device:
        raise ValueError(
            f"{operation}: x is on {x.device}, the weight on {w.device}, the topology on {topology.device}; move them together."
        )


def check_transposed_product(s: MXFP8, x: MXFP8, like: Tensor | None) -> Topology:
    """s [M, N] and x [M, H], quantised by the rows of one topology, which is returned."""
    for name, operand in (("s", s), ("x", x)):
        check_type("dsd", name, operand, MXFP8, "Make one with quantize_columns(rows, topology).")
    topology = s.topology
    if topology is None or x.topology is None or topology.offsets is not x.topology.offsets or (s.axis, x.axis) != (-2, -2):
        raise ValueError(
            "dsd: a transposed product sums over rows, so both operands must come from quantize_columns with one topology."
        )
    if like is not None and like.numel() != topology.num_experts * s.shape[1] * x.shape[1]:
        raise ValueError(
            f"dsd: the result is [{topology.num_experts}, {s.shape[1]}, {x.shape[1]}]; `like` is {list(like.shape)}."
        )
    return topology


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _numbers(x: MXFP8 | Tensor) -> Tensor:
    wide = _wide(x.dtype)
    return x.dequantize(wide) if isinstance(x, MXFP8) else x.to(wide)


def _cast(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype)
