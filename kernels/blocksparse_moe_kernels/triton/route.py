"""Routing: from logits to the experts of each token and their weights, and back.

    route            logits [T, E] -> weights [T, K], ids [T, K]
    route_backward   gradient of the weights [T, K] -> gradient of the logits [T, E]

A program has a few whole rows, [ROWS, COLUMNS]. Where groups of experts are padded to a power of two, so are their columns.

The K largest of a row are found one by one, and the best groups likewise. First as codes: integers of the same order as the
values, with a number in place of the last bits. No two are equal, the next one is the largest below the last, and one maximum,
which over a warp is one instruction, gives both value and expert. Only where two of the K + 1 largest come too close are they
looked for once more, by all of their bits.
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

_MOST = tl.constexpr(2**32 - 1)
"""No code is above it."""

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _key(value):
    """int32 that is larger where the fp32 value is, not -0; NaN is above (its sign bit set: below) all numbers."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), _LEAST + 1)


@triton.jit
def _code(value, number, NUMBERS: tl.constexpr):
    """uint32 with the order of fp32 values, none of them -0, NaN included, but for their last bits, which hold a number below
    NUMBERS, a power of two: the lowest is the largest."""
    bits = value.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) | _LEAST)
    return ((ordered & -NUMBERS) | (NUMBERS - 1 - number)).to(tl.uint32, bitcast=True)


@triton.jit
def _take_largest(keys, number):
    """Of each row: the number of the largest key, of equal ones the lowest [ROWS, 1], and the keys without it."""
    most = tl.max(keys, 1, keep_dims=True)
    best = tl.min(tl.where(keys == most, number, 2147483647), 1, keep_dims=True)
    return best, tl.where(number == best, _LEAST, keys)


@triton.jit
def _largest(keys, number, slot, TOP_K: tl.constexpr):
    """[ROWS, SLOTS]: numbers of the TOP_K largest keys of each row, falling, of equal ones the lowest first."""
    numbers = slot * 0
    for k in tl.static_range(TOP_K):
        best, keys = _take_largest(keys, number)
        numbers = tl.where(slot == k, best, numbers)
    return numbers


@triton.jit
def _change_to_next(codes, last):
    """What leads from `last` to the next code of a row. Modulo 2**32 that is the largest: what came before lies below."""
    return tl.max(codes - last, 1, keep_dims=True)


@triton.jit
def _largest_if_clear(codes, slot, NUMBERS: tl.constexpr, TOP_K: tl.constexpr):
    """The same by codes, and whether they are clear [ROWS, 1]: not where two of the TOP_K + 1 largest are closer than NUMBERS,
    nor where all are 0."""
    last = tl.max(codes, 1, keep_dims=True)
    picked = tl.where(slot == 0, last, 0)
    change = tl.where(last == 0, _MOST, 0)
    for k in tl.static_range(1, TOP_K + 1):
        if k < codes.shape[1]:
            to_next = _change_to_next(codes, last)
            change = tl.maximum(change, to_next)
            last += to_next
            if k < TOP_K:
                picked = tl.where(slot == k, last, picked)
    return NUMBERS - 1 - (picked.to(tl.int32, bitcast=True) & (NUMBERS - 1)), change <= 2**32 - NUMBERS


