"""Group L: activation checkpointing, in both modes, with routings that hang by a thread."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from blocksparse_moe import dMoE
from tests.cases.helpers import DTYPE, gradients, layer, low_precision
from tests.support import DEVICE, HAS_CUDA, each_backend_slowly

H, FFN, E, K, T = (1024, 512, 16, 4, 2048) if HAS_CUDA else (20, 12, 4, 2, 4)


def step(moe: dMoE, x: Tensor, autocast: torch.dtype | None, mode: bool | None) -> dict[str, Tensor]:
    """Output and gradients of one step; `mode` is use_reentrant, None for no checkpoint."""
    moe.zero_grad()
    x = x.detach().requires_grad_()

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        y, routing = moe(x, return_routing=True)
        return y, routing.load_balancing_loss

    with torch.autocast(DEVICE.type, autocast, enabled=autocast is not None):
        y, loss = forward(x) if mode is None else checkpoint(forward, x, use_reentrant=mode)
    (y.float().square().sum() + loss).backward()
    return {"y": y.detach(), "x": x.grad, **gradients(moe)}


@pytest.mark.case("L1", "L2")
@each_backend_slowly
@pytest.mark.parametrize(
    ("use_reentrant", "autocast"),
    [
        pytest.param(False, False, id="non-reentrant"),
        pytest.param(True, False, id="reentrant"),
        pytest.param(False, True, id="non-reentrant-autocast"),
    ],
)
def test_checkpointed_layer_with_near_ties(backend, use_reentrant, autocast):
    """NeMo Automodel PR 2635, torchtitan 1117: the router, run again in the backward, gives other counts."""
    low = low_precision(backend) if autocast else None
    dtype = torch.float32 if autocast else DTYPE
    moe = layer(H, FFN, E, K, backend=backend, dtype=dtype)
    with torch.no_grad():  # experts in pairs whose logits differ by a rounding, or not at all
        moe.router.weight[1::2] = moe.router.weight[::2]
        moe.router.weight[1] *= 1 + torch.finfo(dtype).eps
    x = torch.randn(T, H, device=DEVICE, dtype=dtype)
    plain = step(moe, x, low, None)
    for name, found in step(moe, x, low, use_reentrant).items():
        assert torch.equal(found, plain[name]), name


@pytest.mark.case("L2")
@each_backend_slowly
def test_saved_tensors_are_read_once(backend):
    """allenai/OLMo PR 639: a backward that reads its saved tensors twice fails under checkpointing, "unpacked twice"."""
    moe = layer(H, FFN, E, K, backend=backend)
    x = torch.randn(T, H, device=DEVICE, dtype=DTYPE, requires_grad=True)
    stored: list[Tensor] = []
    reads: Counter[int] = Counter()

    def pack(tensor: Tensor) -> int:
        stored.append(tensor.detach())
        return len(stored) - 1

    def unpack(index: int) -> Tensor:
        reads[index] += 1
        return stored[index]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = moe(x)
    y.sum().backward()
    assert set(reads.values()) == {1}


@pytest.mark.case("L2")
@each_backend_slowly
def test_nested_checkpoints(backend):
    """allenai/OLMo PR 639: a checkpoint within a checkpoint, each recomputing the layer."""
    first, second = (layer(H, FFN, E, K, backend=backend) for _ in range(2))
    x = torch.randn(T, H, device=DEVICE, dtype=DTYPE)

    def outer(x: Tensor, inner) -> Tensor:
        return inner(second, inner(first, x))

    def gradient(inner, wrap) -> Tensor:
        leaf = x.clone().requires_grad_()
        wrap(leaf, inner).square().sum().backward()
        return leaf.grad

    plain = gradient(lambda module, x: module(x), outer)
    found = gradient(
        lambda module, x: checkpoint(module, x, use_reentrant=False),
        lambda x, inner: checkpoint(outer, x, inner, use_reentrant=False),
    )
    assert torch.equal(found, plain)
