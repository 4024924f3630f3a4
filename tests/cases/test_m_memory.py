"""Group M: memory that doesn't grow, losses without one-hot tensors, and no more rows than were routed."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blocksparse_moe import MoEConfig, RouterConfig, Topology, dMoE
from tests.cases.helpers import DTYPE, free_memory, layer
from tests.support import DEVICE, HAS_CUDA


class LargestResult(TorchDispatchMode):
    """The most bytes that a result of any operation has."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        sizes = [leaf.nbytes for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
        self.nbytes = max(self.nbytes, *sizes, 0)
        return results


def live_bytes() -> int:
    if HAS_CUDA:
        return torch.cuda.memory_allocated()
    storages = {}
    for found in gc.get_objects():
        if issubclass(type(found), Tensor):
            with contextlib.suppress(RuntimeError):  # what a trace of another test left behind has no memory
                storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.case("M1")
@pytest.mark.slow
def test_500_forwards_keep_nothing():
    """megablocks PR 119: balance losses are kept in a global list, which grows unless somebody clears it."""
    moe = layer(16, 12, 4, 2)
    x = torch.randn(8, 16, device=DEVICE, dtype=DTYPE)

    def forward(times: int) -> int:
        for _ in range(times):
            _, routing = moe(x, return_routing=True)
            routing.load_balancing_loss + routing.z_loss
        del _, routing
        free_memory()
        return live_bytes()

    assert forward(500) == forward(2)


@pytest.mark.case("M2")
def test_losses_make_nothing_larger_than_the_logits():
    """transformers PR 48131: a one-hot of layers x tokens x K x E takes 48 GiB at 131 072 tokens."""
    T, E, K = (131_072, 128, 8) if HAS_CUDA else (4096, 128, 8)
    router = layer(16, 8, E, K).router
    x = torch.randn(T, 16, device=DEVICE, dtype=DTYPE)
    with LargestResult() as largest:
        routing = router(x)
        (routing.load_balancing_loss + routing.z_loss).backward()
    assert largest.nbytes <= 4 * T * E, "logits in fp32"


@pytest.mark.case("M3")
def test_no_setting_asks_for_a_buffer():
    """megablocks PR 125: an absurd capacity setting asks for a terabyte. The one here drops slots and makes no room."""
    T, H, F, E, K = 32, 16, 8, 8, 2
    config = MoEConfig(H, F, E, router=RouterConfig(K, capacity_factor=1e12))
    moe = dMoE(config, device=DEVICE, dtype=DTYPE)
    with LargestResult() as largest:
        moe(torch.randn(T, H, device=DEVICE, dtype=DTYPE)).sum().backward()
    assert largest.nbytes <= 2**20, "rows, weights, scores, or scratch memory of a fixed size"
    for E in (1, 64, 4096):
        ids = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
        assert Topology.from_ids(ids, E).schedule(128).capacity == 1


@pytest.mark.case("M4")
def test_rows_are_stored_without_padding_and_listed():
    """megablocks 166: 48 experts, K=8, ffn 128 and 2048 tokens take more memory than the dense twin."""
    T, H, F, E, K, block_m = 2048, 256, 128, 48, 8, 128
    moe = layer(H, F, E, K)
    x = torch.randn(T, H, device=DEVICE, dtype=DTYPE, requires_grad=True)
    topology = Topology.from_ids(moe.router(x).expert_ids, E, block_ms=(block_m,))
    assert topology.schedule(block_m).capacity * block_m <= T * K + E * (block_m - 1)

    saved: dict[int, tuple[int, ...]] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tuple(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        moe.experts(x, topology, x.new_ones(T, K))
    large = sorted(shape for shape in saved.values() if len(shape) == 2 and shape[0] >= T and shape[1] >= F)
    assert large == [(T, H), (T * K, 2 * F)], "the input and the pre-activation, nothing else"
