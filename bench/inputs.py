"""Inputs of a benchmark: random data of size one, weights that keep it so, and routing that is even or skewed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from blocksparse_moe_kernels import BlockSparse, Columns, Topology
from blocksparse_moe_kernels.config import choose_block_m

from .shapes import Shape

HOTTEST = 8
"""Skewed routing: rows of the hottest expert over those of the mean one, at most."""


STEEPEST = 20.0
"""Exponent of the most skewed routing but that to the same K experts."""


@dataclass(frozen=True)
class Case:
    """What every variant of an op gets.

    Attributes:
        shape: the sizes.
        routing: how the tokens are spread, for people.
        x: [T, H].
        expert_ids: [T, K] int64, different experts for each token.
        routing_weights: [T, K] fp32, rows sum to 1.
        up_proj: [E, 2F, H]; down_proj: [E, H, F].
        grad: [T, H], gradient of the output.
    """

    shape: Shape
    routing: str
    x: Tensor
    expert_ids: Tensor
    routing_weights: Tensor
    up_proj: Tensor
    down_proj: Tensor
    grad: Tensor

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    def leaves(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, routing_weights, up_proj, down_proj as leaves of a graph of their own; without `dtype` they share memory."""
        tensors = (self.x, self.routing_weights, self.up_proj, self.down_proj)
        x, weights, up, down = (tensor.detach().to(dtype or tensor.dtype).requires_grad_() for tensor in tensors)
        return x, weights, up, down


def make_case(shape: Shape, skew: float, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Case:
    """Inputs for `shape`, the same for the same seed and device; the routing is the same on every device.

    Args:
        skew: exponent of the Zipf law by which experts are chosen; 0 spreads the tokens evenly, infinity sends all of them
            to the same experts.
    Raises:
        ValueError: see `check_routing`.
    """
    check_routing(shape, skew)
    host = torch.Generator().manual_seed(seed)
    expert_ids, routing = _routing(shape, skew, host)
    routing_weights = torch.rand(shape.T, shape.K, generator=host) + 0.1
    routing_weights /= routing_weights.sum(dim=1, keepdim=True)
    random = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, std: float = 1.0) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(std=std, generator=random)

    T, H, F, E = shape.T, shape.H, shape.F, shape.E
    return Case(
        shape=shape,
        routing=routing,
        x=normal(T, H),
        expert_ids=expert_ids.to(device),
        routing_weights=routing_weights.to(device),
        up_proj=normal(E, 2 * F, H, std=H**-0.5),
        down_proj=normal(E, H, F, std=F**-0.5),
        grad=normal(T, H),
    )


def check_routing(shape: Shape, skew: float) -> None:
    """ValueError for an exponent that is negative or too large, or a skewed shape with K = E (one expert stays empty)."""
    if skew in (0, math.inf):
        return
    if not 0 <= skew <= STEEPEST:
        raise ValueError(f"--skew: expected 0 to {STEEPEST:g}, or inf; got {skew:g}.")
    if shape.K >= shape.E:
        raise ValueError(
            f"--skew: skewed routing leaves one expert empty and needs K < E; {shape.name} has E={shape.E} and K={shape.K}. "
            "Balanced is --skew 0."
        )


def rows_of(case: Case) -> Topology:
    """The topology of a case with the schedule that the kernels choose, so that it isn't made inside the timing."""
    block_m = choose_block_m(case.shape.M, case.shape.E)
    return Topology.from_ids(case.expert_ids, case.shape.E, block_ms=(block_m,))


def random_dense(case: Case, *size: int) -> Tensor:
    return torch.randn(size, dtype=case.dtype, device=case.device)


def random_sparse(case: Case, width: int) -> BlockSparse:
    """[M, width], rows in expert order."""
    return BlockSparse(random_dense(case, case.shape.M, width), rows_of(case), Columns.equal(width, case.shape.E))


