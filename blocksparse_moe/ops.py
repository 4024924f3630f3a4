"""Differentiable products of block-sparse matrices, and the expert MLP built from them.

The weight of a product is stacked [E, N, H], N the sparse side. The table of gradients:

    product           gradient of left      gradient of w
    s = sdd(x, w)     dsd(ds, w)            dsd(ds.T, x)
    y = dsd(s, w)     sdd(dy, w)            dsd(s.T, dy)

The three are closed under differentiation, so `sdd`, `dsd` and `combine` have gradients of any order, in reverse mode: neither
forward-mode AD nor the transforms of torch.func are supported. A dense operand in token order ends its gradient in a
gather-sum, `combine`. `expert_mlp` chains them; what it saves is told in `custom_ops/experts.py`.

Arguments are checked here, before the dispatcher could take a kernel of the meta device for a mixture of devices.
Source: MegaBlocks, arXiv:2211.15841.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from blocksparse_moe_kernels import BlockSparse, Columns, Topology
from blocksparse_moe_kernels.activations import halves_of, interleaved
from blocksparse_moe_kernels.block_sparse import check_columns
from blocksparse_moe_kernels.launch import check_operands, check_shape, check_type, check_weights
from blocksparse_moe_kernels.reference import Order

from . import custom_ops as custom_ops
from .autocast import autocast_dtype
from .custom_ops.define import flatten
from .products import choose


def sdd(
    x: Tensor,
    w: Tensor,
    topology: Topology,
    *,
    order: Order = "tokens",
    columns: Columns | None = None,
    backend: str = "auto",
) -> BlockSparse:
    """Dense x dense, kept only where `topology` has blocks: s_e = x_e w_e^T.

    Args:
        x: [T, H], any strides; rows are gathered through topology.tokens.
        w: [E, N, H], [E, 2, N / 2, H] (two halves that lie apart) or flat [sum N_e, H]; dtype of x, any strides.
        topology: M rows over E experts.
        order: "tokens" reads x through topology.tokens; "rows" says that x is [M, H], sorted already.
        columns: columns of each expert; required when w is flat.
        backend: "auto", "triton" or "torch".
    Returns:
        BlockSparse with values [M, N] (flat if columns differ) in the dtype of x, or autocast's; fp32 accumulation, zero
        from topology.num_rows on.
    Raises:
        ValueError: shapes or devices disagree; TypeError: dtypes; NotImplementedError: the backend cannot.
    Oracle: reference.sdd. Source: MegaBlocks, arXiv:2211.15841.
    """
    check_operands("sdd", topology, x=x, w=w)
    _check_columns_type("sdd", columns)
    _check_no_tangent("sdd", x, w)
    x, w = _autocast(x, w)
    w, columns = _stacked(w, columns, topology)
    widths, chosen = None if columns is None else list(columns.widths), _choose(backend, w)
    values = torch.ops.blocksparse_moe.sdd(x, w, *flatten(topology, chosen), widths, order, chosen)
    return BlockSparse(values, topology, columns or Columns.equal(values.shape[1], topology.num_experts))


def dsd(s: BlockSparse, w: Tensor, *, order: Order = "rows", backend: str = "auto") -> Tensor:
    """Sparse x dense: y_e = s_e w_e; or, for a transposed s, the sum over each expert's rows w_e = s_e^T x_e.

    Args:
        s: values [M, N] (flat if columns differ), any strides; or transposed (`s.T`).
        w: [E, N, H], [E, 2, N / 2, H] or flat [sum N_e, H], any strides, so `down_proj.transpose(1, 2)` as well. For a
            transposed s the dense operand x: [T, H] with order="tokens", [M, H] with order="rows".
        order: of the dense operand of a transposed s; "rows" otherwise.
        backend: "auto", "triton" or "torch".
    Returns:
        [M, H] in row order, zero from topology.num_rows on; for a transposed s [E, N, H], or flat [sum N_e, H] if columns
        differ, zero for an expert without rows. dtype of s, or autocast's; fp32 accumulation.
    Raises:
        ValueError: shapes or devices disagree; TypeError: dtypes; NotImplementedError: the backend cannot.
    Oracle: reference.dsd. Source: MegaBlocks, arXiv:2211.15841.
    """
    check_type("dsd", "s", s, BlockSparse, "sdd makes one, and so does BlockSparse(values, topology, columns).")
    topology = s.topology
    check_operands("dsd", topology, s=s.values, w=w)
    if order != "rows" and not s.transposed:
        raise ValueError(
            f'dsd: order must be "rows" unless s is transposed, as s and the result have one row a slot; got {order!r}. '
            "For a result in the order of tokens give it to combine."
        )
    if s.transposed and w.ndim != 2:
        raise ValueError(f"dsd: for a transposed s the dense operand must be [T, H] or [M, H]; got {list(w.shape)}.")
    _check_no_tangent("dsd", s.values, w)
    values, w = _autocast(s.values, w)
    widths = None if s.columns.are_equal else list(s.columns.widths)
    chosen = _choose(backend, w)
    arguments = flatten(topology, chosen)
    if s.transposed:
        return torch.ops.blocksparse_moe.dsd_transposed(values, w, None, *arguments, widths, order, chosen)
    w, _ = _stacked(w, s.columns, topology)
    return torch.ops.blocksparse_moe.dsd(values, w, *arguments, widths, chosen)


def combine(y: Tensor, topology: Topology, weights: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """Rows back to tokens: out[t] = sum over the slots of token t of weights[slot] * y[row of slot].

    Args:
        y: [M, H] in row order.
        topology: M rows of T tokens.
        weights: [T, K], or [M] by slot, any floating dtype; 1 if not given.
        backend: "auto", "triton" or "torch".
    Returns:
        [T, H] in the dtype of y; summed in fp32, in the order of the slots.
    Raises:
        ValueError: shapes or devices disagree; TypeError: dtypes; NotImplementedError: the backend cannot.
    Oracle: reference.combine.
    """
    check_operands("combine", topology, y=y, weights=weights)
    check_weights("combine", topology, weights)
    _check_no_tangent("combine", y, weights)
    chosen = _choose(backend, y)
    return torch.ops.blocksparse_moe.combine(y, weights, *flatten(topology, chosen), chosen)


def expert_mlp(
    x: Tensor,
    topology: Topology,
    up_proj: Tensor,
    down_proj: Tensor,
    routing_weights: Tensor | None = None,
    *,
    activation: str = "swiglu",
    up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    columns: Columns | None = None,
    recompute: bool = False,
    precision: str | None = None,
    backend: str = "auto",
) -> Tensor:
    """All expert MLPs: sdd, activation, dsd, combine. Exact: no capacity, no dropped token, no padding.

    Args:
        x: [T, H]; computed in the dtype of the weights, or autocast's.
        topology: M = T * K rows over E experts.
        up_proj: gated activations [E, 2F, H], gate rows then up rows (in turn, if the activation says "interleaved"), or
            [E, 2, F, H] for halves that lie apart; others [E, F, H]. Any strides.
        down_proj: [E, H, F], any strides.
        routing_weights: [T, K], or [M] by slot, any floating dtype; 1 if not given.
        activation: a key of `ACTIVATIONS`, with parameters if it has any: "swiglu(gate_limit=7, up_limit=7)".
        up_proj_bias: [E, 2F] or [E, F], or as [E, 2, F]; down_proj_bias: [E, H], added before the routing weight.
        columns: F_e of each expert. Then the weights are flat, expert after expert: up_proj [sum 2F_e, H] (or
            [sum F_e, H]), down_proj [sum F_e, H] (down, transposed), up_proj_bias [sum 2F_e].
        recompute: keep only the inputs for the backward pass, which then computes the pre-activation [M, 2F] once more.
        precision: "mxfp8" rounds the operands of every product to MXFP8, forward and backward, from what they are in high
            precision; for experts of one size. None rounds nothing.
        backend: "auto", "triton" or "torch".
    Returns:
        [T, H] in the dtype of x, or autocast's. Gradients of x, both weights, biases and routing weights, each in the dtype
        of its tensor; exactly zero for dropped slots and for experts without rows.
    Raises:
        ValueError: shapes or devices disagree; TypeError: dtypes; NotImplementedError: the backend cannot.
    Oracle: reference.expert_mlp. Source: MegaBlocks, arXiv:2211.15841.
    """
    check_operands(
        "expert_mlp",
        topology,
        x=x,
        up_proj=up_proj,
        down_proj=down_proj,
        routing_weights=routing_weights,
        up_proj_bias=up_proj_bias,
        down_proj_bias=down_proj_bias,
    )
    check_weights("expert_mlp", topology, routing_weights)
    _check_columns_type("expert_mlp", columns)
    out_dtype = autocast_dtype(x) or x.dtype
    dtype = autocast_dtype(up_proj) or up_proj.dtype
    x, up_proj, down_proj = _cast(x, dtype), _cast(up_proj, dtype), _cast(down_proj, dtype)
    up_proj_bias = None if up_proj_bias is None else _cast(up_proj_bias, dtype)
    down_proj_bias = None if down_proj_bias is None else _cast(down_proj_bias, dtype)
    up_proj, down_proj, up_proj_bias, widths = _expert_weights(
        topology, up_proj, down_proj, up_proj_bias, columns, *halves_of(activation)
    )
    check_shape("expert_mlp", "x", x, ((topology.num_tokens, up_proj.shape[-1]),))
    if down_proj_bias is not None:
        check_shape("expert_mlp", "down_proj_bias", down_proj_bias, ((topology.num_experts, up_proj.shape[-1]),))
    up_proj, up_proj_bias, activation = _side_by_side(up_proj, up_proj_bias, activation)
    chosen = _choose(backend, up_proj)
    if precision is not None:
        chosen = _with_precision(chosen, precision, widths)
    arguments = (*flatten(topology, chosen), widths, activation, chosen)
    inputs = (x, up_proj, up_proj_bias, down_proj, down_proj_bias, routing_weights)
    _check_no_tangent("expert_mlp", *inputs)
    ops = torch.ops.blocksparse_moe
    if not torch.is_grad_enabled() or not any(tensor is not None and tensor.requires_grad for tensor in inputs):
        y = ops.expert_mlp(*inputs, *arguments)
    elif recompute:
        y = ops.expert_mlp_recompute(*inputs, *arguments)
    else:
        pre, hidden = ops.expert_up(x, up_proj, up_proj_bias, *arguments)
        y = ops.expert_down(pre, hidden, down_proj, down_proj_bias, routing_weights, *arguments)
    return _cast(y, out_dtype)


def _choose(backend: str, tensor: Tensor) -> str:
    return choose(backend, tensor.device, tensor.dtype)[0]


def _with_precision(backend: str, precision: str, widths: list[int] | None) -> str:
    """The name of the implementation that multiplies in `precision`."""
    if precision != "mxfp8":
        raise ValueError(f'expert_mlp: precision must be "mxfp8" or None; got {precision!r}.')
    if widths is not None:
        raise NotImplementedError(
            f"expert_mlp: in MXFP8 experts must have one size; columns are {widths}. Leave precision out where they differ."
        )
    return f"{backend}+{precision}"


def _stacked(w: Tensor, columns: Columns | None, topology: Topology) -> tuple[Tensor, Columns | None]:
    """(w, None) for equal experts, a flat w made [E, N, H]; (flat w, columns) for unequal ones."""
    if columns is None or not columns.are_equal:
        return w, columns
    if w.ndim == 2 and w.shape[0] == columns.total:
        w = w.unflatten(0, (columns.num_experts, columns.widest))
    expected = (topology.num_experts, columns.widest)
    found = w.shape[:2] if w.ndim == 3 else (w.shape[0], w.shape[1:-1].numel())
    if columns.num_experts != topology.num_experts or tuple(found) != expected:
        raise ValueError(
            f"sdd/dsd: the topology covers {topology.num_experts} experts and the sparse operand has columns {columns}; "
            f"the weight is {list(w.shape)}."
        )
    return w, None


def _expert_weights(
    topology: Topology,
    up_proj: Tensor,
    down_proj: Tensor,
    up_proj_bias: Tensor | None,
    columns: Columns | None,
    halves: int,
    weight_halves: int,
) -> tuple[Tensor, Tensor, Tensor | None, list[int] | None]:
    """Up as [E, weight_halves, N, H] and down as [E, F, H] (views), or both flat with their widths F_e; the bias likewise."""
    if columns is not None:
        return _flat_expert_weights(topology, up_proj, down_proj, up_proj_bias, columns, halves, weight_halves)
    E = topology.num_experts
    if down_proj.ndim != 3:
        raise ValueError(
            f"expert_mlp: down_proj must be [E, H, F]; got {list(down_proj.shape)}. "
            "Flat weights of unequal experts need columns=Columns.of([...])."
        )
    _, H, F = down_proj.shape
    apart, joined = (E, weight_halves, halves * F // weight_halves), (E, halves * F)
    if down_proj.shape[0] != E or up_proj.shape not in ((*joined, H), (*apart, H)):
        order = "gate and up rows in turn" if weight_halves < halves else "gate rows, then up rows"
        shape = f"[{E}, 2F, H] ({order})" if halves == 2 else f"[{E}, F, H]"
        raise ValueError(
            f"expert_mlp: the topology covers {E} experts, so up_proj must be {shape} and down_proj [{E}, H, F]; got up_proj "
            f"{list(up_proj.shape)} and down_proj {list(down_proj.shape)}."
        )
    if up_proj_bias is not None:
        check_shape("expert_mlp", "up_proj_bias", up_proj_bias, (joined, apart))
        up_proj_bias = up_proj_bias if up_proj_bias.ndim == 3 else up_proj_bias.unflatten(1, apart[1:])
    up_proj = up_proj if up_proj.ndim == 4 else up_proj.view(*apart, H)
    return up_proj, down_proj.transpose(1, 2), up_proj_bias, None


def _flat_expert_weights(
    topology: Topology,
    up_proj: Tensor,
    down_proj: Tensor,
    up_proj_bias: Tensor | None,
    columns: Columns,
    halves: int,
    weight_halves: int,
) -> tuple[Tensor, Tensor, Tensor | None, list[int] | None]:
    """As `_expert_weights`, from up [sum halves * F_e, H] and down [sum F_e, H]; both stay flat where experts differ."""
    check_columns("expert_mlp", topology, columns)
    rows, total = halves * columns.total, columns.total
    if down_proj.ndim != 2 or down_proj.shape[0] != total or up_proj.shape != (rows, down_proj.shape[1]):
        raise ValueError(
            f"expert_mlp: columns {columns} need flat weights, up_proj [{rows}, H] and down_proj [{total}, H]; got "
            f"{list(up_proj.shape)} and {list(down_proj.shape)}."
        )
    if up_proj_bias is not None:
        check_shape("expert_mlp", "up_proj_bias", up_proj_bias, ((rows,),))
    if not columns.are_equal:
        return up_proj, down_proj, up_proj_bias, list(columns.widths)
    E, F = columns.num_experts, columns.widest
    apart = (E, weight_halves, halves * F // weight_halves)
    bias = None if up_proj_bias is None else up_proj_bias.unflatten(0, apart)
    return up_proj.unflatten(0, apart), down_proj.unflatten(0, (E, F)), bias, None


def _side_by_side(up_proj: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor | None, str]:
    """Halves [E, 2, F, H] whose rows lie in turn, as the one matrix [E, 1, 2F, H] that they are in memory."""
    if up_proj.ndim != 4 or up_proj.shape[1] != 2 or up_proj.stride(2) != 2 * up_proj.stride(1):
        return up_proj, bias, activation
    bias = None if bias is None else bias.transpose(1, 2).flatten(1, 2).unsqueeze(1)
    return up_proj.transpose(1, 2).flatten(1, 2).unsqueeze(1), bias, interleaved(activation)


def _check_columns_type(operation: str, columns: Columns | None) -> None:
    if columns is not None:
        check_type(operation, "columns", columns, Columns, "Give Columns.of([...]), the columns of each expert.")


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(_cast(tensor, autocast_dtype(tensor) or tensor.dtype) for tensor in tensors)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As `Tensor.to`, which takes longer to see that there is nothing to do."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _check_no_tangent(operation: str, *tensors: Tensor | None) -> None:
    """Forward-mode AD would take the op for a constant."""
    if forward_ad._current_level < 0:
        return
    if any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise NotImplementedError(
            f"{operation}: forward-mode AD (torch.func.jvp, jacfwd, forward_ad) is not implemented; use reverse mode, as "
            "torch.autograd.grad or torch.autograd.functional.jacobian do."
        )