@triton.jit
def _reciprocal(x):
    """1 / x to some 22 bits, in one instruction."""
    if INTERPRETED:
        return 1 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _exp2(x):
    """2**x, 0 where that is no normal number, in one instruction."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _exp(x, PRECISE: tl.constexpr):
    """exp(x) of x <= 0. PRECISE: with a relative error that does not grow with x, as of weights that are small; whole powers of
    two are taken out by log 2 in two parts. Else 0 where it is no normal number, which saves three instructions in five."""
    if not PRECISE:
        return _exp2(x * _LOG2_E)
    x = tl.where(x < -200.0, -200.0, x)  # NaN stays
    whole = tl.floor(x * _LOG2_E + 0.5)
    rest = (x - whole * 0.693145751953125) - whole * 1.4286068203094172e-06
    return tl.exp(rest) * tl.exp2(whole)


@triton.jit
def _log1p(x):
    """log(1 + x) for x in [0, 1], to all digits: the rounding of 1 + x is divided out again."""
    one_more = 1 + x
    return tl.where(one_more == 1, x, tl.log(one_more) * (x / tl.where(one_more == 1, 1.0, one_more - 1)))


@triton.jit
def _sigmoid(x, PRECISE: tl.constexpr):
    if not PRECISE:
        return _reciprocal(1 + _exp2(x * -_LOG2_E))
    part = _exp(-tl.abs(x), True)
    return tl.where(x < 0, part, 1.0) / (1 + part)


@triton.jit
def _softplus(x, PRECISE: tl.constexpr):
    return tl.maximum(x, 0.0) + _log1p(_exp(-tl.abs(x), PRECISE))


@triton.jit
def _row_softmax(logits, PRECISE: tl.constexpr):
    """exp(logits - largest), its sum over the row, and the largest."""
    largest = tl.max(logits, 1, keep_dims=True)
    exponentials = _exp(logits - largest, PRECISE)
    return exponentials, tl.sum(exponentials, 1, keep_dims=True), largest


@triton.jit
def _score(logits, total, largest, SCORE: tl.constexpr, PRECISE: tl.constexpr):
    """Of softmax by `_row_softmax`'s sum and largest."""
    if SCORE == "softmax":
        return _exp(logits - largest, PRECISE) / total
    elif SCORE == "sigmoid":
        return _sigmoid(logits, PRECISE)
    else:
        small = logits < -15.0
        root = tl.sqrt(_softplus(tl.where(small, 0.0, logits), PRECISE))
        return tl.where(small, _exp(tl.where(small, logits, 0.0) / 2, PRECISE), root)  # softplus is exp there


