"""A stand-in for Transformer Engine, for machines that have none: its answers, and its modules in a few lines of torch.

tests/test_te_engine.py holds the answers against those of the real one where it is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocksparse_moe import products
from blocksparse_moe.backends import te as te_backend
from blocksparse_moe.backends.te.engine import Engine

HOPPER = Engine(
    version="2.20.2",
    capability=(9, 0),
    available={
        "fp8": None,
        "fp8_block": None,
        "mxfp8": "Device compute capability 10.0 or higher required for MXFP8 execution.",
        "nvfp4": "Device compute capability 10.0 or higher required for NVFP4 execution.",
    },
    cublaslt=130100,
    fused_variable=None,
    cudnn_frontend=None,
    fused_obstacle="not registered",
)

BLACKWELL = Engine(
    version="2.20.2",
    capability=(10, 0),
    available={"fp8": None, "fp8_block": None, "mxfp8": None, "nvfp4": None},
    cublaslt=130500,
    fused_variable="1",
    cudnn_frontend="1.29.0",
    fused_obstacle=None,
)


def answer(monkeypatch: pytest.MonkeyPatch, engine: Engine | str) -> None:
    """The answers of a device, or why there are none, in place of Transformer Engine's."""
    major, minor = (9, 0) if isinstance(engine, str) else engine.capability
    monkeypatch.setattr(te_backend, "ask", lambda device: engine)
    monkeypatch.setattr(products, "_capability", lambda device: (major, minor))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))


class _Linear(torch.autograd.Function):
    """x W^T, whose weight gradient goes to `main_grad` if asked for, and nowhere if the weight wants none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, main_grad: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main_grad, ctx.overwrite = main_grad, getattr(weight, "overwrite_main_grad", False)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return grad @ weight, None, None
        grad_weight = grad.T @ x
        if ctx.main_grad is None:
            return grad @ weight, grad_weight, None
        ctx.main_grad.copy_(grad_weight if ctx.overwrite else ctx.main_grad + grad_weight)
        return grad @ weight, None, None


class GroupedLinear(nn.Module):
    """As `transformer_engine.pytorch.GroupedLinear`, which reads its weights by name in each call."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        params_dtype: torch.dtype,
        device: str,
        use_grouped_tensor: bool = True,
    ) -> None:
        super().__init__()
        assert not use_grouped_tensor, "splits on the host are for the path by streams"
        self.num_gemms, self.bias, self.fuse_wgrad_accumulation = num_gemms, bias, False
        for i in range(num_gemms):
            self.register_parameter(f"weight{i}", nn.Parameter(torch.empty(out_features, in_features, device=device)))
            if bias:
                self.register_parameter(f"bias{i}", nn.Parameter(torch.empty(out_features, device=device)))

    def forward(self, x: Tensor, m_splits: list[int]) -> Tensor:
        assert sum(m_splits) == x.shape[0] > 0 and not any(count % MODULE.alignment for count in m_splits)
        parts = []
        for i, rows in enumerate(x.split(m_splits)):
            weight = getattr(self, f"weight{i}")
            y = _Linear.apply(rows, weight, weight.main_grad if self.fuse_wgrad_accumulation else None)
            parts.append(y + getattr(self, f"bias{i}") if self.bias else y)
        return torch.cat(parts)


@contextmanager
def _autocast(enabled: bool, recipe: object) -> Iterator[None]:
    assert enabled == (recipe is not None)
    MODULE.alignment = 16 if enabled else 1
    yield


MODULE = SimpleNamespace(GroupedLinear=GroupedLinear, autocast=_autocast, alignment=1)
"""In place of `transformer_engine.pytorch`."""
