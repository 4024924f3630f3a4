"""MXFP8 in Triton: numbers to codes and scales, codes and scales to numbers.

Hopper and newer convert to and from E4M3 by an instruction, as does Ada. Where there is none, in the interpreter too, the bits
are put together here; the results are the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..config import architecture_of
from .tiles import INTERPRETED

BLOCK = tl.constexpr(32)

NEUTRAL = tl.constexpr(127)
"""The scale of the factor one, which masked loads take."""


def has_instructions(device: torch.device) -> bool:
    """Whether the GPU converts to and from E4M3 by an instruction."""
    return not triton.knobs.runtime.interpret and architecture_of(device) >= 89


@triton.jit
def widened(x):
    """fp32 of fp16, bf16 or fp32. By bits of bf16, whose subnormals Triton's interpreter converts wrongly."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def block_scale(x, axis: tl.constexpr):
    """The scales of fp32 blocks that lie along an axis, as int32."""
    # Magnitudes compare as their bits do, and NaN is above all of them.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis).to(tl.float32, bitcast=True)
    bits = (largest * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    exponent = bits >> 23
    scale = exponent + ((bits & 0x7FFFFF) > tl.where(exponent == 0, 1 << 22, 0)).to(tl.int32)
    return tl.where(largest != largest, 255, tl.minimum(scale, 254))


@triton.jit
def inverse_factor(scale):
    """2^(127 - scale) in fp32."""
    bits = tl.where(scale < 254, (254 - scale) << 23, tl.where(scale == 254, 1 << 22, 1 << 21))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def block_factor(scale, dtype: tl.constexpr):
    """2^(scale - 127) in fp32 or bf16; NaN of 255."""
    bits = scale.to(tl.int32)
    bits = tl.where(bits == 255, 0x7FC0, tl.maximum(bits << 7, 1 << 6))
    if dtype == tl.bfloat16:
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def encode(x, HARDWARE: tl.constexpr):
    """fp32 -> E4M3 as bytes, rounded to the nearest, ties to even, and saturated."""
    if HARDWARE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        is_nan = magnitude > 0x7F800000
        magnitude = tl.minimum(magnitude, 0x43E00000)  # 448
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 codes are multiples of 2^-9, which is what the last bit of a number from 2^14 on is worth.
        shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
        subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(magnitude < 0x3C800000, subnormal, normal)
        code = tl.where(is_nan, 0x7F, code | ((bits >> 24) & 0x80))
        return code.to(tl.uint8)


@triton.jit
def decode(codes, dtype: tl.constexpr, HARDWARE: tl.constexpr):
    """E4M3 as bytes -> fp32 or bf16, exactly."""
    if HARDWARE:
        # By way of fp32: fp16 to bf16 is one of the slowest instructions that there are.
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32).to(dtype)
    else:
        bits = codes.to(tl.int32)
        is_nan = (bits & 0x7F) == 0x7F
        bits = ((bits & 0x7F) << 20) | ((bits & 0x80) << 24)
        number = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120: the exponents differ by that
        return tl.where(is_nan, float("nan"), number).to(dtype)


@triton.jit
def dequantized(codes, scales, dtype: tl.constexpr, HARDWARE: tl.constexpr):
    """codes [R, K] and scales [R, K / 32] -> [R, K] in fp32 or bf16, which hold every number but the very smallest."""
    ROWS: tl.constexpr = codes.shape[0]
    BLOCKS: tl.constexpr = scales.shape[1]
    factor = block_factor(scales, dtype)
    factor = tl.broadcast_to(factor[:, :, None], (ROWS, BLOCKS, BLOCK))
    return decode(codes, dtype, HARDWARE) * tl.reshape(factor, (ROWS, BLOCKS * BLOCK))


