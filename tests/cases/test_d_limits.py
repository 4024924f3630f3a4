"""Group D: numbers of experts and choices that tables and tiles must hold."""

from __future__ import annotations

import pytest
import torch

from tests.cases.helpers import Problem
from tests.support import HAS_CUDA

EXPERTS, CHOICES = (3, 6, 60, 160, 384), (3, 5, 6, 7, 10)
ODD_NUMBERS = [("torch", E, K) for E in EXPERTS for K in CHOICES]
if HAS_CUDA:
    ODD_NUMBERS += [("triton", E, K) for E in EXPERTS for K in CHOICES]
else:  # the interpreter compiles nothing and is slow: each number once
    slow = {"marks": pytest.mark.slow}
    ODD_NUMBERS += [("triton", 3, 5), ("triton", 6, 3), ("triton", 6, 10)]
    ODD_NUMBERS += [pytest.param("triton", *numbers, **slow) for numbers in ((60, 7), (160, 6), (384, 10))]


@pytest.mark.case("D4")
@pytest.mark.parametrize(("backend", "num_experts", "top_k"), ODD_NUMBERS)
def test_numbers_that_are_no_powers_of_two(backend, num_experts, top_k, fresh_memory):
    """vLLM PR 46406, zml PR 786, Megatron bc70535: kernels fail to compile, or padded lanes write, for odd K and E."""
    T, H, ffn = (100, 256, 128) if HAS_CUDA else (2, 10, 6)
    Problem.draw(H, ffn, num_experts, torch.randint(num_experts, (T, top_k))).check(backend)
    fresh_memory.check_guards()
