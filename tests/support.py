"""What the tests of the ops share: drawn routings, layouts, and the error budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from blocksparse_moe_kernels import Columns, Topology

HAS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")

# Triton's interpreter multiplies bf16 wrongly and truncates casts to it, so bf16 kernels are tested on a GPU.
CASES = [
    pytest.param(
        backend,
        dtype,
        id=f"{backend}-{str(dtype).removeprefix('torch.')}",
        marks=[pytest.mark.slow] if backend == "triton" and dtype == torch.float16 else [],
    )
    for backend, dtypes in {
        "torch": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
        "triton": (torch.float32, torch.float16, torch.bfloat16) if HAS_CUDA else (torch.float32, torch.float16),
    }.items()
    for dtype in dtypes
]
each_backend_and_dtype = pytest.mark.parametrize(("backend", "dtype"), CASES)
each_backend_and_dtype_slowly = pytest.mark.parametrize(
    ("backend", "dtype"),
    [pytest.param(*case.values, id=case.id, marks=[pytest.mark.slow] if case.values[0] == "triton" else []) for case in CASES],
)
each_backend = pytest.mark.parametrize("backend", ["torch", "triton"])
each_backend_slowly = pytest.mark.parametrize(
    "backend", ["torch", pytest.param("triton", marks=() if HAS_CUDA else pytest.mark.slow)]
)
"""The slow ones are the same, but `make check` leaves the interpreter out."""


@dataclass(frozen=True)
class Routing:
    """Expert ids [T, K], some of them perhaps outside [0, E)."""

    expert_ids: Tensor
    num_experts: int

    @property
    def topology(self) -> Topology:
        return Topology.from_ids(self.expert_ids, self.num_experts)

    def __repr__(self) -> str:
        return f"Routing({self.expert_ids.tolist()}, num_experts={self.num_experts})"


@st.composite
def routings(draw, max_tokens: int = 12, max_experts: int = 5, max_top_k: int = 3, dropped: bool = True) -> Routing:
    """M slots cut at random points with repetition, so that empty, single-row and one-takes-all experts come by themselves."""
    num_tokens, top_k = draw(st.integers(0, max_tokens)), draw(st.integers(1, max_top_k))
    num_experts = draw(st.integers(1, max_experts))
    num_slots = num_tokens * top_k
    cuts = sorted(draw(st.lists(st.integers(0, num_slots), min_size=num_experts - 1, max_size=num_experts - 1)))
    counts = torch.tensor([0, *cuts, num_slots]).diff()
    ids = torch.arange(num_experts).repeat_interleave(counts)
    ids = ids[torch.randperm(num_slots, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))]
    if dropped and num_slots:
        for slot in draw(st.lists(st.integers(0, num_slots - 1), max_size=3)):
            ids[slot] = draw(st.sampled_from([-1, -7, num_experts, num_experts + 100]))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return Routing(ids.view(num_tokens, top_k).to(DEVICE, dtype), num_experts)


LONGEST_SUM = 40
sizes = st.integers(1, LONGEST_SUM)


@st.composite
def column_choices(draw, num_experts: int, max_width: int = 24) -> Columns:
    """Columns that are equal in about half of the draws."""
    if draw(st.booleans()):
        return Columns.equal(draw(st.integers(1, max_width)), num_experts)
    widths = draw(st.lists(st.integers(1, max_width), min_size=num_experts, max_size=num_experts))
    return Columns.of(widths)


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2) if tensor.ndim > 1 else _sliced(tensor)


def _sliced(tensor: Tensor) -> Tensor:
    storage = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 3), torch.nan)
    view = storage[..., 1 : 2 * tensor.shape[-1] + 1 : 2]
    return view.copy_(tensor)


def _offset(tensor: Tensor) -> Tensor:
    storage = tensor.new_full((tensor.numel() + 1,), torch.nan)
    return storage[1:].view(tensor.shape).copy_(tensor)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "transposed": _transposed,
    "sliced": _sliced,
    "offset by one element": _offset,
}
layouts = st.sampled_from(sorted(LAYOUTS))


def randn(*shape: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Tensor:
    """Random numbers that `dtype` can hold exactly, as fp64, so that oracle and op see the same inputs."""
    return (torch.randn(shape, dtype=torch.float64) * scale).to(dtype).double().to(DEVICE)


def leaf(tensor: Tensor, dtype: torch.dtype, layout: str = "contiguous") -> Tensor:
    """A leaf of the dtype and layout, with the same values."""
    return LAYOUTS[layout](tensor.detach().to(dtype)).requires_grad_()


def assert_within_budget(
    name: str, ours: Tensor, oracle: Tensor, torchs: Tensor, computed_in: torch.dtype, terms: float = 1
) -> None:
    """Our error is at most twice (torch's own error in the same dtype + one rounding), all in the maximum norm.

    A rounding is of the size of the result, or of the terms that cancel in it: one, as inputs are, unless `terms` gives the
    root of their summed squares. To it come those of a sum in fp32, which wander like a random walk of as many steps; torch's
    own may be back at nil by chance, since results are small.
    `computed_in` is the dtype of the operands: the gradient of an fp32 routing weight beside fp16 operands is as exact as fp16.
    """
    assert ours.shape == oracle.shape, f"{name}: shape {tuple(ours.shape)}, expected {tuple(oracle.shape)}"
    if oracle.numel() == 0:
        return
    error = (ours.double() - oracle).abs().max()
    torch_error = (torchs.double() - oracle).abs().max()
    summed_in = torch.promote_types(computed_in, torch.float32)
    rounding = torch.finfo(computed_in).eps + torch.finfo(summed_in).eps * LONGEST_SUM**0.5
    if computed_in == torch.float64:  # the oracle is rounded as well
        rounding *= 8
    rounding *= max(float(oracle.detach().abs().max()), terms)
    budget = 2 * (torch_error + rounding) + torch.finfo(computed_in).tiny
    assert error <= budget, f"{name}: error {error:.3e} exceeds the budget {budget:.3e} (torch's own {torch_error:.3e})"
