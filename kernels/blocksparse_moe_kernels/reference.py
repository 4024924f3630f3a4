"""The specification: every op in a few lines of torch, in any dtype up to fp64, on any device, differentiable by autograd.

T tokens, H hidden size, F expert FFN size, E experts, K experts per token, M = T * K routed rows. Inside a GEMM kernel the
letters are M, N, K as in every GEMM.

These loop over experts and tokens and read the routing on the host: they are for reading and for tests.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from einops import einsum, rearrange, repeat
from torch import Tensor
from torch.nn.functional import softplus

from .activations import get_activation
from .block_sparse import BlockSparse, Columns
from .topology import Topology

Order = Literal["tokens", "rows"]


def topology(expert_ids: Tensor, num_experts: int) -> tuple[list[int], list[int]]:
    """Slots in row order (kept ones only) and the row offsets [E + 1] of expert_ids [T, K]."""
    flat = expert_ids.reshape(-1).tolist()
    slots = [slot for expert in range(num_experts) for slot, chosen in enumerate(flat) if chosen == expert]
    offsets = [sum(0 <= chosen < expert for chosen in flat) for expert in range(num_experts + 1)]
    return slots, offsets


def sdd(
    x: Tensor,
    w: Tensor,
    topology: Topology,
    *,
    order: Order = "tokens",
    columns: Columns | None = None,
    bias: Tensor | None = None,
) -> BlockSparse:
    """s_e = x_e w_e^T (+ bias_e). x [T, H] or [M, H], w [E, N, H] or flat [sum N_e, H], bias [E, N] or flat [sum N_e]."""
    columns = Columns.equal(w.shape[1], w.shape[0]) if columns is None else columns
    blocks = [
        _take_rows(x, topology, expert, order) @ w_e.T + (0 if bias_e is None else bias_e)
        for expert, (w_e, bias_e) in enumerate(zip(_per_expert(w, columns, 3), _per_expert(bias, columns, 2), strict=True))
    ]
    return _from_blocks(blocks, topology, columns)


def dsd(s: BlockSparse, w: Tensor, *, order: Order = "rows", bias: Tensor | None = None) -> Tensor:
    """y_e = s_e w_e (+ bias_e), rows in expert order [M, H], zero where dropped; bias [E, H].

    A transposed `s` takes the dense operand x ([T, H] or [M, H]) in place of w and sums over each expert's rows:
    w_e = s_e^T x_e, [E, N, H] or flat [sum N_e, H].
    """
    topology, columns = s.topology, s.columns
    if s.transposed:
        grads = [s_e.T @ _take_rows(w, topology, expert, order) for expert, s_e in enumerate(_blocks(s))]
        return torch.stack(grads) if columns.are_equal else torch.cat(grads)
    blocks = [
        s_e @ w_e + (0 if bias is None else bias[expert])
        for expert, (s_e, w_e) in enumerate(zip(_blocks(s), _per_expert(w, columns, 3), strict=True))
    ]
    y = torch.cat(blocks)
    return torch.cat((y, y.new_zeros(topology.num_slots - y.shape[0], y.shape[1])))


def combine(y: Tensor, topology: Topology, weights: Tensor | None = None) -> Tensor:
    """out[t] = sum over the slots of token t of weights[slot] * y[row of slot]. y [M, H], weights [T, K] or [M] -> [T, H]."""
    num_rows = int(topology.num_rows)
    slots, tokens = topology.slots[:num_rows].long(), topology.tokens[:num_rows].long()
    kept = y[:num_rows]
    if weights is not None:
        kept = kept * weights.reshape(-1)[slots, None].to(y.dtype)
    return y.new_zeros(topology.num_tokens, y.shape[1]).index_add(0, tokens, kept)


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
) -> Tensor:
    """sdd, activation, dsd, combine: x [T, H] -> [T, H].

    up_proj [E, 2F, H] (rows `[gate; up]`) or [E, F, H], down_proj [E, H, F]; with `columns` (F_e of each expert) both are
    flat: [sum 2F_e, H] and [sum F_e, H], down transposed.
    """
    halves = get_activation(activation).halves
    if columns is None:
        columns = Columns.equal(down_proj.shape[2], down_proj.shape[0])
        down_proj = down_proj.transpose(1, 2)
    pre = sdd(x, up_proj, topology, columns=columns.times(halves), bias=up_proj_bias)
    hidden = _from_blocks([get_activation(activation)(block) for block in _blocks(pre)], topology, columns)
    y = dsd(hidden, down_proj, bias=down_proj_bias)
    return combine(y, topology, routing_weights)


_E4M3 = [code / 8 * 2.0**-6 if code < 8 else (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7) for code in range(127)]
"""The numbers of codes 0 to 126: subnormal ones, then eight from each power of two on. 127 is NaN; 128 is the sign."""


def mxfp8_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [R, K] and scales [R, K / 32] of x [R, K], as bytes: blocks of 32 numbers along K share a scale.

    A code stands for _E4M3[code] * 2^(scale - 127). Scale: the least with which the largest magnitude of the block, times 1/448
    in fp32, is at most 2^(scale - 127); 254 if none is, and 255 if there is a NaN. Code: the nearest, the even one of two.
    """
    codes, scales = [], []
    for block in x.float().split(32, dim=1):
        largest = block.abs().amax(dim=1) * torch.tensor(1 / 448, dtype=torch.float32, device=x.device)
        powers = torch.tensor([2.0 ** (scale - 127) for scale in range(255)], dtype=torch.float64, device=x.device)
        scale = (largest[:, None] > powers).sum(dim=1).clamp(max=254)
        scale[largest.isnan()] = 255
        inverse = torch.tensor([2.0 ** (127 - scale) for scale in range(256)], dtype=torch.float64, device=x.device)
        scaled = block.double() * inverse[scale][:, None]
        distances = (scaled.abs().clamp(max=448)[..., None] - torch.tensor(_E4M3, dtype=torch.float64, device=x.device)).abs()
        nearest = distances == distances.amin(dim=2, keepdim=True)
        preferred = 2 - torch.arange(127, device=x.device) % 2
        code = (nearest * preferred).argmax(dim=2) + 128 * scaled.signbit()
        code[scaled.isnan()] = 127
        codes.append(code.to(torch.uint8))
        scales.append(scale.to(torch.uint8))
    return torch.cat(codes, dim=1), torch.stack(scales, dim=1)


