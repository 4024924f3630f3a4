"""MXFP8 numbers: codes and scales bit for bit as the definition has them, in torch and in Triton."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocksparse_moe.products import mxfp8_launchers
from blocksparse_moe_kernels import Topology, reference
from blocksparse_moe_kernels.mxfp8 import BLOCK, MXFP8, block_offsets, quantize

from .support import DEVICE, HAS_CUDA, LAYOUTS, each_backend, each_backend_slowly, layouts, randn, routings

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SMALLEST = 2.0**-149
SPECIAL = [
    0.0, -0.0, SMALLEST, 2.0**-127, 2.0**-126, 448.0, math.nextafter(448.0, 500), 449.0, 464.0, 465.0, 480.0, 447.9, 1.0,
    1.0625, 1.1875, -240.0, 2.0**-6, 2.0**-9, 2.0**-10, 1.5 * 2.0**-10, 3.0e38, 448 * 2.0**-127, 448 * 2.0**-126,
    448 * 2.0**119, torch.inf, -torch.inf, torch.nan,
]  # fmt: skip
"""Zeros, subnormals of both formats, ties, the largest codes and what lies just above, and what is no number."""

fp32 = st.floats(width=32) | st.sampled_from(SPECIAL)


@st.composite
def blocks(draw) -> torch.Tensor:
    """[1, K] fp32: numbers of any kind, of one size with an outlier perhaps, or all equal."""
    size = draw(st.sampled_from([1, 31, 32, 33, 64, 70]))
    kind = draw(st.sampled_from(["any", "one size", "equal"]))
    if kind == "equal":
        return torch.full((1, size), draw(fp32))
    if kind == "any":
        few = draw(st.lists(fp32, min_size=1, max_size=8))
        return torch.tensor([[few[index % len(few)] for index in range(size)]])
    x = torch.randn(1, size) * 2.0 ** draw(st.integers(-140, 120))
    if draw(st.booleans()):
        x[0, draw(st.integers(0, size - 1))] = draw(fp32)
    return x


def assert_same(found: MXFP8, codes: torch.Tensor, scales: torch.Tensor) -> None:
    assert torch.equal(found.scales, scales)
    assert torch.equal(found.codes.view(torch.uint8), codes)


@each_backend
@given(x=blocks())
def test_bits_are_those_of_the_definition(backend, x):
    assert_same(mxfp8_launchers(backend).quantize(x.to(DEVICE)), *reference.mxfp8_quantize(x.to(DEVICE)))


@each_backend
@pytest.mark.parametrize("scale", [0, 1, 127, 246])
def test_every_code_and_every_tie(backend, scale):
    """All numbers of a block, what lies midway between two of them, and the neighbours of that."""
    numbers = torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    values = torch.cat([numbers, middles, middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(torch.inf))])
    values = torch.cat([values, -values, values.new_zeros(-2 * len(values) % (BLOCK - 1))]).view(-1, BLOCK - 1)
    x = torch.nn.functional.pad(values.double(), (0, 1), value=448.0).mul(2.0 ** (scale - 127)).float().to(DEVICE)
    found = mxfp8_launchers(backend).quantize(x)
    assert_same(found, *reference.mxfp8_quantize(x))
    assert (found.scales == scale).all()


@each_backend_slowly
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("axis", [-1, -2])
@given(data=st.data())
def test_shapes_and_layouts(backend, dtype, axis, data):
    shape = data.draw(st.sampled_from([(1, 1), (33, 40), (0, 7), (5, 0), (2, 3, 70), (3, 65, 2)]))
    x = LAYOUTS[data.draw(layouts)](randn(*shape).to(dtype))
    found = mxfp8_launchers(backend).quantize(x, axis)
    rows = x.movedim(axis, -1)
    if x.numel() == 0:
        assert found.codes.shape == x.shape and found.scales.numel() == 0
        return
    codes, scales = reference.mxfp8_quantize(rows.reshape(-1, rows.shape[-1]))
    codes, scales = codes.view(rows.shape), scales.view(*rows.shape[:-1], -1)
    assert_same(found, codes.movedim(-1, axis), scales.movedim(-1, axis))
    assert found.dtype == dtype and found.dequantize().dtype == dtype
    numbers = reference.mxfp8(rows.reshape(-1, rows.shape[-1])).view(rows.shape)
    assert torch.equal(found.dequantize(torch.float64), numbers.movedim(-1, axis))
    assert torch.equal(found.mT.dequantize(), found.dequantize().mT)


@each_backend_slowly
@given(data=st.data())
def test_blocks_of_rows_begin_with_each_expert(backend, data):
    routing = data.draw(routings(max_tokens=60, max_top_k=3))
    topology, order = routing.topology, data.draw(st.sampled_from(["tokens", "rows"]))
    width, kept = data.draw(st.sampled_from([1, 5, 130])), int(topology.num_rows)
    x = randn(topology.num_tokens if order == "tokens" else topology.num_slots, width).float()
    if order == "rows":
        x[kept:] = torch.nan
    found = mxfp8_launchers(backend).quantize_columns(x, topology, order=order)
    offsets, firsts = topology.offsets.tolist(), block_offsets(topology).tolist()
    for expert in range(topology.num_experts):
        rows = slice(offsets[expert], offsets[expert + 1])
        if rows.start == rows.stop:
            continue
        source = x[topology.tokens[rows].long()] if order == "tokens" else x[rows]
        codes, scales = reference.mxfp8_quantize(source.T)
        assert torch.equal(found.codes[rows].view(torch.uint8), codes.T)
        assert torch.equal(found.scales[firsts[expert] : firsts[expert + 1]], scales.T)
        assert torch.equal(found.dequantize(torch.float64)[rows], reference.mxfp8(source.T).T)
    assert not found.dequantize()[kept:].any(), "dropped rows are zero, whatever memory holds there"
    assert torch.equal(found.mT.dequantize(), found.dequantize().mT)


@given(x=blocks())
def test_rounding_is_bounded_and_changes_nothing_twice(x):
    once = quantize(x)
    again = quantize(once.dequantize(torch.float32))
    # Where fp32 is subnormal, and where the largest numbers are rounded up beyond it, it cannot hold what is quantised again.
    held = once.dequantize(torch.float32).isfinite().all() and (once.scales > 8).all()
    if not held:
        return
    assert torch.equal(once.dequantize(torch.float64), again.dequantize(torch.float64))
    error = (once.dequantize(torch.float64) - x.double()).abs()
    for block, numbers, scale in zip(error.split(BLOCK, 1), x.split(BLOCK, 1), once.scales[0].tolist(), strict=True):
        # Half a unit of the last of 4 bits; half of 2^-9 of the factor where numbers are subnormal.
        bound = numbers.double().abs() * 2.0**-4 + 2.0 ** (scale - 127 - 10)
        assert (block <= bound).all()
        assert numbers.abs().max() <= 448 * 2.0 ** (scale - 127), "nothing saturates"


@each_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_16_bits(backend, dtype):
    """In blocks of their own, and beside others of all sizes."""
    numbers = torch.arange(-(2**15), 2**15, device=DEVICE).to(torch.int16).view(dtype)
    for x in (numbers.view(-1, 32), numbers.view(32, -1).T):
        assert_same(mxfp8_launchers(backend).quantize(x), *reference.mxfp8_quantize(x.contiguous()))


@each_backend
def test_more_than_three_axes(backend):
    x = torch.randn(2, 3, 5, 40, device=DEVICE)
    for axis in (-1, -2):
        found, flat = mxfp8_launchers(backend).quantize(x, axis), mxfp8_launchers(backend).quantize(x.flatten(0, 1), axis)
        assert torch.equal(found.codes.view(torch.uint8).flatten(0, 1), flat.codes.view(torch.uint8))
        assert torch.equal(found.scales.flatten(0, 1), flat.scales)


def test_bytes():
    weight = quantize(torch.randn(4, 64, 96, dtype=torch.bfloat16))
    assert weight.nbytes == 33 / 32 * 4 * 64 * 96


@pytest.mark.skipif(not HAS_CUDA, reason="tests on a GPU what the interpreter has shown already")
def test_no_instruction_is_needed(monkeypatch):
    """Older GPUs put the bits together; here they do so on this one."""
    module = __import__("blocksparse_moe_kernels.triton.mxfp8_quantize", fromlist=["quantize"])
    x = torch.randn(64, 100, device=DEVICE) * torch.randn(64, 100, device=DEVICE).mul(20).exp2()
    by_instruction = module.quantize(x)
    monkeypatch.setattr(module, "has_instructions", lambda device: False)
    assert_same(module.quantize(x), by_instruction.codes.view(torch.uint8), by_instruction.scales)


@each_backend
def test_errors_say_what_to_do(backend):
    kernels, topology = mxfp8_launchers(backend), Topology.from_ids(torch.tensor([[0], [1]], device=DEVICE), 2)
    with pytest.raises(TypeError, match=r"Convert it, as by \.float\(\)"):
        kernels.quantize(torch.zeros(2, 2, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match=r"axis be -1 or -2; got \[2, 2\] and 0"):
        kernels.quantize(torch.zeros(2, 2, device=DEVICE), 0)
    with pytest.raises(ValueError, match=r'with order="tokens" x must be \[2, N\]; got \[3, 4\]'):
        kernels.quantize_columns(torch.zeros(3, 4, device=DEVICE), topology, order="tokens")
