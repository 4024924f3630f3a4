"""Routing: from logits to the experts of each token and their weights, and back.

    route            logits [T, E] -> weights [T, K], ids [T, K]
    route_backward   gradient of the weights [T, K] -> gradient of the logits [T, E]

A program has a few whole rows, as a tile [ROWS, PARTS, SIZE]. Where groups limit the choice, a part is as many neighbours of a
group as a thread has, so that its best two are found inside threads; elsewhere the row is one part. Groups are padded to a
power of two, in number and size.

The K largest of a row are found one by one, and the best groups likewise. First as codes: integers of the same order as the
values, with a number in place of the last bits. No two are equal, the next one is the largest below the last, and one maximum,
gives both value and expert. Only where two of the K + 1 largest come too close are they
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
def _row_max(x):
    """[ROWS, 1, 1]: in each thread, then over threads."""
    return tl.max(tl.max(x, 2, keep_dims=True), 1, keep_dims=True)


@triton.jit
def _row_sum(x):
    return tl.sum(tl.sum(x, 2, keep_dims=True), 1, keep_dims=True)


@triton.jit
def _take_largest(keys, number):
    """Of each row: the number of the largest key, of equal ones the lowest [ROWS, 1, 1], and the keys without it."""
    best = tl.where(keys == _row_max(keys), number, 2147483647)
    best = tl.min(tl.min(best, 2, keep_dims=True), 1, keep_dims=True)
    return best, tl.where(number == best, _LEAST, keys)


@triton.jit
def _largest(keys, number, slot, TOP_K: tl.constexpr):
    """[ROWS, SLOTS, 1]: numbers of the TOP_K largest keys of each row, falling, of equal ones the lowest first."""
    numbers = slot * 0
    for k in tl.static_range(TOP_K):
        best, keys = _take_largest(keys, number)
        numbers = tl.where(slot == k, best, numbers)
    return numbers


@triton.jit
def _change_to_next(codes, last):
    """What leads from `last` to the next code of a row. Modulo 2**32 that is the largest: what came before lies below."""
    return _row_max(codes - last)


@triton.jit
def _largest_if_clear(codes, slot, NUMBERS: tl.constexpr, TOP_K: tl.constexpr):
    """The same by codes, and whether they are clear [ROWS, 1, 1]: not where two of the TOP_K + 1 largest are closer than
    NUMBERS, nor where all are 0."""
    last = _row_max(codes)
    picked = tl.where(slot == 0, last, 0)
    change = tl.where(last == 0, _MOST, 0)
    for k in tl.static_range(1, TOP_K + 1):
        if k < codes.shape[1] * codes.shape[2]:
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
def _softplus(x):
    return tl.maximum(x, 0.0) + _log1p(_exp(-tl.abs(x), True))


@triton.jit
def _row_softmax(logits):
    """exp(logits - largest), its sum over the row, and the largest."""
    largest = _row_max(logits)
    exponentials = _exp(logits - largest, False)
    return exponentials, _row_sum(exponentials), largest


@triton.jit
def _score_parts(logits, SCORE: tl.constexpr):
    """(exponent, factor): the score is exp(exponent) * factor, but for what all experts of a token share."""
    if SCORE == "softmax":
        return logits, 1.0
    elif SCORE == "sigmoid":
        return tl.minimum(logits, 0.0), 1 / (1 + _exp(-tl.abs(logits), False))
    else:
        small = logits < -15.0
        root = tl.sqrt(_softplus(tl.where(small, 0.0, logits)))
        return tl.where(small, logits / 2, 0.0), tl.where(small, 1.0, root)


@triton.jit
def _score(logits, total, largest, SCORE: tl.constexpr, PRECISE: tl.constexpr):
    """Of softmax by `_row_softmax`'s sum and largest."""
    if SCORE == "softmax":
        return _exp(logits - largest, PRECISE) / total
    elif SCORE == "sigmoid":
        return _sigmoid(logits, PRECISE)
    elif PRECISE:
        exponent, factor = _score_parts(logits, SCORE)
        return _exp(exponent, True) * factor
    else:
        # With h = exp(-|x| / 2) softplus is h^2 p or, of positive x, x + h^2 p: p, log(1 + h^2) / h^2, is a polynomial of h^2,
        # to 2e-7.
        half = _exp2(tl.abs(logits) * (-0.5 * _LOG2_E))
        square = half * half
        p = square * -0.008539104834198952 + 0.04408928006887436
        p = p * square - 0.10768125206232071
        p = p * square + 0.17745211720466614
        p = p * square - 0.24495454132556915
        p = p * square + 0.33275479078292847
        p = p * square - 0.4999740421772003
        p = p * square + 0.9999998211860657
        is_negative = logits < 0
        return tl.sqrt(tl.where(is_negative, p, logits + square * p)) * tl.where(is_negative, half, 1.0)


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
def _log_score_derivative(logits, SCORE: tl.constexpr):
    if SCORE == "softmax":
        return tl.full(logits.shape, 1.0, tl.float32)
    elif SCORE == "sigmoid":
        return _sigmoid(-logits, True)
    else:
        small = logits < -15.0
        inside = tl.where(small, 0.0, logits)
        return tl.where(small, 0.5, _sigmoid(inside, True) / (2 * _softplus(inside)))