@triton.jit
def decode_words(words, dtype: tl.constexpr, HARDWARE: tl.constexpr):
    """int32 words of four codes, the first in the lowest byte -> the four numbers of each, in fp32 or bf16."""
    if HARDWARE and dtype == tl.bfloat16:
        # As `decode`, but two at a time: the compiler would take the bytes apart one by one.
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high, h0, h1, h2, h3;
            .reg .b32 pair0, pair1;
            .reg .f32 f0, f1, f2, f3;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 pair0, low;
            cvt.rn.f16x2.e4m3x2 pair1, high;
            mov.b32 {h0, h1}, pair0;
            mov.b32 {h2, h3}, pair1;
            cvt.f32.f16 f0, h0;
            cvt.f32.f16 f1, h1;
            cvt.f32.f16 f2, h2;
            cvt.f32.f16 f3, h3;
            cvt.rn.bf16x2.f32 pair0, f1, f0;
            cvt.rn.bf16x2.f32 pair1, f3, f2;
            mov.b32 {$0, $1}, pair0;
            mov.b32 {$2, $3}, pair1;
            }""",
            "=h,=h,=h,=h,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=1,
        )
    else:
        return (
            decode((words & 0xFF).to(tl.uint8), dtype, HARDWARE),
            decode(((words >> 8) & 0xFF).to(tl.uint8), dtype, HARDWARE),
            decode(((words >> 16) & 0xFF).to(tl.uint8), dtype, HARDWARE),
            decode(((words >> 24) & 0xFF).to(tl.uint8), dtype, HARDWARE),
        )


@triton.jit
def dequantized_words(words, scales, dtype: tl.constexpr, HARDWARE: tl.constexpr):
    """words [R, K / 4] of four codes, scales [R, K / 32] -> two of [R, K / 2]: the first two numbers of each word, the rest."""
    ROWS: tl.constexpr = words.shape[0]
    BLOCKS: tl.constexpr = scales.shape[1]
    HALF: tl.constexpr = BLOCKS * BLOCK // 2
    n0, n1, n2, n3 = decode_words(words, dtype, HARDWARE)
    factor = block_factor(scales, dtype)
    factor = tl.reshape(tl.broadcast_to(factor[:, :, None], (ROWS, BLOCKS, BLOCK // 2)), (ROWS, HALF))
    return tl.reshape(tl.join(n0, n1), (ROWS, HALF)) * factor, tl.reshape(tl.join(n2, n3), (ROWS, HALF)) * factor


@triton.jit
def dot_mxfp8(a, a_scales, b, b_scales, acc, HARDWARE: tl.constexpr):
    """acc + a @ b: codes [M, K] and [K, N], scales [M, K / 32] and [N, K / 32].

    Multiplied as they are by sm_120, and by sm_100 if M is at least 128; else widened to bf16 before, by the compiler or here.
    """
    if HARDWARE:
        return tl.dot_scaled(a, a_scales, "e4m3", b, b_scales, "e4m3", acc)
    else:
        wide: tl.constexpr = tl.float32 if INTERPRETED else tl.bfloat16
        a = dequantized(a, a_scales, wide, HARDWARE)
        b = dequantized(b.T, b_scales, wide, HARDWARE).T
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def dot_words(words, scales, x, acc, HARDWARE: tl.constexpr):
    """acc + a @ x: a [M, K] in words of four codes [M, K / 4] and scales [M, K / 32]; x [K, N] in high precision.

    Words are taken apart in registers two codes at a time. A sum does not mind its order: of each four along K, the first two
    are multiplied in one product, and the others in another. K must be 64 or more: of fewer numbers, where a product has no
    64 rows, Triton 3.6 multiplies some twice.
    """
    wide: tl.constexpr = tl.float32 if INTERPRETED else x.dtype
    N: tl.constexpr = x.shape[1]
    HALF: tl.constexpr = x.shape[0] // 2
    tl.static_assert(HALF >= 32)
    a_first, a_second = dequantized_words(words, scales, wide, HARDWARE)
    first, second = tl.split(tl.permute(tl.reshape(x.T.to(wide), (N, HALF // 2, 2, 2)), (0, 1, 3, 2)))
    acc = tl.dot(a_first, tl.reshape(first, (N, HALF)).T, acc, input_precision="ieee")
    return tl.dot(a_second, tl.reshape(second, (N, HALF)).T, acc, input_precision="ieee")
