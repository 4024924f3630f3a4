"""SDD and DSD of operands in MXFP8: products of each row with the weight of its expert.

    y_r = x_r w_e^T (+ bias_e)          x [T or M, K], w [E, N, K], y [M, N]; e the expert of row r
    a_r = activation(y_r)               in the same kernel, when asked for

Both operands have their blocks along K. x may also be in high precision: then memory traffic is all that is saved, which is
what few tokens wait for, and the weight is widened in registers. Tiles are computed transposed, as w_e x_e^T: tensor cores want
64 or 128 rows of their left operand, and a weight always has those.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activations import Activation
from ..block_sparse import BlockSparse, Columns
from ..config import SHARED_MEMORY_KB, GemmConfig, architecture_of, are_few, ceil_div, choose_block_m
from ..mxfp8 import MXFP8
from ..mxfp8_products import check_row_product
from ..reference import Order
from ..topology import Topology
from .activation_functions import activation_value, constants
from .launcher import launch
from .mxfp8_numbers import BLOCK, NEUTRAL, dequantized, dot_mxfp8, dot_words, has_instructions
from .sdd import gate_and_up
from .tiles import INTERPRETED, along, dot, fp32_precision, grouped_order, row_tile, wrapped


@triton.jit(do_not_specialize=["num_tiles"])
def _mxfp8_rows_kernel(
    X, XScales, W, WScales,                     # [T or M, K], [T or M, K / 32], [E, HALVES * N, K], [E, HALVES * N, K / 32]
    Bias, Pre, Act, Tokens, Tiles, Offsets,     # [E, HALVES * N], [M, HALVES * N], [M, N], [M], [3, tiles], [E + 1]
    stride_xr, stride_xk, stride_xsr, stride_xsk, stride_we, stride_wn, stride_wk, stride_wse, stride_wsn, stride_wsk,
    stride_be, stride_bn,
    num_tiles, K, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    HALVES: tl.constexpr, GATHER: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, SAVE_PRE: tl.constexpr,
    QUANTIZED: tl.constexpr, WORDS: tl.constexpr, HARDWARE: tl.constexpr, PRECISION: tl.constexpr,
    FUNCTION: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr, GATE_LIMIT: tl.constexpr, UP_LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
):  # fmt: skip
    tile, pid_n = grouped_order(tl.program_id(0), num_tiles, tl.cdiv(N, BLOCK_N), GROUP)
    expert, first_row, length = row_tile(Tiles, num_tiles, tile)
    if expert < 0:
        return
    first_column = pid_n * BLOCK_N
    offs_m = tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    offs_s = tl.arange(0, BLOCK_K // BLOCK)
    wide = tl.arange(0, HALVES * BLOCK_N)
    column = (wide // BLOCK_N) * N + first_column + wrapped(wide % BLOCK_N, N - first_column)
    mask_m = offs_m < length
    rows = first_row + tl.where(mask_m, offs_m, 0)
    if GATHER:
        rows = tl.load(Tokens + rows)
    x_ptrs = X + along(rows, stride_xr)[None, :] + along(offs_k, stride_xk)[:, None]
    PER_LOAD: tl.constexpr = 4 if WORDS else 1
    offs_w = tl.arange(0, BLOCK_K // PER_LOAD)
    w_ptrs = W + expert.to(tl.int64) * stride_we + along(column, stride_wn)[:, None] + along(offs_w, stride_wk)[None, :]
    ws_ptrs = (
        WScales + expert.to(tl.int64) * stride_wse + along(column, stride_wsn)[:, None] + along(offs_s, stride_wsk)[None, :]
    )
    if QUANTIZED:
        xs_ptrs = XScales + along(rows, stride_xsr)[:, None] + along(offs_s, stride_xsk)[None, :]

    zero = tl.load(Offsets).to(tl.float32)
    acc = tl.zeros((HALVES * BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs)
            w = tl.load(w_ptrs)
            w_scales = tl.load(ws_ptrs)
        else:
            mask_k = offs_k < K - k
            mask_s = offs_s < tl.cdiv(K - k, BLOCK)
            x = tl.load(x_ptrs, mask=mask_k[:, None], other=0)
            w = tl.load(w_ptrs, mask=(offs_w < (K - k) // PER_LOAD)[None, :], other=0)
            w_scales = tl.load(ws_ptrs, mask=mask_s[None, :], other=NEUTRAL)
        if QUANTIZED:
            if EVEN_K:
                x_scales = tl.load(xs_ptrs)
            else:
                x_scales = tl.load(xs_ptrs, mask=mask_s[None, :], other=NEUTRAL)
            acc = dot_mxfp8(w, w_scales, x, x_scales, acc, HARDWARE)
            xs_ptrs += tl.cast(stride_xsk, tl.int64) * (BLOCK_K // BLOCK)
        elif WORDS:
            acc = dot_words(w, w_scales, x, acc, HARDWARE)
        elif X.dtype.element_ty == tl.bfloat16 and not INTERPRETED:
            acc = tl.dot(dequantized(w, w_scales, tl.bfloat16, HARDWARE), x, acc)
        else:
            # fp16 has the mantissa of tf32, and codes have less.
            precision: tl.constexpr = "tf32" if X.dtype.element_ty == tl.float16 and not INTERPRETED else PRECISION
            acc = dot(dequantized(w, w_scales, tl.float32, HARDWARE), x.to(tl.float32), acc, zero, precision)
        x_ptrs += tl.cast(stride_xk, tl.int64) * BLOCK_K
        w_ptrs += tl.cast(stride_wk, tl.int64) * (BLOCK_K // PER_LOAD)
        ws_ptrs += tl.cast(stride_wsk, tl.int64) * (BLOCK_K // BLOCK)

    acc = acc.T
    if HAS_BIAS:
        acc += tl.load(Bias + expert.to(tl.int64) * stride_be + along(column, stride_bn)).to(tl.float32)[None, :]
    gate, up = gate_and_up(acc, HALVES, INTERLEAVED)
    if SAVE_PRE:
        offs_n = first_column + tl.arange(0, BLOCK_N)
        mask = mask_m[:, None] & (offs_n < N)[None, :]
        pre_ptrs = Pre + first_row.to(tl.int64) * (HALVES * N) + offs_m[:, None] * (HALVES * N) + offs_n[None, :]
        if HALVES == 2:
            tl.store(pre_ptrs, gate.to(Pre.dtype.element_ty), mask=mask)
            tl.store(pre_ptrs + N, up.to(Pre.dtype.element_ty), mask=mask)
        else:
            tl.store(pre_ptrs, acc.to(Pre.dtype.element_ty), mask=mask)
    if FUNCTION is not None:
        GATED: tl.constexpr = HALVES == 2 or INTERLEAVED
        PAIRED: tl.constexpr = 2 if INTERLEAVED else 1
        hidden = activation_value(gate, up, GATED, FUNCTION, ALPHA, GATE_LIMIT, UP_LIMIT, UP_OFFSET)
        stride = N // PAIRED
        offs_n = first_column // PAIRED + tl.arange(0, BLOCK_N // PAIRED)
        mask = mask_m[:, None] & (offs_n < stride)[None, :]
        act_ptrs = Act + first_row.to(tl.int64) * stride + offs_m[:, None] * stride + offs_n[None, :]
        tl.store(act_ptrs, hidden.to(Act.dtype.element_ty), mask=mask)


@lru_cache(maxsize=1024)
def row_product_config(num_slots: int, num_experts: int, width: int, quantized: bool, device: torch.device) -> GemmConfig:
    """Tile of a row product: block_m rows, block_n of the `width` columns, all halves. `quantized`: x is in MXFP8, too."""
    block_m, architecture = choose_block_m(num_slots, num_experts), architecture_of(device)
    wide = row_product_tile(block_m, quantized, architecture)
    few = not quantized and are_few(num_slots, width, wide, device)
    return row_product_tile(block_m, quantized, architecture, narrow=True) if few else wide


def row_product_tile(block_m: int, quantized: bool, architecture: int, narrow: bool = False) -> GemmConfig:
    """`narrow`: for so few rows that wide tiles would leave multiprocessors idle."""
    small = SHARED_MEMORY_KB[architecture] < 160
    warps = 8 if block_m == 128 else 4
    if quantized:
        return GemmConfig(block_m, 128, 128, warps, 2 if small else 3)
    if block_m <= 32 and not small:  # few tokens: measured on an H200
        return GemmConfig(block_m, 64, 256, 4, 3)
    return GemmConfig(block_m, 64 if narrow else 128, 64 if block_m > 64 else 128, warps, 2 if small else 4)


def sdd(
    x: MXFP8 | Tensor,
    w: MXFP8,
    topology: Topology,
    *,
    order: Order = "tokens",
    bias: Tensor | None = None,
    config: GemmConfig | None = None,
) -> BlockSparse:
    """Dense x dense, kept only where `topology` has blocks.

    Args:
        x: [T, H], quantised along H; or fp16 / bf16 / fp32, which is multiplied as it is.
        w: [E, N, H], quantised along H.
        topology: M rows over E experts.
        order: "tokens" reads x through topology.tokens; "rows" says that x is [M, H], sorted already.
        bias: [E, N], added to every row of its expert.
        config: tile; chosen from the sizes unless given.
    Returns:
        BlockSparse with values [M, N] in the dtype of x, or of what it was quantised from; fp32 accumulation. Rows from
        topology.num_rows on are not written.
    Raises:
        ValueError: shapes or devices disagree, or an operand is quantised along another axis.
    Oracle: reference.sdd of the dequantised operands.
    """
    check_row_product("sdd", x, w, topology, order, bias)
    pre = torch.empty(topology.num_slots, w.shape[1], dtype=x.dtype, device=x.device)
    _launch(x, w, topology, order, bias, None, pre, None, config)
    return BlockSparse(pre, topology, Columns.equal(w.shape[1], topology.num_experts))


def sdd_activation(
    x: MXFP8 | Tensor,
    w: MXFP8,
    topology: Topology,
    activation: Activation,
    *,
    bias: Tensor | None = None,
    save_pre: bool = True,
    config: GemmConfig | None = None,
) -> tuple[BlockSparse | None, BlockSparse]:
    """`activation` of `sdd(x, w)`, fused: (pre-activation [M, halves * F] or None, hidden activation [M, F]).

    w is [E, halves * F, H], the rows of the gate and then those of the up-projection (in turn, if the activation says
    "interleaved"). Otherwise as `sdd`.
    """
    check_row_product("sdd", x, w, topology, "tokens", bias, activation)
    E, N, _ = w.shape
    act = torch.empty(topology.num_slots, N // activation.halves, dtype=x.dtype, device=x.device)
    pre = torch.empty(topology.num_slots, N, dtype=x.dtype, device=x.device) if save_pre else None
    _launch(x, w, topology, "tokens", bias, activation, pre, act, config)
    saved = None if pre is None else BlockSparse(pre, topology, Columns.equal(N, E))
    return saved, BlockSparse(act, topology, Columns.equal(act.shape[1], E))


def dsd(
    s: MXFP8 | Tensor, w: MXFP8, topology: Topology, *, bias: Tensor | None = None, config: GemmConfig | None = None
) -> Tensor:
    """Sparse x dense: y_e = s_e w_e (+ bias_e), rows in expert order.

    Args:
        s: [M, N], quantised along N; or fp16 / bf16 / fp32, which is multiplied as it is.
        w: [E, N, H], quantised along N: that of a down-projection [E, H, F] is `quantize(down_proj).mT`.
        bias: [E, H].
    Returns:
        [M, H] in the dtype of s; rows from topology.num_rows on are not written.
    Otherwise as `sdd`. Oracle: reference.dsd of the dequantised operands.
    """
    check_row_product("dsd", s, w.mT, topology, "rows", bias)
    y = torch.empty(topology.num_slots, w.shape[2], dtype=s.dtype, device=s.device)
    _launch(s, w.mT, topology, "rows", bias, None, y, None, config)
    return y


def _launch(
    x: MXFP8 | Tensor,
    w: MXFP8,
    topology: Topology,
    order: Order,
    bias: Tensor | None,
    activation: Activation | None,
    pre: Tensor | None,
    act: Tensor | None,
    config: GemmConfig | None,
) -> None:
    if topology.num_slots == 0:
        return
    quantized = isinstance(x, MXFP8)
    _, width, size = w.shape
    config = config or row_product_config(topology.num_slots, topology.num_experts, width, quantized, x.device)
    halves = 1 if activation is None else activation.weight_halves
    block_n = config.block_n // halves
    schedule = topology.schedule(config.block_m)
    numbers, scales = (x.codes.view(torch.uint8), x.scales) if isinstance(x, MXFP8) else (x, None)
    words = None if quantized or x.dtype != torch.bfloat16 or config.block_k < 64 else as_words(w.codes)
    codes = w.codes.view(torch.uint8) if words is None else words
    scale_strides = (0, 0) if scales is None else scales.stride()
    bias_strides = (0, 0) if bias is None else bias.stride()
    launch(
        _mxfp8_rows_kernel, x.device, (schedule.capacity * ceil_div(width // halves, block_n),),
        numbers, scales, codes, w.scales, bias, pre, act,
        topology.tokens, schedule.tiles, topology.offsets,
        *numbers.stride(), *scale_strides, *codes.stride(), *w.scales.stride(), *bias_strides,
        schedule.capacity, size, width // halves,
        BLOCK_M=config.block_m, BLOCK_N=block_n, BLOCK_K=config.block_k, GROUP=8, HALVES=halves,
        GATHER=order == "tokens", EVEN_K=size % config.block_k == 0, HAS_BIAS=bias is not None, SAVE_PRE=pre is not None,
        QUANTIZED=quantized, WORDS=words is not None, HARDWARE=has_instructions(x.device), PRECISION=fp32_precision(),
        **constants(activation),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def as_words(codes: Tensor) -> Tensor | None:
    """Codes [E, N, K] as int32 [E, N, K / 4], of four along K each; None where memory does not have those together, aligned."""
    *outer, along_k = codes.stride()
    aligned = along_k == 1 and codes.shape[2] % 4 == 0 and not any(stride % 4 for stride in (*outer, codes.data_ptr()))
    return codes.view(torch.int32) if aligned else None