def mxfp8_dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """The numbers, in fp64."""
    numbers = torch.tensor([*_E4M3, torch.nan], dtype=torch.float64, device=codes.device)
    numbers = torch.cat((numbers, -numbers))[codes.long()]
    powers = [*(2.0 ** (scale - 127) for scale in range(255)), torch.nan]
    return numbers * numbers.new_tensor(powers)[scales.long()].repeat_interleave(32, dim=1)[:, : codes.shape[1]]


def mxfp8(x: Tensor) -> Tensor:
    """x [R, K] rounded to MXFP8, in blocks along K; fp64."""
    return mxfp8_dequantize(*mxfp8_quantize(x))


def router(
    x: Tensor,
    weight: Tensor,
    top_k: int,
    *,
    normalize: bool,
    score: str = "softmax",
    scaling_factor: float = 1.0,
    correction_bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "best_two",
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits x weight^T (+ bias), their scores, the K best of the best groups, renormalised if asked: logits, weights, ids."""
    logits = einsum(x, weight, "t h, e h -> t e") + (0 if bias is None else bias)
    scores = {"softmax": logits.softmax(dim=-1), "sigmoid": logits.sigmoid(), "sqrt_softplus": softplus(logits).sqrt()}[score]
    chosen_by = scores if correction_bias is None else scores + correction_bias
    groups = rearrange(chosen_by, "t (g e) -> t g e", g=num_groups)
    ordered = groups.sort(dim=-1, descending=True).values
    group_scores = ordered[..., 0] if group_score == "max" else ordered[..., :2].sum(dim=-1)
    best_groups = group_scores.topk(top_groups, dim=-1).indices
    kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, best_groups, True)
    chosen_by = torch.where(repeat(kept, "t g -> t (g e)", e=groups.shape[2]), chosen_by, -torch.inf)
    expert_ids = chosen_by.topk(top_k, dim=-1).indices
    weights = scores.gather(1, expert_ids)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return logits, scaling_factor * weights, expert_ids


def load_balancing_loss(scores: Tensor, expert_ids: Tensor) -> Tensor:
    """E * sum_e f_e P_e: f the share of slots, P the mean of the scores [T, E], which sum to 1 in each row; 1 at balance.
    Switch Transformer, arXiv:2101.03961."""
    num_experts = scores.shape[-1]
    share = torch.stack([(expert_ids == expert).to(scores.dtype).mean() for expert in range(num_experts)])
    return num_experts * (share * scores.mean(dim=0)).sum()


def z_loss(logits: Tensor) -> Tensor:
    """mean of logsumexp(logits)^2. ST-MoE, arXiv:2202.08906."""
    return logits.logsumexp(dim=-1).square().mean()


def _take_rows(x: Tensor, topology: Topology, expert: int, order: Order) -> Tensor:
    first, last = topology.offsets[expert : expert + 2].tolist()
    return x[topology.tokens[first:last].long()] if order == "tokens" else x[first:last]


def _per_expert(w: Tensor | None, columns: Columns, stacked_ndim: int) -> list[Any]:
    if w is None:
        return [None] * columns.num_experts
    return list(w) if w.ndim == stacked_ndim else list(w.split(columns.widths))


def _blocks(s: BlockSparse) -> list[Tensor]:
    """[n_e, N_e] of each expert."""
    offsets, flat, start, blocks = s.topology.offsets.tolist(), s.values.reshape(-1), 0, []
    for expert, width in enumerate(s.columns.widths):
        size = (offsets[expert + 1] - offsets[expert]) * width
        blocks.append(flat[start : start + size].view(-1, width))
        start += size
    return blocks


def _from_blocks(blocks: list[Tensor], topology: Topology, columns: Columns) -> BlockSparse:
    used = torch.cat([block.reshape(-1) for block in blocks])
    capacity = topology.num_slots * columns.widest
    values = torch.cat((used, used.new_zeros(capacity - used.numel())))
    return BlockSparse(values.view(-1, columns.widest) if columns.are_equal else values, topology, columns)