def make_router(case: Case) -> tuple[Tensor, Tensor]:
    """Hidden states [T, H] and a gate [E, H] whose K best experts, best first, are `case.expert_ids`.

    The rows of the gate are orthonormal, so that the logits of a token are its coordinates along them: K of the drawn ones,
    in (2, 3] and 1/K apart, which no rounding reorders; the others within [-1, 1].
    """
    T, H, E, K = case.shape.T, case.shape.H, case.shape.E, case.shape.K
    if E > H:
        raise ValueError(f"--shape: a gate that follows the drawn routing needs E <= H; got E={E}, H={H}.")
    random = torch.Generator().manual_seed(0)
    gate = torch.linalg.qr(torch.randn(H, E, generator=random)).Q.T.to(case.device)
    logits = (2 * torch.rand(T, E, generator=random) - 1).to(case.device)
    chosen = 3 - torch.arange(K, device=case.device) / K
    logits.scatter_(1, case.expert_ids, chosen.expand(T, K))
    x = case.x.float()
    x += (logits - x @ gate.T) @ gate
    return x.to(case.dtype), gate.to(case.dtype).contiguous()


def make_logits(case: Case) -> Tensor:
    """[T, E] fp32, of which the K largest of a token are those of `case.expert_ids`. Those of a token are as many numbers at
    equal distances, so that no rounding decides between two of them."""
    T, E = case.shape.T, case.shape.E
    order = torch.rand(T, E, generator=torch.Generator().manual_seed(0)).to(case.device)
    ranks = order.scatter_add(1, case.expert_ids, torch.ones_like(order[:, : case.shape.K])).argsort(dim=1).argsort(dim=1)
    return torch.linspace(-2, 2, E, device=case.device)[ranks]


def _routing(shape: Shape, skew: float, random: torch.Generator) -> tuple[Tensor, str]:
    """Expert ids [T, K], and the routing in words."""
    if skew == 0:
        return even_routing(shape, random), "balanced"
    if skew == math.inf:
        return torch.randperm(shape.E, generator=random)[: shape.K].repeat(shape.T, 1), f"{shape.K} of {shape.E}"
    return skewed_routing(shape, skew, random), f"zipf {skew:g}"


def even_routing(shape: Shape, random: torch.Generator) -> Tensor:
    """[T, K]: shuffled experts are dealt out, all of them before any a second time (as far as K divides E)."""
    tokens_a_deal = shape.E // shape.K
    deals = -(-shape.T // tokens_a_deal)
    shuffled = torch.rand(deals, shape.E, generator=random).argsort(dim=1)
    return shuffled[:, : tokens_a_deal * shape.K].reshape(-1, shape.K)[: shape.T]


def skewed_routing(shape: Shape, skew: float, random: torch.Generator) -> Tensor:
    """[T, K]: experts by a Zipf law, the hottest at most `HOTTEST` times the mean, one without a token.

    Systematic sampling (Madow, 1949): every token's experts lie on a line in an order of its own, each as long as its
    probability, and K points at distance 1 choose K different ones.
    """
    T, E, K = shape.T, shape.E, shape.K
    probabilities = torch.zeros(E, dtype=torch.float64)
    probabilities[torch.randperm(E, generator=random)[: E - 1]] = _capped_zipf(E - 1, skew, K, min(1.0, HOTTEST * K / E))
    order = torch.rand(T, E, generator=random).argsort(dim=1)
    ends = probabilities[order].cumsum(dim=1)
    points = torch.rand(T, 1, generator=random, dtype=torch.float64) + torch.arange(K)
    chosen = torch.searchsorted(ends, points * (ends[:, -1:] / K), right=True)
    return order.gather(1, chosen)


def _capped_zipf(count: int, skew: float, total: float, cap: float) -> Tensor:
    """rank ** -skew, scaled to sum to `total` with no entry above `cap`."""
    law = torch.arange(1, count + 1, dtype=torch.float64) ** -skew
    low, high = 0.0, cap / law[-1].item()
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (law * middle).clamp(max=cap).sum() < total else (low, middle)
    return (law * high).clamp(max=cap)
