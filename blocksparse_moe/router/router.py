"""The router as a module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..autocast import without_autocast
from ..backends import check_name
from ..checks import number
from .assignment import weigh, within_capacity, within_top_p
from .choice import choose_experts
from .config import RouterConfig
from .gate import gate_logits
from .output import RouterOutput


class Router(nn.Module):
    """Scores every expert for every token and keeps the K best. In fp32 whatever the dtype of input, weight or autocast.

    Args:
        hidden_size: H.
        num_experts: E, without the identity and null experts of the config, whose ids and columns of logits come behind.
        config: scores, K, and what happens to the weights.
        backend: "triton" chooses the experts in one kernel, "torch" by its operators; "auto" by device.
    Shape:
        x [T, H] -> RouterOutput. With `expert_ids` [T, K], of any integer dtype, these are chosen, and weighed as if the router
        had; ids that are no expert's mean "not here". Parameters `weight` [E, H] and, with `config.bias`, `bias` [E], with
        `config.learned_noise`, `noise_weight` [E, H]; with `config.correction_bias` a buffer of that name, [E], which stays
        fp32 when the module is cast.
    Raises:
        ValueError: x is not [T, H], or not on the device of the weight; TypeError: x has no floating dtype.
    Oracle: reference.router.
    """

    bias: nn.Parameter | None
    noise_weight: nn.Parameter | None
    correction_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        config: RouterConfig,
        *,
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        config.check("Router", num_experts)
        self.config = config
        self.backend = check_name(backend)
        self.init_std = init_std
        self.num_experts = num_experts
        num_experts += config.num_cheap_experts
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", nn.Parameter(self.weight.new_empty(num_experts)) if config.bias else None)
        correction = torch.empty(num_experts, device=device, dtype=torch.float32) if config.correction_bias else None
        self.register_buffer("correction_bias", correction)
        noise_weight = nn.Parameter(torch.empty_like(self.weight)) if config.learned_noise else None
        self.register_parameter("noise_weight", noise_weight)
        # A tensor, so that compiled code sees it change and is not compiled anew; on the host, as it is set there.
        self._jitter = torch.tensor(config.jitter, dtype=torch.float32, device="cpu")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.init_std)
        for parameter in (self.bias, self.correction_bias, self.noise_weight):
            if parameter is not None:
                nn.init.zeros_(parameter)

    @property
    def jitter(self) -> float:
        """The eps of `RouterConfig.jitter` now; set it from step to step to anneal it."""
        return self._jitter.item()

    @jitter.setter
    def jitter(self, eps: float) -> None:
        number("Router", "jitter", eps, at_least=0, below=1)
        if eps and not self.config.jitter:
            raise ValueError(
                "Router: this router was made without jitter; give RouterConfig(jitter=...) the value to begin with."
            )
        self._jitter.fill_(eps)

    def forward(self, x: Tensor, *, expert_ids: Tensor | None = None) -> RouterOutput:
        if not x.is_floating_point():
            raise TypeError(f"Router: hidden states must have a floating dtype; got {x.dtype}. Convert them, as by .float().")
        if x.ndim != 2 or x.shape[1] != self.weight.shape[1]:
            raise ValueError(f"Router: hidden states must be [T, {self.weight.shape[1]}]; got {list(x.shape)}.")
        if x.device != self.weight.device:
            raise ValueError(
                f"Router: the hidden states are on {x.device} and the weight on {self.weight.device}; move one with .to()."
            )
        with without_autocast(x.device):
            if self.training and self.config.jitter:
                x = x * (1 + self._jitter * torch.empty_like(x, dtype=torch.float32).uniform_(-1, 1))
            logits = gate_logits(x, self.weight, self.bias, narrow=self.config.narrow_gate)
            clean_logits, noise_scale = logits, self._noise_scale(x) if self.training else None
            if noise_scale is not None:
                logits = logits + noise_scale * torch.randn_like(logits)
            if expert_ids is not None:
                expert_ids = self._given(expert_ids, x)
                weights = weigh(logits, expert_ids, self.config)
            else:
                correction = self.correction_bias
                if self.training and self.config.expert_dropout:
                    logits, correction = self._with_closed_experts(logits, correction)
                weights, expert_ids = self._chosen(logits, correction)
        if noise_scale is None:
            return RouterOutput(logits, weights, expert_ids, self.config.score)
        return RouterOutput(logits, weights, expert_ids, self.config.score, clean_logits, noise_scale)

    def _chosen(self, logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weights and ids of the router's own choice, without what is left out."""
        config = self.config
        weights, expert_ids = choose_experts(logits, correction, config, self.backend)
        if config.top_p is not None:
            weights, expert_ids = within_top_p(logits, weights, expert_ids, config)
        if self.training and config.token_dropout:
            bypasses = torch.rand(len(logits), 1, device=logits.device) < config.token_dropout
            weights, expert_ids = weights.masked_fill(bypasses, 0), expert_ids.masked_fill(bypasses, -1)
        if config.capacity_factor is not None:
            weights, expert_ids = within_capacity(weights, expert_ids, logits.shape[1], config)
        return weights, expert_ids

    def _given(self, expert_ids: Tensor, x: Tensor) -> Tensor:
        """Expert ids that were given, int64, with -1 for all that are no expert's."""
        wanted = f"Router: expert_ids must be integers [{len(x)}, K]"
        if not isinstance(expert_ids, Tensor):
            raise TypeError(f"{wanted}; got {type(expert_ids).__name__}. Make a tensor with torch.as_tensor.")
        dtype, shape = expert_ids.dtype, expert_ids.shape
        is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
        if not is_integer or len(shape) != 2 or shape[0] != len(x) or shape[1] == 0:
            raise ValueError(f"{wanted}; got {dtype} {list(shape)}.")
        ids = expert_ids.to(x.device, torch.int64)
        return ids.masked_fill((ids < 0) | (ids >= len(self.weight)), -1)

    def _noise_scale(self, x: Tensor) -> Tensor | None:
        """Standard deviation of the noise of training, [T, E] or []; None for none."""
        fixed = self.config.noise
        if self.noise_weight is None:
            return torch.full((), fixed, device=x.device) if fixed else None
        learned = F.softplus(gate_logits(x, self.noise_weight))
        return (learned.square() + fixed**2).sqrt() if fixed else learned

    def _with_closed_experts(self, logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """-inf for experts that are closed to all tokens, in both; K stay open."""
        draws = torch.rand(logits.shape[1], device=logits.device)
        closed = draws < draws.topk(self.config.top_k).values[-1].clamp(max=self.config.expert_dropout)
        logits = logits.masked_fill(closed, -torch.inf)
        return logits, None if correction is None else correction.masked_fill(closed, -torch.inf)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        """As `_apply`, where the tensors of a state dict are taken as they are (`assign=True`)."""
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if self.correction_bias is not None:
            self.correction_bias = self.correction_bias.float()

    def _apply(self, fn: Callable, recurse: bool = True) -> Router:
        """Moves the correction bias and leaves its dtype: steps of 1e-3 would be lost in bf16."""
        before = self.correction_bias
        super()._apply(fn, recurse)
        after = self.correction_bias
        if before is not None and after is not None and after.dtype != before.dtype:
            self.correction_bias = before.to(after.device)
        return self

    def extra_repr(self) -> str:
        hidden_size = self.weight.shape[1]
        changed = {field.name: getattr(self.config, field.name) for field in fields(RouterConfig)[2:]}
        rest = "".join(f", {name}={value!r}" for name, value in changed.items() if value != getattr(RouterConfig, name))
        return f"{hidden_size} -> top {self.config.top_k} of {self.num_experts}, normalize={self.config.normalize}{rest}"