@triton.jit
def _two_largest(a, a_second, b, b_second):
    return tl.maximum(a, b), tl.maximum(tl.minimum(a, b), tl.maximum(a_second, b_second))


@triton.jit
def _in_best_groups(
    values, num_groups, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr, EXACT: tl.constexpr
):
    """[ROWS, PARTS, 1]: whether a part is of one of the TOP_GROUPS best groups, by its best expert or the sum of its best two.
    By codes unless EXACT; then none is where they are not clear."""
    ROWS: tl.constexpr = values.shape[0]
    PARTS: tl.constexpr = values.shape[1] // GROUPS  # of a group
    if BEST_TWO:
        a, b = tl.split(tl.reshape(values, (ROWS, GROUPS, PARTS, values.shape[2] // 2, 2)))
        best, second = tl.reduce((tl.maximum(a, b), tl.minimum(a, b)), 3, _two_largest, keep_dims=True)
        best, second = tl.reduce((best, second), 2, _two_largest, keep_dims=True)
        best += second
    else:
        best = tl.max(tl.reshape(values, (ROWS, GROUPS, PARTS, values.shape[2])), 3, keep_dims=True)
        best = tl.max(best, 2, keep_dims=True)
    best = tl.reshape(tl.broadcast_to(best + 0.0, (ROWS, GROUPS, PARTS, 1)), (ROWS, GROUPS * PARTS, 1))
    group = (tl.arange(0, GROUPS * PARTS) // PARTS)[None, :, None]
    if EXACT:
        keys = tl.where(group < num_groups, _key(best), _LEAST)
        kept = keys < _LEAST
        for _ in tl.static_range(TOP_GROUPS):
            taken, keys = _take_largest(keys, group)
            kept = kept | (group == taken)
        return kept
    codes = tl.where(group < num_groups, _code(best, group, GROUPS), 0)
    last = _row_max(codes)
    for _ in tl.static_range(TOP_GROUPS - 1):
        last += _change_to_next(codes, last)
    clear = _change_to_next(codes, last) <= 2**32 - GROUPS
    return codes > tl.where(clear, last - 1, _MOST)


@triton.jit
def _of_slots(x, slot, SLOTS: tl.constexpr):
    """[ROWS, 1, SLOTS] of what is of the shape of `slot`, which may have each several times, or [ROWS, 1, 1]."""
    x = tl.broadcast_to(x, (x.shape[0], slot.shape[1], slot.shape[2]))
    return tl.max(tl.reshape(x, (x.shape[0], 1, SLOTS, slot.shape[1] * slot.shape[2] // SLOTS)), 3)


@triton.jit
def _load(pointers, known, other: tl.constexpr, PADDED: tl.constexpr):
    """`other` where a column is no expert."""
    if PADDED:
        return tl.load(pointers, mask=known, other=other)
    else:
        return tl.load(pointers)


@triton.jit
def _joined(x):
    """[CHUNKS, ROWS, PARTS, VECTOR] -> [ROWS, PARTS, CHUNKS * VECTOR], inside each thread."""
    return tl.reshape(tl.permute(x, (1, 2, 0, 3)), (x.shape[1], x.shape[2], x.shape[0] * x.shape[3]))


@triton.jit(do_not_specialize=["num_tokens", "num_experts", "num_groups"])
def _route_kernel(
    Logits, Correction, Weights, Ids,                       # [T, E], [E], [T, K], [T, K]
    stride_t, stride_e, num_tokens, num_experts, num_groups,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr,
    SCORE: tl.constexpr, NORMALIZE: tl.constexpr, SCALE: tl.constexpr, HAS_CORRECTION: tl.constexpr,
    TOP_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr, NUMBERS: tl.constexpr, PADDED: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """TOP_GROUPS is 0 where groups limit nothing. NUMBERS: a power of two, num_experts at least. PADDED: some columns of the
    tile are no experts. VECTORS: the tile is not padded, and every four experts of a part are neighbours in memory."""
    SCORED: tl.constexpr = HAS_CORRECTION or (TOP_GROUPS > 0 and BEST_TWO)
    VECTOR: tl.constexpr = min(4, SIZE) if TOP_GROUPS > 0 else SIZE
    # As it is loaded: [SIZE / VECTOR, ROWS, PARTS, VECTOR], of which a thread has all of the first and the last.
    chunk = tl.arange(0, SIZE // VECTOR)[:, None, None, None]
    part = tl.arange(0, PARTS)[None, None, :, None]
    expert = part * SIZE + chunk * VECTOR + tl.arange(0, VECTOR)[None, None, None, :]
    known = expert < num_experts
    if PADDED and TOP_GROUPS > 0:
        COLUMNS: tl.constexpr = PARTS // GROUPS * SIZE
        size = num_experts // num_groups
        known = (expert % COLUMNS < size) & (expert // COLUMNS < num_groups)
        expert = expert // COLUMNS * size + expert % COLUMNS
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[None, :, None, None]
    columns = Logits + tl.minimum(row, num_tokens - 1) * stride_t + expert.to(tl.int64) * stride_e
    corrections = tl.broadcast_to(Correction + expert, columns.shape) if HAS_CORRECTION else columns
    if TOP_GROUPS > 0 and VECTORS:
        # Triton gives threads first the dimension in which it believes the most addresses contiguous: after the last one parts,
        # and rows as well unless a row has a warp of its own.
        ROW_HINT: tl.constexpr = 1 if PARTS >= 32 else 2
        columns = tl.max_contiguous(columns, [1, ROW_HINT, 2, 4])
        if HAS_CORRECTION:
            corrections = tl.max_contiguous(corrections, [1, ROW_HINT, 2, 4])
    is_known = tl.broadcast_to(known, columns.shape)
    logits = _joined(_load(columns, is_known, float("-inf"), PADDED))
    correction = _joined(_load(corrections, is_known, 0.0, PADDED)) if HAS_CORRECTION else 0.0
    known, expert = _joined(is_known), _joined(tl.broadcast_to(expert, columns.shape))
    total = tl.full((ROWS, 1, 1), 1.0, tl.float32)
    largest = tl.zeros((ROWS, 1, 1), tl.float32)
    if SCORE == "softmax" and (SCORED or not NORMALIZE):
        _, total, largest = _row_softmax(logits)
    values = _selecting(logits, correction, total, largest, SCORE, SCORED, HAS_CORRECTION)
    codes = _code(values, expert, NUMBERS)
    if PADDED:
        codes = tl.where(known, codes, 0)
        values = tl.where(known, values, float("-inf"))
    if TOP_GROUPS > 0:
        codes = tl.where(_in_best_groups(values, num_groups, GROUPS, TOP_GROUPS, BEST_TWO, False), codes, 0)
        slot = tl.arange(0, SLOTS)[None, :, None]
    else:  # each slot four times, as a thread has four neighbours: so it has one slot to note and not four
        slot = (tl.arange(0, SLOTS * 4) // 4)[None, None, :]
    ids, clear = _largest_if_clear(codes, slot, NUMBERS, TOP_K)
    if tl.min(tl.min(tl.min(clear.to(tl.int32), 2), 1), 0) == 0:
        again = _joined(tl.load(columns, mask=is_known, other=float("-inf")))
        values = _selecting(again, correction, total, largest, SCORE, SCORED, HAS_CORRECTION)
        keys = tl.where(known, _key(values), _LEAST)
        if TOP_GROUPS > 0:
            values = tl.where(known, values, float("-inf"))
            keys = tl.where(_in_best_groups(values, num_groups, GROUPS, TOP_GROUPS, BEST_TWO, True), keys, _LEAST)
        ids = _largest(keys, expert, slot, TOP_K)

    ids, total, largest = _of_slots(ids, slot, SLOTS), _of_slots(total, slot, SLOTS), _of_slots(largest, slot, SLOTS)
    slot = tl.arange(0, SLOTS)[None, None, :]
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None, None]
    used = (row < num_tokens) & (slot < TOP_K)
    chosen = tl.load(Logits + row * stride_t + ids.to(tl.int64) * stride_e, mask=used, other=float("-inf"))
    if NORMALIZE:
        exponent, factor = _score_parts(chosen, SCORE)
        exponentials = _exp(exponent - _row_max(tl.where(slot < TOP_K, exponent, float("-inf"))), True) * factor
        weights = tl.div_rn(exponentials, _row_sum(tl.where(slot < TOP_K, exponentials, 0.0)))  # 1 of one expert
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
                exponentials = _exp(logits - tl.max(logits, 1, keep_dims=True), False)
                out = exponentials * (-common / tl.sum(exponentials, 1, keep_dims=True))
        tl.store(Out + row * num_experts + expert, out, mask=mask)
        grad *= weight
        if SCORE != "softmax":
            logit = tl.load(Logits + row * stride_t + chosen * stride_e, mask=used, other=0.0)
            grad *= _log_score_derivative(logit, SCORE)
        tl.debug_barrier()  # those of the chosen experts are written once more
        tl.store(Out + row * num_experts + chosen, grad, mask=used)


def _of_a_thread(columns: int) -> int:
    """Neighbours in a row that a thread has where groups limit the choice: 16, until a row has a warp of its own, whose maximum
    is one instruction."""
    return 16 if columns <= 128 else columns // 32


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
    columns, groups = next_power_of_2(E // num_groups), next_power_of_2(num_groups)
    size = min(_of_a_thread(groups * columns), columns) if limited else columns
    parts = groups * columns // size
    shape, is_padded = _shape_of_programs(parts * size), parts * size != E
    launch(
        _route_kernel, logits.device, (ceil_div(T, shape["ROWS"]),),
        logits, correction_bias, weights, ids, *logits.stride(), T, E, num_groups,
        GROUPS=groups, PARTS=parts, SIZE=size, TOP_K=top_k, SLOTS=next_power_of_2(top_k),
        SCORE=score, NORMALIZE=normalize, SCALE=scaling_factor, HAS_CORRECTION=correction_bias is not None,
        TOP_GROUPS=top_groups if limited else 0, BEST_TWO=group_score == "best_two" and num_groups < E,
        NUMBERS=next_power_of_2(E), PADDED=is_padded,
        VECTORS=not is_padded and size % 4 == 0 and logits.stride(1) == 1, **shape,
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
