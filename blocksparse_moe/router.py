"""The router: scores every expert for every token and keeps the K best."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from numbers import Integral

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .autocast import without_autocast


def positive_integer(config: str, name: str, value: object) -> int:
    """`value` as an int of at least 1; TypeError or ValueError names the config and the argument."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{config}: {name} must be an integer; got {value!r} of type {type(value).__name__}.")
    if value < 1:
        raise ValueError(f"{config}: {name} must be at least 1; got {value}.")
    return int(value)


@dataclass(frozen=True)
class RouterConfig:
    """How tokens choose experts.

    Attributes:
        top_k: K, experts per token.
        normalize: divide the K chosen probabilities by their sum (Mixtral, Qwen3); False keeps the softmax over all experts
            as it is (OLMoE, Qwen2-MoE).
    """

    top_k: int = 2
    normalize: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "top_k", positive_integer("RouterConfig", "top_k", self.top_k))
        if self.top_k == 1 and self.normalize:
            warnings.warn(
                "RouterConfig: with top_k=1 and normalize=True every routing weight is 1, so the router gets no gradient "
                "from the task; use normalize=False.",
                stacklevel=3,
            )


@dataclass(frozen=True)
class RouterOutput:
    """What the router decided.

    Attributes:
        logits: [T, E] fp32, raw.
        weights: [T, K] fp32, in descending order of probability.
        expert_ids: [T, K] int64.

    The losses are computed when they are read, and nothing is kept anywhere.
    """

    logits: Tensor
    weights: Tensor
    expert_ids: Tensor

    @property
    def tokens_per_expert(self) -> Tensor:
        """[E] int64: slots that chose each expert."""
        ids = self.expert_ids.reshape(-1)
        return ids.new_zeros(self.logits.shape[-1]).scatter_add(0, ids, torch.ones_like(ids))

    @property
    def load_balancing_loss(self) -> Tensor:
        """E * sum_e f_e P_e, f_e the share of slots (a mean over K), P_e the mean probability: 1 at perfect balance, E at
        collapse, 0 for no tokens. Not scaled by any coefficient. Switch Transformer, arXiv:2101.03961."""
        slots = max(1, self.expert_ids.numel())
        share = self.tokens_per_expert.to(self.logits.dtype) / slots
        mean_probability = self.logits.softmax(dim=-1).sum(dim=0) / max(1, self.logits.shape[0])
        return self.logits.shape[-1] * torch.dot(share, mean_probability)

    @property
    def z_loss(self) -> Tensor:
        """mean over tokens of logsumexp(logits)^2, 0 for no tokens; not scaled. ST-MoE, arXiv:2202.08906."""
        return self.logits.logsumexp(dim=-1).square().sum() / max(1, self.logits.shape[0])


class Router(nn.Module):
    """Softmax over all experts, then the top K. Computed in fp32 whatever the dtype of input, weight or autocast.

    Args:
        hidden_size: H.
        num_experts: E.
        config: K and what happens to the weights.
    Shape:
        x [T, H] -> RouterOutput. Parameter `weight` [E, H].
    Raises:
        ValueError: x is not on the device of the weight; TypeError: x has no floating dtype.
    Oracle: reference.router.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        config: RouterConfig,
        *,
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if config.top_k > num_experts:
            raise ValueError(f"Router: top_k={config.top_k} experts per token, but there are only {num_experts} experts.")
        self.config = config
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.init_std)

    def forward(self, x: Tensor) -> RouterOutput:
        if not x.is_floating_point():
            raise TypeError(f"Router: hidden states must have a floating dtype; got {x.dtype}. Convert them, as by .float().")
        if x.device != self.weight.device:
            raise ValueError(
                f"Router: the hidden states are on {x.device} and the weight on {self.weight.device}; move one with .to()."
            )
        with without_autocast(x.device):
            logits = F.linear(x.float(), self.weight.float())
            weights, expert_ids = logits.softmax(dim=-1).topk(self.config.top_k, dim=-1)
            if self.config.normalize:
                weights = weights / weights.sum(dim=-1, keepdim=True)
        return RouterOutput(logits, weights, expert_ids)

    def extra_repr(self) -> str:
        num_experts, hidden_size = self.weight.shape
        return f"{hidden_size} -> top {self.config.top_k} of {num_experts}, normalize={self.config.normalize}"
