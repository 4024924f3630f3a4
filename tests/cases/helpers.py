"""What the tests of public fault reports share: a dense reference that knows no topology, and memory that shows misuse."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blocksparse_moe import MoEConfig, RouterConfig, Topology, dMoE, expert_mlp
from blocksparse_moe_kernels import get_activation
from tests.support import DEVICE, HAS_CUDA

DTYPE = torch.bfloat16 if HAS_CUDA else torch.float32
on_cpu = pytest.mark.skipif(HAS_CUDA, reason="a stand-in for machines without a GPU; the real size runs on this one")


def low_precision(backend: str) -> torch.dtype:
    """bf16; fp16 in Triton's interpreter, which truncates casts to bf16."""
    return torch.float16 if backend == "triton" and not HAS_CUDA else torch.bfloat16


# -------------------------------------------------------------------- the dense reference


def dense_moe(x: Tensor, expert_ids: Tensor, up_proj: Tensor, down_proj: Tensor, weights: Tensor, activation: str) -> Tensor:
    """y[t] = sum over k of weights[t, k] * MLP of expert_ids[t, k] at x[t], expert by expert, in the dtype of x."""
    y = x.new_zeros(x.shape[0], down_proj.shape[1])
    for expert in range(up_proj.shape[0]):
        tokens, choice = (expert_ids == expert).nonzero(as_tuple=True)
        hidden = get_activation(activation)(F.linear(x[tokens], up_proj[expert]))
        y = y.index_add(0, tokens, weights[tokens, choice, None] * F.linear(hidden, down_proj[expert]))
    return y


class Result(NamedTuple):
    """Output of the expert MLP and the gradients of its inputs."""

    y: Tensor
    x: Tensor
    up_proj: Tensor
    down_proj: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Problem:
    """Inputs of the expert MLP and the gradient that reaches its output.

    Attributes:
        x: [T, H]; expert_ids: [T, K]; weights: [T, K].
        up_proj: [E, 2F, H] (or [E, F, H]); down_proj: [E, H, F].
        grad: [T, H].
    """

    x: Tensor
    expert_ids: Tensor
    weights: Tensor
    up_proj: Tensor
    down_proj: Tensor
    grad: Tensor
    activation: str = "swiglu"

    @classmethod
    def draw(
        cls,
        hidden_size: int,
        ffn_hidden_size: int,
        num_experts: int,
        expert_ids: Tensor,
        *,
        dtype: torch.dtype = DTYPE,
        activation: str = "swiglu",
    ) -> Problem:
        """Random inputs for expert_ids [T, K], scaled so that activations have size one."""
        T, H, N = expert_ids.shape[0], hidden_size, ffn_hidden_size * get_activation(activation).halves

        def randn(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, device=DEVICE, dtype=dtype) * scale

        return cls(
            randn(T, H),
            expert_ids.to(DEVICE),
            randn(*expert_ids.shape),
            randn(num_experts, N, H, scale=H**-0.5),
            randn(num_experts, H, ffn_hidden_size, scale=ffn_hidden_size**-0.5),
            randn(T, H),
            activation,
        )

    @property
    def num_experts(self) -> int:
        return self.up_proj.shape[0]

    @property
    def topology(self) -> Topology:
        return Topology.from_ids(self.expert_ids, self.num_experts)

    def _leaves(self, dtype: torch.dtype | None) -> list[Tensor]:
        inputs = (self.x, self.up_proj, self.down_proj, self.weights)
        return [tensor.detach().to(dtype or tensor.dtype).requires_grad_() for tensor in inputs]

    def ours(self, backend: str) -> Result:
        x, up_proj, down_proj, weights = leaves = self._leaves(None)
        y = expert_mlp(x, self.topology, up_proj, down_proj, weights, activation=self.activation, backend=backend)
        return Result(y.detach(), *torch.autograd.grad(y, leaves, self.grad))

    def dense(self, dtype: torch.dtype | None = None, *, chunk: int | None = None) -> Result:
        """By `dense_moe`, `chunk` tokens at a time; in the dtype of the inputs unless given."""
        outputs, leaves = [], self._leaves(dtype)
        x, up_proj, down_proj, weights = leaves
        for first in range(0, max(1, x.shape[0]), chunk or max(1, x.shape[0])):
            part = slice(first, None if chunk is None else first + chunk)
            y = dense_moe(x[part], self.expert_ids[part], up_proj, down_proj, weights[part], self.activation)
            y.backward(self.grad[part].to(y.dtype))
            outputs.append(y.detach())
        return Result(torch.cat(outputs), *(leaf.grad for leaf in leaves))

    def check(self, backend: str) -> Result:
        """Our result, after its values and gradients were found within the error budget."""
        ours = self.ours(backend)
        assert_results_agree(ours, self.dense(torch.float64), self.dense())
        return ours


def assert_results_agree(ours: Result, oracle: Result, torchs: Result) -> None:
    for name, *values in zip(Result._fields, ours, oracle, torchs, strict=True):
        assert_close(name, *values, ours.y.dtype)


