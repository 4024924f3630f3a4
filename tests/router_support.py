"""What the tests of routers share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from blocksparse_moe import Router, RouterConfig

from .support import DEVICE


def given_logits(logits: list[list[float]] | Tensor, top_k: int, normalize: bool) -> tuple[Router, Tensor]:
    """A router whose weight is the identity, and the input that are its logits."""
    x = torch.as_tensor(logits, dtype=torch.float32).to(DEVICE, copy=True).requires_grad_()
    router = Router(x.shape[1], x.shape[1], RouterConfig(top_k, normalize=normalize), device=DEVICE)
    with torch.no_grad():
        router.weight.copy_(torch.eye(x.shape[1]))
    return router, x


def assert_agrees(name: str, ours: Tensor, oracle: Tensor, torchs: Tensor, terms: float) -> None:
    """Our error is at most twice (torch's own error + one rounding of the result and of the `terms`, which may cancel)."""
    error, torch_error = ((value.double() - oracle).abs().max() for value in (ours, torchs))
    rounding = torch.finfo(ours.dtype).eps * oracle.abs().max() + torch.finfo(torch.float32).eps * terms
    assert error <= 2 * (torch_error + rounding), f"{name}: error {error:.3e}, torch's own {torch_error:.3e}"


SCORES = {"softmax": lambda z: z.softmax(dim=-1), "sigmoid": torch.sigmoid, "sqrt_softplus": lambda z: F.softplus(z).sqrt()}


@st.composite
def configs(draw, num_experts: int) -> RouterConfig:
    groups = draw(st.sampled_from([size for size in range(1, num_experts + 1) if num_experts % size == 0]))
    top_groups = draw(st.integers(1, groups))
    return RouterConfig(
        draw(st.integers(min(2, num_experts // groups * top_groups), num_experts // groups * top_groups)),
        normalize=draw(st.booleans()),
        score=draw(st.sampled_from(list(SCORES))),
        scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        correction_bias=draw(st.booleans()),
        num_groups=groups,
        top_groups=top_groups,
        group_score=draw(st.sampled_from(["max", "best_two"])),
        bias=draw(st.booleans()),
    )
