"""Presets against the routers of transformers: experts, weights and gradients, by what its experts modules are called with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from blocksparse_moe import Router, RouterConfig
from blocksparse_moe.router import PRESETS

pytest.importorskip("transformers")

from . import hf_families as hf

E, T = 8, 64


@dataclass(frozen=True)
class Row:
    """The family whose router a preset is, fields of its config, and what of the preset they change."""

    family: str
    fields: dict[str, object]
    changes: dict[str, object]


GROUPS = dict(n_group=4, topk_group=2, num_experts_per_tok=3, routed_scaling_factor=2.5)
OURS = dict(num_groups=4, top_groups=2, top_k=3, scaling_factor=2.5)
ROWS = {
    "mixtral": Row("mixtral", {}, {}),
    "qwen2_moe": Row("qwen2_moe", dict(norm_topk_prob=False, num_experts_per_tok=4), {}),
    "qwen3_moe": Row("qwen3_moe", dict(norm_topk_prob=True, num_experts_per_tok=3), dict(top_k=3)),
    "olmoe": Row("olmoe", dict(norm_topk_prob=False, num_experts_per_tok=3), dict(top_k=3)),
    "deepseek_v2": Row("deepseek_v2", dict(topk_method="group_limited_greedy", **GROUPS), OURS),
    "deepseek_v3": Row("deepseek_v3", dict(norm_topk_prob=True, **GROUPS), OURS),
    "kimi_k2": Row(
        "deepseek_v3",
        dict(norm_topk_prob=True, n_group=1, topk_group=1, num_experts_per_tok=3, routed_scaling_factor=2.827),
        dict(top_k=3),
    ),
    "glm4_moe": Row("glm4_moe", dict(norm_topk_prob=True, num_experts_per_tok=3, routed_scaling_factor=2.5), dict(top_k=3)),
    "gpt_oss": Row("gpt_oss", dict(num_experts_per_tok=4), {}),
    "dbrx": Row("dbrx", {}, dict(top_k=2)),
    "granite": Row("granitemoe", dict(num_experts_per_tok=3), dict(top_k=3)),
}


class Called(Exception):
    """Stops a block where its experts would begin."""


def parts(row: Row, monkeypatch) -> tuple[nn.Module, nn.Module, Tensor, Tensor | None, Tensor | None]:
    """(block, experts, weight, bias, correction bias) of the last MoE layer of a tiny model."""
    family = hf.FAMILIES[row.family]
    if reason := hf.missing(family):
        pytest.skip(reason)
    monkeypatch.setitem(hf.FAMILIES, row.family, replace(family, changes=family.changes | row.fields))
    model = hf.build(row.family)
    path, experts = list(hf.experts_of(model, row.family).items())[-1]
    block = model.get_submodule(path.rpartition(".")[0])
    if not hasattr(block, "num_experts"):
        block.num_experts = E  # which DeepSeek-V2 of transformers 5.9 reads and does not set
    gate = block.gate if hasattr(block, "gate") else block.router
    gate = getattr(gate, "layer", gate)
    correction = next((buffer for name, buffer in block.named_buffers() if name.endswith("e_score_correction_bias")), None)
    if correction is None:  # a parameter in some releases
        correction = next((p for name, p in block.named_parameters() if name.endswith("e_score_correction_bias")), None)
    return block, experts, gate.weight, getattr(gate, "bias", None), correction


def theirs(block: nn.Module, experts: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """(ids, weights) [T, K] that the experts are called with."""
    seen = {}

    def stop(module, args, kwargs):
        names = ("hidden_states", "top_k_index", "top_k_weights")
        seen.update(dict(zip(names, args, strict=False)) | kwargs)
        raise Called

    with experts.register_forward_pre_hook(stop, with_kwargs=True), pytest.raises(Called):
        block(x[None])
    return seen["top_k_index"].view(len(x), -1), seen["top_k_weights"].view(len(x), -1)


def dense(ids: Tensor, weights: Tensor) -> Tensor:
    """[T, E]: weights of the chosen experts, whatever their order."""
    return weights.new_zeros(len(ids), E).scatter_add(1, ids.long(), weights)


LOGITS = {
    "random": lambda: torch.randn(T, E),
    "all negative": lambda: -5 - torch.randn(T, E).abs(),
    "large": lambda: 8 * torch.randn(T, E),
    "one far off": lambda: torch.randn(T, E).index_fill(1, torch.tensor([3]), -1e30),
    "huge": lambda: 1e4 * torch.randn(T, E),
    "some -inf": lambda: torch.randn(T, E).masked_fill(torch.rand(T, E) < 0.4, -torch.inf),
    "huge and -inf": lambda: (1e30 * torch.randn(T, E)).masked_fill(torch.rand(T, E) < 0.3, -torch.inf),
}


def inputs(logits: Tensor, hidden_size: int) -> Tensor:
    """Tokens with these logits, by the weight of `test_preset`: -inf is 10 * -1e38."""
    closed = logits == -torch.inf
    x = torch.cat((logits.masked_fill(closed, 0), -1e38 * closed, torch.zeros(T, hidden_size - 2 * E)), 1)
    return x.requires_grad_()


@pytest.mark.parametrize("logits", ["random", *(pytest.param(name, marks=pytest.mark.slow) for name in list(LOGITS)[1:])])
@pytest.mark.parametrize("preset", ROWS)
def test_preset(preset, logits, monkeypatch):
    row = ROWS[preset]
    block, experts, weight, bias, correction = parts(row, monkeypatch)
    router = Router(weight.shape[1], E, RouterConfig.preset(preset, **row.changes))
    with torch.no_grad():
        weight.copy_(torch.cat((torch.eye(E), 10 * torch.eye(E), torch.zeros(E, weight.shape[1] - 2 * E)), 1))
        if correction is not None:
            correction.copy_(0.1 * torch.randn(E))
            router.correction_bias.copy_(correction)
        router.weight.copy_(weight)
        if bias is not None:
            router.bias.copy_(bias)
    assert (router.bias is None) == (bias is None) and (router.correction_bias is None) == (correction is None)
    x = inputs(LOGITS[logits](), weight.shape[1])

    out = router(x)
    ids, weights = theirs(block, experts, x)
    has_weight = weights.sum(dim=1, keepdim=True) > 0
    assert has_weight.float().mean() > 0.9
    if logits in ("huge", "some -inf", "huge and -inf"):  # scores that underflow tie: such experts, of weight nil, may be any
        assert torch.equal(out.logits == -torch.inf, x[:, E : 2 * E] < 0)
        others = dense(out.expert_ids, torch.ones_like(weights)) != dense(ids, torch.ones_like(weights))
        assert not (others & has_weight & (dense(ids, weights) > 0)).any()
    else:
        assert torch.equal(out.expert_ids.sort(dim=-1).values, ids.long().sort(dim=-1).values)
    ours, expected = (dense(*chosen) * has_weight for chosen in ((out.expert_ids, out.weights), (ids, weights)))
    torch.testing.assert_close(ours, expected, rtol=2e-6, atol=1e-7)
    coefficients = torch.randn(T, E) * has_weight
    ours, others = (
        torch.autograd.grad((dense(*chosen) * coefficients).sum(), (x, gate_weight))
        for chosen, gate_weight in (((out.expert_ids, out.weights), router.weight), ((ids, weights), weight))
    )
    for one, other in zip(ours, others, strict=True):
        one, other = one[:, :E], other[:, :E]
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6 * float(other.abs().max().clamp(min=1)))


@pytest.mark.parametrize("logits", LOGITS)
def test_switch(logits):
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersTop1Router

    config = SwitchTransformersConfig(hidden_size=16, num_experts=E, expert_capacity=T, router_jitter_noise=0.0)
    transformers_router = SwitchTransformersTop1Router(config)
    router = Router(16, E, RouterConfig.preset("switch"))
    with torch.no_grad():
        router.weight.copy_(torch.cat((torch.eye(E), 10 * torch.eye(E)), 1))
        transformers_router.classifier.weight.copy_(router.weight)
    x = inputs(LOGITS[logits](), 16)
    # What comes in which place depends on the version of transformers: [1, T, E] one-hot integers and a probability [1, T, 1].
    results = transformers_router(x[None])
    index = next(result for result in results if not result.is_floating_point())
    probability = next(result for result in results if result.shape[-1] == 1)
    out = router(x)
    assert torch.equal(out.expert_ids, index.view(T, E).argmax(dim=-1, keepdim=True))
    torch.testing.assert_close(out.weights, probability[0])
    coefficients = torch.randn(T, 1)
    ours = torch.autograd.grad((out.weights * coefficients).sum(), (x, router.weight))
    theirs = torch.autograd.grad((probability[0] * coefficients).sum(), (x, transformers_router.classifier.weight))
    for one, other in zip(ours, theirs, strict=True):
        one, other = one[:, :E], other[:, :E]
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6 * float(other.abs().max().clamp(min=1)))


def test_every_preset_is_compared():
    assert set(PRESETS) == {*ROWS, "switch"}


def test_presets_by_name():
    assert RouterConfig.preset("qwen3_moe", top_k=4) == RouterConfig(4)
    with pytest.raises(ValueError, match=r"RouterConfig.preset: 'mistral' is not known; choose one of mixtral, switch"):
        RouterConfig.preset("mistral")