def assert_close(name: str, ours: Tensor, oracle: Tensor, torchs: Tensor, dtype: torch.dtype) -> None:
    """Our error is at most four times (torch's own in the same dtype + one rounding), in the maximum norm.

    The tests of the ops allow two; a case draws once, and from a handful of numbers, where the faults it looks for are gross.
    """
    assert ours.shape == oracle.shape, f"{name}: shape {tuple(ours.shape)}, expected {tuple(oracle.shape)}"
    if oracle.numel():
        rounding = torch.finfo(dtype).eps * oracle.abs().max()
        if dtype == torch.float64:  # the oracle is rounded as well, once for every term of a sum
            rounding *= 64
        budget = 4 * ((torchs.double() - oracle).abs().max() + rounding) + torch.finfo(dtype).tiny
        error = (ours.double() - oracle).abs().max()
        assert error <= budget, f"{name}: error {error:.3e} exceeds the budget {budget:.3e}"


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest entry of `expected`."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).abs().max() / expected.abs().max())


# -------------------------------------------------------------------- routings and layers


def ids_from_counts(counts: Sequence[int]) -> Tensor:
    """expert_ids [sum of counts, 1] in random order that give expert e counts[e] rows."""
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return ids[torch.randperm(ids.numel())][:, None]


def distinct_ids(num_tokens: int, num_experts: int, top_k: int) -> Tensor:
    """expert_ids [T, K], no expert twice in a row."""
    return torch.rand(num_tokens, num_experts).argsort(dim=1)[:, :top_k]


def skewed_ids(num_tokens: int, num_experts: int, top_k: int) -> Tensor:
    """expert_ids [T, K] on DEVICE: nine slots of ten choose expert 0, the others any."""
    shape = (num_tokens, top_k)
    others = torch.randint(num_experts, shape, device=DEVICE)
    return torch.where(torch.rand(shape, device=DEVICE) < 0.9, 0, others)


def layer(
    hidden_size: int,
    ffn_hidden_size: int,
    num_experts: int,
    top_k: int,
    *,
    normalize: bool = True,
    backend: str = "auto",
    dtype: torch.dtype = DTYPE,
    bias: bool = False,
) -> dMoE:
    """A layer on DEVICE whose activations have size one."""
    router = RouterConfig(top_k=top_k, normalize=normalize)
    config = MoEConfig(hidden_size, ffn_hidden_size, num_experts, bias=bias, router=router, init_std=hidden_size**-0.5)
    return dMoE(config, device=DEVICE, dtype=dtype, backend=backend)


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients of a module's parameters, which must all have one."""
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


# -------------------------------------------------------------------- memory


def guarded(tensor: Tensor, margin: int = 8) -> Tensor:
    """The same values as a view into NaN: before, behind and between the rows."""
    storage = tensor.new_full([size + 2 * margin for size in tensor.shape], torch.nan)
    return storage[tuple(slice(margin, margin + size) for size in tensor.shape)].copy_(tensor)


@dataclass
class FreshMemory:
    """What memory holds that nobody has written yet: `value`, with guards around it that must keep it.

    Replaces the functions by which torch hands out unwritten memory; made by the fixture `fresh_memory`.
    """

    monkeypatch: pytest.MonkeyPatch
    value: float = torch.nan
    guard: int = 64
    buffers: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (Tensor, "new_empty"),
            (Tensor, "new_empty_strided"),
        ):
            self.monkeypatch.setattr(owner, name, self._filled(getattr(owner, name)))

    def _filled(self, allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate_filled(*args, **kwargs) -> Tensor:
            plain = allocate(*args, **kwargs)
            if plain.numel() == 0 or plain.device.type == "meta" or not plain.dtype.is_floating_point:
                return plain
            buffer = torch.full((plain.numel() + 2 * self.guard,), self.value, dtype=plain.dtype, device=plain.device)
            self.buffers.append(buffer)
            return buffer.as_strided(plain.shape, plain.stride(), self.guard)

        return allocate_filled

    def check_guards(self) -> None:
        """Nothing was written before or behind any of the tensors."""
        assert self.buffers
        for buffer in self.buffers:
            guards = torch.cat((buffer[: self.guard], buffer[-self.guard :]))
            expected = torch.full_like(guards, self.value)
            torch.testing.assert_close(guards, expected, rtol=0, atol=0, equal_nan=True, msg="a kernel wrote past a tensor")


def dirty_allocator(*shapes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Leave NaN in the memory that the next tensors of these shapes will probably get."""
    buffers = [torch.full(shape, torch.nan, dtype=dtype, device=DEVICE) for shape in shapes]
    del buffers


def virtual(size: int, dtype: torch.dtype) -> Tensor:
    """`size` zeros on the CPU in pages that exist only once they are written, so more of them than there is memory."""
    no_reserve = 0x4000  # MAP_NORESERVE of Linux
    try:
        pages = mmap.mmap(-1, size * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    except OSError as error:
        pytest.skip(f"the system grants no {size * dtype.itemsize / 2**30:.0f} GiB of virtual memory: {error}")
    return torch.frombuffer(pages, dtype=dtype)


def far(tensor: Tensor, dim: int, span: int = 2**31) -> Tensor:
    """The same values with the last index of `dim` at least `span` elements behind the first.

    There is as much room on both sides, so that a wrapped offset reads zeros instead of ending the process.
    """
    stride = -(-span // (tensor.shape[dim] - 1))
    rest = tensor.movedim(dim, 0)[0].contiguous()
    strides = list(rest.stride())
    strides.insert(dim, stride)
    buffer = virtual(3 * span + stride + rest.numel(), tensor.dtype)
    return buffer.as_strided(tensor.shape, strides, span).copy_(tensor)


def free_memory() -> None:
    gc.collect()
    if HAS_CUDA:
        torch.cuda.empty_cache()
