"""Adapters of other implementations, as far as they run without a GPU: what they are given, and what they give back."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from bench import ops, peers
from bench.check import disagreement
from bench.inputs import Case, make_case, random_sparse, rows_of
from bench.layers import expected_layer
from bench.lineup import Choice, stage_of
from bench.peers import PRODUCT_PEERS, megablocks, peer_names, triton_kernels
from bench.shapes import Shape
from bench.variants import Layer, Variant
from blocksparse_moe_kernels import reference

from .support import DEVICE, HAS_CUDA


def case_of(T: int, H: int, F: int, E: int, K: int) -> Case:
    return make_case(Shape("", T, H, F, E, K), 1.2, dtype=torch.float16 if HAS_CUDA else torch.float32, device=DEVICE)


@pytest.fixture
def case() -> Case:
    return case_of(24, 16, 20, 6, 2)


@pytest.mark.parametrize("E", [4, pytest.param(140, marks=pytest.mark.slow)])
def test_stk_multiplies_what_ours_multiply(E):
    """With 140 experts there are more than 255 columns of blocks, whose addresses do not fit into 16 bits."""
    pytest.importorskip("stk")
    from bench.peers import stk

    case = case_of(12, 128, 128, E, 2)
    rows, s, down = rows_of(case), random_sparse(case, 128), case.down_proj.transpose(1, 2)
    for variant, expected in (
        (stk.sdd(case.x, case.up_proj, rows), reference.sdd(case.x.double(), case.up_proj.double(), rows).values),
        (stk.dsd(s, down), reference.dsd(replace(s, values=s.values.double()), down.double())),
    ):
        assert isinstance(variant, Variant) and variant.kind == "peer"
        assert disagreement(variant.comparable(variant.run()), (expected,), case.dtype) is None


def test_stk_needs_whole_blocks():
    assert "whole blocks of 128" in peers.stk.unsupported_sizes(case_of(4, 128, 64, 4, 2))
    assert peers.stk.unsupported_sizes(case_of(4, 128, 256, 4, 2)) is None


@pytest.mark.parametrize("op", PRODUCT_PEERS)
def test_a_peer_of_a_product_runs_or_says_why_not(op, case, monkeypatch):
    (task,) = ops.OPS[op](case, Choice(backends=("torch",)))
    assert set(task.left_out) == set(PRODUCT_PEERS[op]) <= set(peer_names()), "sizes that are not whole blocks"
    (task,) = ops.OPS[op](case, Choice(backends=("torch",), peers=()))
    assert task.left_out == {}
    planted = peers.Peer(lambda case: None, lambda *operands: Variant("planted", "peer", lambda: operands))
    monkeypatch.setitem(PRODUCT_PEERS[op], "planted", planted)
    (task,) = ops.OPS[op](case, Choice(backends=("torch",), peers=("planted",)))
    assert [variant.name for variant in task.variants] == ["blocksparse torch", "planted", "dense matmul"]


def test_a_peer_without_gradients_is_measured_in_inference(case, monkeypatch):
    def build(case: Case) -> Layer:
        return replace(ops._our_layer(case, "torch"), name="planted", kind="peer", inference_only=True)

    monkeypatch.setitem(peers.PEERS, "planted", peers.Peer(lambda case: None, build))
    choice = Choice(backends=(), peers=("planted",))
    tasks = ops.expert_mlp(case, choice)
    assert [task.stage for task in tasks if any(variant.name == "planted" for variant in task.variants)] == ["inference"]
    assert tasks[0].left_out == {"planted, but in inference": "has no gradients"}
    (task,) = ops.expert_mlp(case, replace(choice, stages=("inference",)))
    assert task.left_out == {}


def test_the_sparse_megablocks_refuses_a_triton_of_ours(case, monkeypatch):
    monkeypatch.setattr(megablocks, "missing", lambda distribution, minimum: None)
    assert megablocks.why_not_sparse(case) == "refuses Triton 3.2 and newer"


def test_the_pypi_package_of_the_same_name_is_not_triton_kernels(case, monkeypatch):
    assert "from the sources of Triton" in triton_kernels.why_not(case)
    monkeypatch.setattr(triton_kernels, "missing", lambda distribution, minimum: None)
    monkeypatch.setattr(triton_kernels, "find_spec", lambda name: None)
    assert "triton_kernels.matmul" in triton_kernels.why_not(case)


@pytest.fixture
def plain_triton_kernels(monkeypatch):
    """Its functions in a few lines of torch, after its own descriptions of them."""

    def topk(x, k, apply_softmax, y_indx):
        assert not apply_softmax and y_indx.shape == (x.shape[0], k)
        flat = y_indx.long().flatten()
        counts = flat.bincount(minlength=x.shape[1]).int()
        return SimpleNamespace(mask_metadata=SimpleNamespace(col_sum=counts, col_sorted_indx=flat.argsort(stable=True).int()))

    def matmul(a, b, bias, a_ragged_metadata, gather_indx=None, scatter_indx=None, fused_activation=None):
        a = a if gather_indx is None else a[gather_indx]
        y = torch.cat([
            part @ b[expert] + (0 if bias is None else bias[expert])
            for expert, part in enumerate(a.split(a_ragged_metadata.tolist()))
        ])  # fmt: skip
        if fused_activation is not None:
            specs, (alpha, limit) = fused_activation
            gate, linear = y[:, ::2].clamp(max=limit), y[:, 1::2].clamp(-limit, limit)
            assert specs[0] == "swiglu"
            y = gate * torch.sigmoid(alpha * gate) * (linear + 1)
        return y if scatter_indx is None else torch.empty_like(y).index_copy(0, scatter_indx.long(), y)

    functions = {
        "matmul": {
            "matmul": matmul, "FnSpecs": lambda *specs, reduction_n: specs, "FusedActivation": lambda *both: both
        },
        "reduce": {"reduce": lambda x, dim, scale: ((x * scale).sum(dim), None)},
        "swiglu": {"swiglu_fn": None},
        "tensor": {"make_ragged_tensor_metadata": lambda sizes, total: sizes},
        "topk": {"topk": topk},
    }  # fmt: skip
    monkeypatch.setitem(sys.modules, "triton_kernels", ModuleType("triton_kernels"))
    for name, members in functions.items():
        module = ModuleType(f"triton_kernels.{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_triton_kernels_gets_the_layer_in_its_own_layout(plain_triton_kernels):
    case = make_case(Shape("", 24, 16, 20, 6, 2), 1.2, dtype=torch.float32, device=torch.device("cpu"))
    layer = triton_kernels.build(case)
    assert layer.inference_only
    variant = stage_of(layer, "inference", case.grad)
    assert disagreement(variant.run(), expected_layer(case, with_gradients=False), case.dtype) is None