@triton.jit
def _selecting(
    logits, correction, total, largest,
    SCORE: tl.constexpr, SCORED: tl.constexpr, HAS_CORRECTION: tl.constexpr,
):  # fmt: skip
    """By what experts are chosen, never -0: scores if SCORED, else logits, whose order is the same; and the correction."""
    values = logits + 0.0
    if SCORED:
        values = _score(logits, total, largest, SCORE, False)
    if HAS_CORRECTION:
        values += correction
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
def _in_best_groups(
    values, num_groups, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr, EXACT: tl.constexpr
):
    """[ROWS, COLUMNS]: whether a column is in one of the TOP_GROUPS best groups, by its best expert or the sum of its best two.
    By codes unless EXACT; then no column is where they are not clear."""
    ROWS: tl.constexpr = values.shape[0]
    SIZE: tl.constexpr = values.shape[1] // GROUPS
    PAIR: tl.constexpr = 2 if BEST_TWO else 1
    values = tl.reshape(values, (ROWS, GROUPS, SIZE // PAIR, PAIR))
    if BEST_TWO:
        a, b = tl.split(values)
        best, second = tl.reduce((tl.maximum(a, b), tl.minimum(a, b)), 2, _two_largest)
        best += second
    else:
        best = tl.max(tl.max(values, 3), 2)
    group = tl.arange(0, GROUPS)[None, :]
    if EXACT:
        keys = tl.where(group < num_groups, _key(best + 0.0), _LEAST)
        kept = keys < _LEAST
        for _ in tl.static_range(TOP_GROUPS):
            taken, keys = _take_largest(keys, group)
            kept = kept | (group == taken)
        return _of_columns(kept, SIZE, PAIR)
    codes = tl.where(group < num_groups, _code(best + 0.0, group, GROUPS), 0)
    codes = _of_columns(codes, SIZE, PAIR)  # a maximum over a whole warp is the faster one
    last = tl.max(codes, 1, keep_dims=True)
    for _ in tl.static_range(TOP_GROUPS - 1):
        last += _change_to_next(codes, last)
    clear = _change_to_next(codes, last) <= 2**32 - GROUPS
    return codes > tl.where(clear, last - 1, _MOST)


@triton.jit
def _of_columns(groups, SIZE: tl.constexpr, PAIR: tl.constexpr):
    """[ROWS, GROUPS] -> [ROWS, GROUPS * SIZE], by way of the shape in which `_in_best_groups` looked at them."""
    ROWS: tl.constexpr = groups.shape[0]
    GROUPS: tl.constexpr = groups.shape[1]
    every = tl.broadcast_to(groups[:, :, None, None], (ROWS, GROUPS, SIZE // PAIR, PAIR))
    return tl.reshape(every, (ROWS, GROUPS * SIZE))


@triton.jit
def _of_slots(x, SLOTS: tl.constexpr):
    """[ROWS, SLOTS] of what is [ROWS, 1] or has each slot four times."""
    ROWS: tl.constexpr = x.shape[0]
    return tl.max(tl.reshape(tl.broadcast_to(x, (ROWS, SLOTS * 4)), (ROWS, SLOTS, 4)), 2)


@triton.jit
def _load(pointers, known, other: tl.constexpr, PADDED: tl.constexpr):
    """`other` where a column is no expert."""
    if PADDED:
        return tl.load(pointers, mask=known, other=other)
    else:
        return tl.load(pointers)


@triton.jit(do_not_specialize=["num_tokens", "num_experts", "num_groups"])
def _route_kernel(
    Logits, Correction, Weights, Ids,                       # [T, E], [E], [T, K], [T, K]
    stride_t, stride_e, num_tokens, num_experts, num_groups,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
    SCORE: tl.constexpr, NORMALIZE: tl.constexpr, SCALE: tl.constexpr, HAS_CORRECTION: tl.constexpr,
    TOP_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr, NUMBERS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """TOP_GROUPS is 0 where groups limit nothing. NUMBERS: a power of two, num_experts at least. PADDED: some columns of the
    tile are no experts."""
    SCORED: tl.constexpr = HAS_CORRECTION or (TOP_GROUPS > 0 and BEST_TWO)
    column = tl.arange(0, GROUPS * SIZE)[None, :]
    size = num_experts // num_groups if PADDED else SIZE
    expert = column // SIZE * size + column % SIZE if PADDED else column
    known = (column % SIZE < size) & (column // SIZE < num_groups)
    slot = tl.arange(0, SLOTS)[None, :]
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    here = row < num_tokens
    row = tl.minimum(row, num_tokens - 1)  # a row too many is loaded, and not stored
    columns = Logits + row * stride_t + expert.to(tl.int64) * stride_e
    logits = _load(columns, known, float("-inf"), PADDED)
    correction = _load(Correction + expert, known, 0.0, PADDED) if HAS_CORRECTION else 0.0
    total = tl.full((ROWS, 1), 1.0, tl.float32)
    largest = tl.zeros((ROWS, 1), tl.float32)
    if SCORE == "softmax" and (SCORED or not NORMALIZE):
        _, total, largest = _row_softmax(logits, False)
    values = _selecting(logits, correction, total, largest, SCORE, SCORED, HAS_CORRECTION)
    codes = _code(values, expert, NUMBERS)
    if PADDED:
        codes = tl.where(known, codes, 0)
    if TOP_GROUPS > 0:
        values = tl.where(known, values, float("-inf")) if PADDED else values
        codes = tl.where(_in_best_groups(values, num_groups, GROUPS, TOP_GROUPS, BEST_TWO, False), codes, 0)
    # Each slot four times, as a thread has four neighbours of a row: so it has one slot to note and not four.
    slots = tl.arange(0, SLOTS * 4)[None, :] // 4
    ids, clear = _largest_if_clear(codes, slots, NUMBERS, TOP_K)
    if tl.min(tl.min(clear.to(tl.int32), 1), 0) == 0:
        again = _load(columns, known, float("-inf"), PADDED)  # to keep no registers for it
        values = _selecting(again, correction, total, largest, SCORE, SCORED, HAS_CORRECTION)
        keys = tl.where(known, _key(values), _LEAST)
        if TOP_GROUPS > 0:
            values = tl.where(known, values, float("-inf"))
            keys = tl.where(_in_best_groups(values, num_groups, GROUPS, TOP_GROUPS, BEST_TWO, True), keys, _LEAST)
        ids = _largest(keys, expert, slots, TOP_K)
    ids, total, largest = _of_slots(ids, SLOTS), _of_slots(total, SLOTS), _of_slots(largest, SLOTS)

    used = here & (slot < TOP_K)
    chosen = tl.load(Logits + row * stride_t + ids.to(tl.int64) * stride_e, mask=used, other=float("-inf"))
    if NORMALIZE:
        chosen = tl.where(slot < TOP_K, _log_score(chosen, SCORE), float("-inf"))
        exponentials, total, _ = _row_softmax(chosen, True)
        weights = exponentials / total
    else:
        weights = _score(chosen, total, largest, SCORE, True)
    places = row * TOP_K + slot
    tl.store(Weights + places, weights * SCALE, mask=used)
    tl.store(Ids + places, ids.to(tl.int64), mask=used)


@triton.jit(do_not_specialize=["num_tokens", "num_experts"])
def _route_backward_kernel(
    Grad, Logits, Weights, Ids, Out,                        # [T, K], [T, E] or None, [T, K], [T, K], [T, E]
    stride_gt, stride_gk, stride_t, stride_e, num_tokens, num_experts,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
    SCORE: tl.constexpr, NORMALIZE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, EXPERTS)[None, :]
    slot = tl.arange(0, SLOTS)[None, :]
    for block in range(tl.program_id(0), tl.cdiv(num_tokens, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        here = row < num_tokens
        used = here & (slot < TOP_K)
        grad = tl.load(Grad + row * stride_gt + slot * stride_gk, mask=used, other=0.0)
        weight = tl.load(Weights + row * TOP_K + slot, mask=used, other=0.0)
        chosen = tl.load(Ids + row * TOP_K + slot, mask=used, other=0)
        mask = here & (expert < num_experts)
        out = tl.zeros((ROWS, EXPERTS), tl.float32)
        if NORMALIZE or SCORE == "softmax":
            common = tl.sum(grad * weight, 1, keep_dims=True)
            grad -= common / SCALE
            if not NORMALIZE:
                logits = tl.load(Logits + row * stride_t + expert.to(tl.int64) * stride_e, mask=mask, other=float("-inf"))
                exponentials, total, _ = _row_softmax(logits, False)
                out = exponentials * (-common / total)
        tl.store(Out + row * num_experts + expert, out, mask=mask)
        grad *= weight
        if SCORE != "softmax":
            logit = tl.load(Logits + row * stride_t + chosen * stride_e, mask=used, other=0.0)
            grad *= _log_score_derivative(logit, SCORE)
        tl.debug_barrier()  # those of the chosen experts are written once more
        tl.store(Out + row * num_experts + chosen, grad, mask=used)


def _shape_of_programs(columns: int) -> dict[str, int]:
    """ROWS, and options of the compiler. The rows of a warp hide each other's latencies, and fewer programs are started sooner;
    with 64 registers an SM holds 32 warps, as many as it takes programs."""
    if columns > 512:
        return dict(ROWS=1, num_warps=max(1, columns // 1024))
    return dict(ROWS=min(32, 512 // columns), num_warps=1, maxnreg=64)


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
    size, groups = next_power_of_2(E // num_groups), next_power_of_2(num_groups)
    shape = _shape_of_programs(groups * size)
    launch(
        _route_kernel, logits.device, (ceil_div(T, shape["ROWS"]),),
        logits, correction_bias, weights, ids, *logits.stride(), T, E, num_groups,
        GROUPS=groups, SIZE=size, TOP_K=top_k, SLOTS=next_power_of_2(top_k),
        SCORE=score, NORMALIZE=normalize, SCALE=scaling_factor, HAS_CORRECTION=correction_bias is not None,
        TOP_GROUPS=top_groups if limited else 0, BEST_TWO=group_score == "best_two" and num_groups < E,
        NUMBERS=next_power_of_2(E), PADDED=groups * size != E, **shape,
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
        weights, ids: as `route` returned them: the ids of a row are distinct.
    """
    T, top_k = grad.shape
    out = grad.new_empty(T, num_experts)
    if T == 0:
        return out
    experts = next_power_of_2(num_experts)
    rows = max(1, min(32, 1024 // experts))
    launch(
        _route_backward_kernel, grad.device, (min(ceil_div(T, rows), 32 * num_programs(grad.device)),),
        grad, logits, weights, ids, out, *grad.stride(), *((0, 0) if logits is None else logits.stride()), T, num_experts,
        ROWS=rows, EXPERTS=experts, TOP_K=top_k, SLOTS=next_power_of_2(top_k),
        SCORE=score, NORMALIZE=normalize, SCALE=scaling_factor, num_warps=max(1, experts // 1024),
    )  # fmt: skip
    return out
