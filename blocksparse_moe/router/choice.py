"""From logits to experts and weights.

Weights are normalised through logarithms: exp(a_i) / sum exp(a_k) is the softmax of the a, which neither divides nil by nil
where every chosen score underflows, nor needs an epsilon that shrinks small weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..custom_ops.route import MAX_EXPERTS, route
from ..products import choose
from .config import RouterConfig


def choose_experts(
    logits: Tensor, correction_bias: Tensor | None, config: RouterConfig, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """(weights [T, K] fp32, expert ids [T, K] int64) in falling order of score plus bias; of equal ones the lowest id first.

    Args:
        logits: [T, E] fp32. The ids of a row that is not finite are distinct and inside [0, E) as well.
        correction_bias: [E] fp32, or None.
        backend: "triton" makes it one kernel for up to `MAX_EXPERTS`, "torch" a dozen operators; "auto" chooses by device.
    """
    if backend == "triton" and logits.shape[1] > MAX_EXPERTS:
        raise NotImplementedError(
            f"backend 'triton' chooses among at most {MAX_EXPERTS} experts; got {logits.shape[1]}. Use 'auto' or 'torch'."
        )
    if choose(backend, logits.device, logits.dtype)[0] == "triton" and logits.shape[1] <= MAX_EXPERTS:
        groups = (config.num_groups, config.top_groups, config.group_score)
        weigh = (config.normalize, config.score, config.scaling_factor)
        return route(logits, correction_bias, config.top_k, *weigh, *groups)
    expert_ids = _best(logits, correction_bias, config)
    if config.normalize:
        weights = log_scores(logits, config.score).gather(1, expert_ids).softmax(dim=-1)
    else:
        weights = scores(logits, config.score).gather(1, expert_ids)
    return weights if config.scaling_factor == 1 else weights * config.scaling_factor, expert_ids


def scores(logits: Tensor, score: str) -> Tensor:
    """[T, E]: what `RouterConfig.score` makes of the logits."""
    if score == "softmax":
        return logits.softmax(dim=-1)
    return logits.sigmoid() if score == "sigmoid" else log_scores(logits, score).exp()


def log_scores(logits: Tensor, score: str) -> Tensor:
    """Logarithms of the scores, but for a number that all experts of a token share; finite where the scores underflow."""
    if score == "softmax":
        return logits
    if score == "sigmoid":
        return F.logsigmoid(logits)
    small = logits < -15  # there softplus is exp, to all digits of fp32
    return torch.where(small, logits, F.softplus(logits.masked_fill(small, 0)).log()) / 2


@torch.no_grad()
def _best(logits: Tensor, correction_bias: Tensor | None, config: RouterConfig) -> Tensor:
    """[T, K] int64, the experts that are chosen."""
    # Every score grows with its logit, and logits tell apart what scores round to one number.
    limited = config.top_groups < config.num_groups
    by_two = config.group_score == "best_two" and config.num_groups < logits.shape[1]
    needs_scores = correction_bias is not None or (limited and by_two)
    values = _equal_where_logits_are(logits, config.score) if needs_scores else logits
    if correction_bias is not None:
        values = values + correction_bias
    if limited:
        values = _of_best_groups(values, config)
    return _largest(values, config.top_k)


def _equal_where_logits_are(logits: Tensor, score: str) -> Tensor:
    """`scores`, the same wherever the logits are: on a CPU torch computes the last elements of a part in another way, which
    differs by a rounding."""
    return scores(logits.double(), score).to(logits.dtype) if logits.device.type == "cpu" else scores(logits, score)


def _largest(values: Tensor, count: int) -> Tensor:
    """[T, count] int64: columns of the largest values of each row, falling, of equal ones the lowest column first.

    A stable sort of whole rows would say so as well, in twice the memory of the values.
    """
    values = values.nan_to_num(torch.inf, torch.inf, -torch.inf)  # first, so that the others are the best of the rest
    least = values.topk(count, dim=-1).values[:, -1:]  # columns beside equal ones are any of them
    above, level = values > least, values == least
    room = count - above.sum(dim=-1, keepdim=True)
    wanted = above | (level & (level.cumsum(dim=-1, dtype=torch.int16) <= room))
    columns = wanted.to(torch.int8).topk(count, dim=-1).indices.sort(dim=-1).values
    falling = values.gather(1, columns).sort(dim=-1, descending=True, stable=True).indices
    return columns.gather(1, falling)


def _of_best_groups(values: Tensor, config: RouterConfig) -> Tensor:
    """The values of experts in each token's best groups; -inf elsewhere, and what is -inf itself comes before that."""
    groups = values.unflatten(1, (config.num_groups, -1))
    best = 1 if config.group_score == "max" else min(2, groups.shape[2])
    group_values = groups.topk(best, dim=-1).values.sum(dim=-1)
    best_groups = _largest(group_values, config.top_groups)
    dropped = torch.ones_like(group_values, dtype=torch.bool).scatter_(1, best_groups, False)
    return groups.clamp(min=torch.finfo(groups.dtype).min).masked_fill(dropped[..., None], -torch.inf).flatten(1)
