"""Group I: the same bits every time."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

from blocksparse_moe import Experts, MoEConfig, Router, RouterConfig, Topology, dMoE, expert_mlp, patch_huggingface
from tests.cases.helpers import Problem, distinct_ids, gradients, layer, low_precision
from tests.support import DEVICE, HAS_CUDA, each_backend_slowly


@pytest.mark.case("I1")
@each_backend_slowly
def test_layer_repeats_bit_for_bit(backend):
    """transformers 43360, torchtitan PR 1974: a combine by atomic adds makes greedy decoding differ between runs."""
    H, ffn, E, K, T = (2048, 768, 128, 8, 512) if HAS_CUDA else (32, 16, 16, 8, 12)
    repeats = 100 if HAS_CUDA else 20
    if backend == "triton" and not HAS_CUDA:
        E, K, T, repeats = 3, 2, 6, 2
    moe = layer(H, ffn, E, K, backend=backend, dtype=low_precision(backend))
    x = torch.randn(T, H, device=DEVICE, dtype=moe.router.weight.dtype, requires_grad=True)

    def run() -> list[torch.Tensor]:
        moe.zero_grad()
        x.grad = None
        y = moe(x)
        y.square().sum().backward()
        return [y.detach(), x.grad, *gradients(moe).values()]

    first = run()
    for _ in range(repeats - 1):
        assert all(map(torch.equal, first, run()))


@pytest.mark.case("I2")
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.gpu)])
@torch.no_grad()
def test_calls_in_a_row_are_equal(backend):
    """pytorch 186365: a grouped product in a loop returns different values. 200 calls on one stream, outputs kept."""
    H, ffn, E, K, T = (1024, 512, 32, 4, 256) if HAS_CUDA else (24, 16, 4, 2, 10)
    problem = Problem.draw(H, ffn, E, distinct_ids(T, E, K))
    inputs = problem.x, problem.topology, problem.up_proj, problem.down_proj, problem.weights
    outputs = [expert_mlp(*inputs, backend=backend) for _ in range(200)]
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.case("I4")
def test_rows_are_ordered_by_slot():
    """llama.cpp PR 26464: the place within an expert is taken from an atomic counter, so order and results vary."""
    ids = torch.randint(-1, 65, (4096, 8), device=DEVICE)
    first = Topology.from_ids(ids, 64)
    kept = int(first.num_rows)
    slots, experts = first.slots[:kept].long(), first.row_experts()[:kept]
    assert torch.equal(ids.reshape(-1)[slots], experts)
    assert ((experts * ids.numel() + slots).diff() > 0).all()
    for _ in range(49):
        again = Topology.from_ids(ids, 64)
        assert torch.equal(again.slots, first.slots) and torch.equal(again.rows, first.rows)


@pytest.mark.case("I3")
def test_no_setting_promises_what_kernels_ignore():
    """vLLM 57016: expert kernels ignore a flag for results that don't depend on the batch. Nothing here has such a name."""
    places = (dMoE, Experts, Router, MoEConfig, RouterConfig, patch_huggingface, expert_mlp)
    names = {name for place in places for name in inspect.signature(place).parameters}
    assert {"backend", "precision", "top_k", "activation"} <= names
    assert not [name for name in names if re.search("invarian|determin|reproduc", name)]
