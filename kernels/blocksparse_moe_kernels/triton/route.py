"""Routing: from logits to the experts of each token and their weights, and back.

    route            logits [T, E] -> weights [T, K], ids [T, K]
    route_backward   gradient of the weights [T, K] -> gradient of the logits [T, E]

A program has a few whole rows. Values are compared as integers of the same order, so that a maximum over a warp is one
instruction, and NaN has its place as well. The columns of a tile are the experts of each group, padded to a power of two. Once
the best groups of a row are known, their columns alone are loaded anew.

The K largest of a row are found one by one. First with their experts in the last bits in place of those of the value: then
there are no ties, the next one is the largest below the last, and one maximum gives both value and expert. Only where two of
the K + 1 largest agree in all other bits are they looked for once more, by all of their bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..config import ceil_div, next_power_of_2, num_programs
from .launcher import launch
from .tiles import INTERPRETED

_LEAST = tl.constexpr(-(2**31))
"""Below the key of any number: what cannot be chosen, or was."""


@triton.jit
def _key(value):
    """int32 that is larger where the fp32 value is; one for both zeros, and NaN above (its sign bit set: below) all numbers."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return tl.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), _LEAST + 1)


@triton.jit
def _value(key):
    """The fp32 value of a `_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best(keys, number):
    """[ROWS]: of the columns with the largest key the lowest `number`, which is [ROWS or 1, COLUMNS]."""
    most = tl.max(keys, 1)
    return tl.min(tl.where(keys == most[:, None], number, 2147483647), 1)


@triton.jit
def _largest(keys, number, ROWS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr):
    """[ROWS, SLOTS]: numbers of the TOP_K largest keys of each row, falling, of equal ones the lowest first."""
    slot = tl.arange(0, SLOTS)
    numbers = tl.zeros((ROWS, SLOTS), tl.int32)
    for k in tl.static_range(TOP_K):
        best = _best(keys, number)
        numbers = tl.where(slot[None, :] == k, best[:, None], numbers)
        keys = tl.where(number == best[:, None], _LEAST, keys)
    return numbers


@triton.jit
def _largest_if_clear(keys, number, NUMBERS: tl.constexpr, ROWS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr):
    """The same of numbers below NUMBERS, a power of two, and whether that is so [ROWS]: not where two of the TOP_K + 1 largest
    agree in all but the last bits."""
    slot = tl.arange(0, SLOTS)
    coded = ((keys ^ _LEAST) & -NUMBERS) | (NUMBERS - 1 - number)
    coded = coded.to(tl.uint32, bitcast=True)
    best = tl.max(coded, 1)
    picked = tl.where(slot[None, :] == 0, best[:, None], 0)
    least_change = tl.full((ROWS,), NUMBERS, tl.uint32)
    for k in tl.static_range(1, TOP_K + 1):
        if k < keys.shape[1]:
            before = best
            # Modulo 2**32 what is picked comes to lie below all that is left.
            best = before + tl.max(coded - before[:, None], 1)
            least_change = tl.minimum(least_change, best ^ before)
            if k < TOP_K:
                picked = tl.where(slot[None, :] == k, best[:, None], picked)
    return NUMBERS - 1 - (picked.to(tl.int32, bitcast=True) & (NUMBERS - 1)), least_change >= NUMBERS


@triton.jit
def _reciprocal_of_many(x):
    """1 / x of x in [1, 2] to some 22 bits, in one instruction."""
    if INTERPRETED:
        return 1 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _exp(x, PRECISE: tl.constexpr):
    """exp(x) of x <= 0. PRECISE: with a relative error that does not grow with x, as of weights that are small; whole powers of
    two are taken out by log 2 in two parts. Else 0 where it is no normal number, which saves three instructions in five."""
    if not PRECISE:
        if INTERPRETED:
            return tl.exp(x)
        exponent = x * 1.4426950408889634
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [exponent], tl.float32, is_pure=True, pack=1)
    x = tl.where(x < -200.0, -200.0, x)  # NaN stays
    whole = tl.floor(x * 1.4426950408889634 + 0.5)
    rest = (x - whole * 0.693145751953125) - whole * 1.4286068203094172e-06
    return tl.exp(rest) * tl.exp2(whole)


@triton.jit
def _log1p(x):
    """log(1 + x) for x in [0, 1], to all digits: the rounding of 1 + x is divided out again."""
    one_more = 1 + x
    return tl.where(one_more == 1, x, tl.log(one_more) * (x / tl.where(one_more == 1, 1.0, one_more - 1)))


@triton.jit
def _sigmoid(x, PRECISE: tl.constexpr):
    part = _exp(-tl.abs(x), PRECISE)
    above = tl.where(x < 0, part, 1.0)
    return above / (1 + part) if PRECISE else above * _reciprocal_of_many(1 + part)


@triton.jit
def _softplus(x, PRECISE: tl.constexpr):
    return tl.maximum(x, 0.0) + _log1p(_exp(-tl.abs(x), PRECISE))


@triton.jit
def _row_softmax(logits, PRECISE: tl.constexpr):
    """Of [ROWS, E]: exp(logits - largest) and its sum [ROWS]."""
    exponentials = _exp(logits - tl.max(logits, 1)[:, None], PRECISE)
    return exponentials, tl.sum(exponentials, 1)


@triton.jit
def _softmax_of_many(logits):
    """The sum of exp(logits - largest) of each row, and the largest: by keys, of which a maximum is one instruction."""
    largest = _value(tl.max(_key(logits), 1))
    return tl.sum(_exp(logits - largest[:, None], False), 1), largest


@triton.jit
def _score(logits, total, largest, SCORE: tl.constexpr, PRECISE: tl.constexpr):
    """Of softmax by what `_softmax_of_many` says of their rows."""
    if SCORE == "softmax":
        return _exp(logits - largest[:, None], PRECISE) / total[:, None]
    elif SCORE == "sigmoid":
        return _sigmoid(logits, PRECISE)
    else:
        return tl.sqrt(_softplus(logits, PRECISE))


@triton.jit
def _selecting(
    logits, Correction, expert, known, total, largest,
    SCORE: tl.constexpr, SCORED: tl.constexpr, HAS_CORRECTION: tl.constexpr,
):  # fmt: skip
    """By what experts are chosen: their scores if SCORED, else logits, of which the order is the same; and the correction."""
    values = logits
    if SCORED:
        values = _score(logits, total, largest, SCORE, False)
    if HAS_CORRECTION:
        values += tl.load(Correction + expert, mask=known, other=0.0)
        values = tl.where(logits == float("-inf"), float("-inf"), values)  # no bias opens a closed expert
    return values


@triton.jit
def _log_score(logits, SCORE: tl.constexpr):
    """But for what all experts of a token share."""
    if SCORE == "softmax":
        return logits
    elif SCORE == "sigmoid":
        return tl.minimum(logits, 0.0) - _log1p(_exp(-tl.abs(logits), True))
    else:
        small = logits < -15.0
        return tl.where(small, logits, tl.log(_softplus(tl.where(small, 0.0, logits), True))) / 2


@triton.jit
def _log_score_derivative(logits, SCORE: tl.constexpr):
    if SCORE == "softmax":
        return tl.full(logits.shape, 1.0, tl.float32)
    elif SCORE == "sigmoid":
        return _sigmoid(-logits, True)
    else:
        small = logits < -15.0
        inside = tl.where(small, 0.0, logits)
        return tl.where(small, 0.5, _sigmoid(inside, True) / (2 * _softplus(inside, True)))


@triton.jit
def _two_largest(a, a_second, b, b_second):
    return tl.maximum(a, b), tl.maximum(tl.minimum(a, b), tl.maximum(a_second, b_second))


@triton.jit
def _best_groups(
    values, known, num_groups,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr, KEPT: tl.constexpr,
    BEST_TWO: tl.constexpr,
):  # fmt: skip
    """[ROWS, KEPT]: the TOP_GROUPS best groups of each row, by their best expert or the sum of the best two."""
    lowest = float("-inf")
    grouped = tl.reshape(tl.where(known & (values == values), values, lowest), (ROWS, GROUPS, SIZE))
    if BEST_TWO:
        best, second = tl.reduce((grouped, tl.full((ROWS, GROUPS, SIZE), lowest, tl.float32)), 2, _two_largest)
        best += second
    else:
        best = tl.max(grouped, 2)
    group = tl.arange(0, GROUPS)[None, :]
    return _largest(tl.where(group < num_groups, _key(best), _LEAST), group, ROWS, TOP_GROUPS, KEPT)


@triton.jit(do_not_specialize=["num_tokens", "num_experts", "num_groups"])
def _route_kernel(
    Logits, Correction, Weights, Ids,                       # [T, E], [E], [T, K], [T, K]
    stride_t, stride_e, num_tokens, num_experts, num_groups,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
    SCORE: tl.constexpr, NORMALIZE: tl.constexpr, SCALE: tl.constexpr, HAS_CORRECTION: tl.constexpr,
    TOP_GROUPS: tl.constexpr, KEPT: tl.constexpr, BEST_TWO: tl.constexpr, NUMBERS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """TOP_GROUPS is 0 where groups limit nothing; KEPT and NUMBERS: powers of two for TOP_GROUPS and num_experts. PADDED: some
    columns of the tile are no experts."""
    SCORED: tl.constexpr = HAS_CORRECTION or (TOP_GROUPS > 0 and BEST_TWO)
    column = tl.arange(0, GROUPS * SIZE)[None, :]
    # A thread that has neighbouring columns leaves less of a group's maxima to others, but is slower at those of whole rows.
    TOGETHER: tl.constexpr = TOP_GROUPS > 0 and not PADDED
    size = SIZE if TOGETHER else num_experts // num_groups
    expert = column if TOGETHER else column // SIZE * size + column % SIZE
    known = (column % SIZE < size) & (column // SIZE < num_groups)
    slot = tl.arange(0, SLOTS)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    here = row < num_tokens
    rows = Logits + row[:, None] * stride_t
    mask = here[:, None] & known if PADDED else here[:, None]
    logits = tl.load(rows + expert.to(tl.int64) * stride_e, mask=mask, other=float("-inf"))
    total = tl.full((ROWS,), 1.0, tl.float32)
    largest = tl.zeros((ROWS,), tl.float32)
    if SCORE == "softmax" and (SCORED or not NORMALIZE):
        total, largest = _softmax_of_many(logits)
    values = _selecting(logits, Correction, expert, known, total, largest, SCORE, SCORED, HAS_CORRECTION)
    if TOP_GROUPS > 0:
        kept = _best_groups(values, known, num_groups, ROWS, GROUPS, SIZE, TOP_GROUPS, KEPT, BEST_TWO)
        place = tl.arange(0, KEPT * SIZE)[None, :]
        known = (place % SIZE < size) & (place // SIZE < TOP_GROUPS)
        first = tl.reshape(tl.broadcast_to((kept * size)[:, :, None], (ROWS, KEPT, SIZE)), (ROWS, KEPT * SIZE))
        expert = tl.where(known, first + place % SIZE, 0)
        logits = tl.load(rows + expert.to(tl.int64) * stride_e, mask=here[:, None] & known, other=float("-inf"))
        values = _selecting(logits, Correction, expert, known, total, largest, SCORE, SCORED, HAS_CORRECTION)
    keys = _key(values)
    if PADDED or TOP_GROUPS != KEPT:
        keys = tl.where(known, keys, _LEAST)
    ids, clear = _largest_if_clear(keys, expert, NUMBERS, ROWS, TOP_K, SLOTS)
    if tl.min(clear.to(tl.int32), 0) == 0:
        ids = _largest(keys, expert, ROWS, TOP_K, SLOTS)

    used = here[:, None] & (slot < TOP_K)[None, :]
    chosen = tl.load(rows + ids.to(tl.int64) * stride_e, mask=used, other=float("-inf"))
    if NORMALIZE:
        chosen = tl.where((slot < TOP_K)[None, :], _log_score(chosen, SCORE), float("-inf"))
        exponentials, total = _row_softmax(chosen, True)
        weights = exponentials / total[:, None]
    else:
        weights = _score(chosen, total, largest, SCORE, True)
    places = row[:, None] * TOP_K + slot[None, :]
    tl.store(Weights + places, weights * SCALE, mask=used)
    tl.store(Ids + places, ids.to(tl.int64), mask=used)


@triton.jit(do_not_specialize=["num_tokens", "num_experts"])
def _route_backward_kernel(
    Grad, Logits, Weights, Ids, Out,                        # [T, K], [T, E] or None, [T, K], [T, K], [T, E]
    stride_gt, stride_gk, stride_t, stride_e, num_tokens, num_experts,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    SCORE: tl.constexpr, NORMALIZE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, EXPERTS)
    known = expert < num_experts
    for block in range(tl.program_id(0), tl.cdiv(num_tokens, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        here = row < num_tokens
        common = tl.zeros((ROWS,), tl.float32)
        if NORMALIZE or SCORE == "softmax":
            for k in tl.static_range(TOP_K):
                grad = tl.load(Grad + row * stride_gt + k * stride_gk, mask=here, other=0.0)
                common += grad * tl.load(Weights + row * TOP_K + k, mask=here, other=0.0)
        mask = here[:, None] & known[None, :]
        if NORMALIZE or SCORE != "softmax":
            out = tl.zeros((ROWS, EXPERTS), tl.float32)
        else:
            columns = row[:, None] * stride_t + expert[None, :].to(tl.int64) * stride_e
            exponentials, total = _row_softmax(tl.load(Logits + columns, mask=mask, other=float("-inf")), False)
            out = exponentials * (-common / total)[:, None]
        for k in tl.static_range(TOP_K):
            chosen = tl.load(Ids + row * TOP_K + k, mask=here, other=0)
            grad = tl.load(Grad + row * stride_gt + k * stride_gk, mask=here, other=0.0)
            weight = tl.load(Weights + row * TOP_K + k, mask=here, other=0.0)
            if NORMALIZE:
                grad -= common / SCALE
            grad *= weight
            if SCORE != "softmax":
                logit = tl.load(Logits + row * stride_t + chosen * stride_e, mask=here, other=0.0)
                grad *= _log_score_derivative(logit, SCORE)
            out += tl.where(expert[None, :] == chosen[:, None].to(tl.int32), grad[:, None], 0.0)
        tl.store(Out + row[:, None] * num_experts + expert[None, :], out, mask=mask)


def _shape_of_programs(columns: int) -> tuple[int, int]:
    """(rows of a program, its warps). A warp has whole rows, unless one is too long for it."""
    return max(1, min(32, 256 // columns)), max(1, columns // 1024)


def route(
    logits: Tensor,
    correction_bias: Tensor | None,
    top_k: int,
    normalize: bool,
    score: str,
    scaling_factor: float,
    num_groups: int,
    top_groups: int,
    group_score: str,
) -> tuple[Tensor, Tensor]:
    """Experts of each token, in falling order of score plus bias, of equal ones the lowest first, and their weights.

    Args:
        logits: [T, E] fp32, any strides; a row is held in registers, and each of the K costs a pass over it.
        correction_bias: [E] fp32, or None.
        top_k, ..., group_score: as in `RouterConfig`.
    Returns:
        weights [T, K] fp32 and expert ids [T, K] int64: K distinct ids inside [0, E) whatever the logits are.
    Oracle: reference.router. Source of groups and of the correction: DeepSeek-V3, arXiv:2412.19437.
    """
    T, E = logits.shape
    weights = logits.new_empty(T, top_k)
    ids = torch.empty(T, top_k, dtype=torch.int64, device=logits.device)
    if T == 0:
        return weights, ids
    if correction_bias is not None:
        correction_bias = correction_bias.contiguous()
    limited = top_groups < num_groups
    num_groups = num_groups if limited else 1
    size = next_power_of_2(E // num_groups)
    groups = next_power_of_2(num_groups)
    rows, warps = _shape_of_programs(groups * size)
    rows = max(rows, 2 if warps == 1 else 1)  # two rows hide each other's latencies
    launch(
        _route_kernel, logits.device, (ceil_div(T, rows),),
        logits, correction_bias, weights, ids, *logits.stride(), T, E, num_groups,
        ROWS=rows, GROUPS=groups, SIZE=size, TOP_K=top_k, SLOTS=next_power_of_2(top_k),
        SCORE=score, NORMALIZE=normalize, SCALE=scaling_factor, HAS_CORRECTION=correction_bias is not None,
        TOP_GROUPS=top_groups if limited else 0, KEPT=next_power_of_2(top_groups) if limited else 0,
        BEST_TWO=group_score == "best_two" and num_groups < E, NUMBERS=next_power_of_2(E),
        PADDED=groups * size != E, num_warps=warps,
    )  # fmt: skip
    return weights, ids


def route_backward(
    grad: Tensor,
    logits: Tensor | None,
    weights: Tensor,
    ids: Tensor,
    num_experts: int,
    normalize: bool,
    score: str,
    scaling_factor: float,
) -> Tensor:
    """The gradient of the logits, [T, E] fp32, by that of the weights.

    Args:
        grad: [T, K] fp32, any strides.
        logits: as given to `route`; None will do for normalised softmax.
        weights, ids: as `route` returned them.
    """
    T, top_k = grad.shape
    out = grad.new_empty(T, num_experts)
    if T == 0:
        return out
    experts = next_power_of_2(num_experts)
    rows, warps = _shape_of_programs(experts)
    launch(
        _route_backward_kernel, grad.device, (min(ceil_div(T, rows), 32 * num_programs(grad.device)),),
        grad, logits, weights, ids, out, *grad.stride(), *((0, 0) if logits is None else logits.stride()), T, num_experts,
        ROWS=rows, EXPERTS=experts, TOP_K=top_k, SCORE=score, NORMALIZE=normalize, SCALE=scaling_factor, num_warps=warps,
    )  # fmt: skip
    return out
