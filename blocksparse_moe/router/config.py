"""How tokens choose experts, and the choices of published models by name."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

from blocksparse_moe_kernels.launch import check_type

from ..checks import number, one_of, positive_integer

SCORES = ("softmax", "sigmoid", "sqrt_softplus")
GROUP_SCORES = ("max", "best_two")
DROPS = ("position", "probability")


@dataclass(frozen=True)
class RouterConfig:
    """How tokens choose experts. `RouterConfig.preset("deepseek_v3")` and the like are those of published models.

    A token's score of each expert is a function of its logits. Of the groups of experts, where there are several, the best
    stay; of their experts the K with the highest score plus correction bias are chosen. Their weights are their scores, without
    the bias, divided by their sum if `normalize` says so, times `scaling_factor`.

    Attributes:
        top_k: K, experts per token.
        normalize: divide the K chosen scores by their sum. With "softmax" this is the softmax over the K chosen logits, in
            whichever order a model computes the two (Mixtral, gpt-oss).
        score: "softmax" over all experts; "sigmoid" (DeepSeek-V3) or "sqrt_softplus", the root of softplus, of each alone.
        scaling_factor: of the weights.
        correction_bias: the router has a buffer `correction_bias` [E] that is added to the scores for the choice only:
            balancing without a loss, arXiv:2408.15664.
        num_groups: the experts lie in so many groups of neighbours, one group a node for example.
        top_groups: groups that a token may choose from.
        group_score: what groups are compared by, "max" (DeepSeek-V2) of their experts or the sum of the "best_two"
            (DeepSeek-V3).
        bias: the gate has a bias [E], a parameter (gpt-oss).
        top_p: a token goes to the fewest experts, K at most, whose probabilities add up to this; None: always to K.
        num_identity_experts: experts behind the E others that give back their token: zero computation, LongCat-Flash,
            arXiv:2509.01322.
        num_null_experts: experts behind those that give nil.
        capacity_factor: experts take at most ceil(capacity_factor * T * K / E) slots, for comparison with GShard and Switch;
            what exceeds it is dropped. None: no limit, nothing is dropped.
        drop: what goes last where there is a limit: by "position", or of least "probability".
        narrow_gate: multiply hidden states and weight in the narrower of their two dtypes, with sums and logits in fp32.
            Without it that is done where both have it, which loses nothing; otherwise both are widened to fp32.

    While training only, from torch's own random numbers:

    Attributes:
        jitter: eps of a factor drawn from [1 - eps, 1 + eps] for each element of the router's input. Switch Transformer,
            arXiv:2101.03961. To anneal it, set `router.jitter` from step to step; this is where it begins.
        noise: standard deviation of gaussian noise on the logits.
        learned_noise: gaussian noise on the logits of standard deviation softplus(x W_noise), W_noise a parameter
            `noise_weight` [E, H] of zeros at first. Shazeer et al., arXiv:1701.06538.
        token_dropout: probability that a token goes to no expert: its ids are -1, and the layer gives nil for it.
        expert_dropout: probability that an expert is closed to all tokens of the call; never so many that less than K are open.
    """

    top_k: int = 2
    normalize: bool = True
    score: str = "softmax"
    scaling_factor: float = 1.0
    correction_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "best_two"
    bias: bool = False
    top_p: float | None = None
    num_identity_experts: int = 0
    num_null_experts: int = 0
    capacity_factor: float | None = None
    drop: str = "position"
    narrow_gate: bool = False
    jitter: float = 0.0
    noise: float = 0.0
    learned_noise: bool = False
    token_dropout: float = 0.0
    expert_dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("top_k", "num_groups", "top_groups"):
            object.__setattr__(self, name, positive_integer("RouterConfig", name, getattr(self, name)))
        for name in ("normalize", "correction_bias", "bias", "narrow_gate", "learned_noise"):
            check_type("RouterConfig", name, getattr(self, name), bool, "Give True or False.")
        one_of("RouterConfig", "score", self.score, SCORES)
        one_of("RouterConfig", "group_score", self.group_score, GROUP_SCORES)
        number("RouterConfig", "scaling_factor", self.scaling_factor, above=0)
        number("RouterConfig", "noise", self.noise, at_least=0)
        one_of("RouterConfig", "drop", self.drop, DROPS)
        for name in ("num_identity_experts", "num_null_experts"):
            if getattr(self, name) != 0:
                object.__setattr__(self, name, positive_integer("RouterConfig", name, getattr(self, name)))
        if self.top_p is not None:
            number("RouterConfig", "top_p", self.top_p, above=0)
            if self.top_p > 1:
                raise ValueError(f"RouterConfig: top_p is a probability, at most 1; got {self.top_p}. None takes always K.")
        if self.capacity_factor is not None:
            number("RouterConfig", "capacity_factor", self.capacity_factor, above=0)
        for name in ("jitter", "token_dropout", "expert_dropout"):
            number("RouterConfig", name, getattr(self, name), at_least=0, below=1)
        if self.top_groups > self.num_groups:
            raise ValueError(
                f"RouterConfig: top_groups={self.top_groups} groups to choose from, but num_groups={self.num_groups}."
            )
        if self.expert_dropout and self.num_groups > 1:
            raise ValueError("RouterConfig: expert_dropout could close whole groups; use it with num_groups=1.")
        if self.top_k == 1 and self.normalize:
            warnings.warn(
                "RouterConfig: with top_k=1 and normalize=True every routing weight is 1, so the router gets no gradient "
                "from the task; use normalize=False.",
                stacklevel=3,
            )

    @classmethod
    def preset(cls, name: str, **changes: Any) -> RouterConfig:
        """The router of a published model, a key of `PRESETS`, with changes: `preset("qwen3_moe", top_k=4)`."""
        if name not in PRESETS:
            raise ValueError(f"RouterConfig.preset: {name!r} is not known; choose one of {', '.join(PRESETS)}.")
        return replace(PRESETS[name], **changes)

    @property
    def num_cheap_experts(self) -> int:
        """Experts that compute nothing."""
        return self.num_identity_experts + self.num_null_experts

    def check(self, owner: str, num_experts: int) -> None:
        """ValueError, in the name of `owner`, if so many experts cannot be chosen from in this way."""
        num_experts += self.num_cheap_experts
        if self.top_k > num_experts:
            raise ValueError(f"{owner}: top_k={self.top_k} experts per token, but there are only {num_experts} experts.")
        if num_experts % self.num_groups:
            raise ValueError(f"{owner}: {num_experts} experts do not make num_groups={self.num_groups} equal groups.")
        in_reach = num_experts // self.num_groups * self.top_groups
        if self.top_k > in_reach:
            raise ValueError(
                f"{owner}: top_k={self.top_k} experts per token, but top_groups={self.top_groups} of "
                f"num_groups={self.num_groups} groups hold only {in_reach}."
            )


_DEEPSEEK_V3 = RouterConfig(
    8, score="sigmoid", scaling_factor=2.5, correction_bias=True, num_groups=8, top_groups=4, group_score="best_two"
)
PRESETS = {
    "mixtral": RouterConfig(2),
    "switch": RouterConfig(1, normalize=False),
    "qwen2_moe": RouterConfig(4, normalize=False),
    "qwen3_moe": RouterConfig(8),
    "olmoe": RouterConfig(8, normalize=False),
    "deepseek_v2": RouterConfig(6, normalize=False, scaling_factor=16.0, num_groups=8, top_groups=3, group_score="max"),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": replace(_DEEPSEEK_V3, scaling_factor=2.827, num_groups=1, top_groups=1),
    "glm4_moe": replace(_DEEPSEEK_V3, num_groups=1, top_groups=1),
    "gpt_oss": RouterConfig(4, bias=True),
    "dbrx": RouterConfig(4),
    "granite": RouterConfig(8),
}
"""Routers of published models, with the numbers of one of each family: docs/routing.md says which."""
