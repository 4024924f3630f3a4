"""A whole decoder layer of transformers, with one implementation of its experts or another."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from blocksparse_moe import patch_huggingface

from .inputs import Case
from .lineup import Choice, name_of, stage_of
from .peers import PEERS
from .variants import Layer, Task

IMPLEMENTATIONS = {
    "transformers eager": ("eager", False),
    "transformers grouped_mm": ("grouped_mm", False),
    "transformers grouped_mm compiled": ("grouped_mm", True),
}
"""By the name of the peer: what transformers calls it, and whether the experts are compiled."""

_SEQUENCE = 4096


def decoder_layer(case: Case, choice: Choice) -> list[Task]:
    """Attention, norms, router and experts of a decoder layer, Mixtral's or Qwen3-MoE's; peers: transformers' own experts.

    All variants share the weights and all code but that of the experts. Tokens are chosen by the layer's own gate. What is
    expected is the layer with the eager experts, in the same dtype: in another one the gate would choose otherwise.
    """
    left_out = {name: reason for name in IMPLEMENTATIONS if name in choice.peers and (reason := PEERS[name].why_not(case))}
    if reason := PEERS["transformers eager"].why_not(case):
        raise NotImplementedError(f"decoder_layer: {reason}.")
    weights = _weights(case)
    layers = [_layer(case, weights, name_of(backend), "ours", backend=backend) for backend in choice.backends_for(case)]
    for name, (implementation, compiled) in IMPLEMENTATIONS.items():
        if name in choice.peers and name not in left_out:
            layers.append(_layer(case, weights, name, "peer", implementation=implementation, compiled=compiled))
    eager = _layer(case, weights, "eager", "peer", implementation="eager")

    @cache
    def expected() -> tuple[Tensor, ...]:
        stage = "forward+backward" if "forward+backward" in choice.stages else "inference"
        return stage_of(eager, stage, case.grad).run()

    return [
        Task(
            "decoder_layer",
            stage,
            tuple(stage_of(layer, stage, case.grad) for layer in layers),
            expected if stage == "forward+backward" else lambda: expected()[:1],
            left_out=left_out,
            routing="its own gate",
        )
        for stage in choice.stages
    ]


def _layer(
    case: Case,
    weights: dict[str, Tensor],
    name: str,
    kind: Any,
    *,
    implementation: str = "eager",
    compiled: bool = False,
    backend: str | None = None,
) -> Layer:
    """The layer on x [T, H]; its leaves are x, the gate and the weights of the experts."""
    layer, rotary = _modules(case, implementation)
    layer.load_state_dict(weights, assign=True)
    experts = layer.mlp.experts
    if backend is not None:
        patch_huggingface(layer, backend=backend)
    if compiled:
        experts.forward = torch.compile(experts.forward, dynamic=False)
    length = _SEQUENCE if case.shape.T % _SEQUENCE == 0 else 1
    x = case.x.detach().requires_grad_()
    position_ids = torch.arange(length, device=case.device)[None]
    positions = rotary(x, position_ids)

    def forward() -> Tensor:
        y = layer(x.view(-1, length, case.shape.H), position_embeddings=positions, position_ids=position_ids)
        return (y[0] if isinstance(y, tuple) else y).view_as(x)

    return Layer(name, kind, (x, layer.mlp.gate.weight, experts.gate_up_proj, experts.down_proj), forward)


def _weights(case: Case) -> dict[str, Tensor]:
    """Random ones, of the experts those of the case."""
    random = torch.Generator(case.device).manual_seed(1)
    layer, _ = _modules(case, "eager")
    weights = {
        name: torch.empty(weight.shape, dtype=case.dtype, device=case.device).normal_(
            std=weight.shape[-1] ** -0.5, generator=random
        )
        for name, weight in layer.state_dict().items()
    }
    for name in weights:
        if "norm" in name:
            weights[name].fill_(1)
    return weights | {"mlp.experts.gate_up_proj": case.up_proj, "mlp.experts.down_proj": case.down_proj}


def _modules(case: Case, implementation: str) -> tuple[Any, nn.Module]:
    """The decoder layer, on the meta device, and the rotary embedding."""
    shape = case.shape
    heads = max(1, shape.H // 128)
    sizes = dict(
        hidden_size=shape.H,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        head_dim=128,
        num_experts_per_tok=shape.K,
        max_position_embeddings=_SEQUENCE,
        attn_implementation="sdpa",
        experts_implementation=implementation,
    )
    make: Any
    if shape.name.startswith("mixtral"):
        from transformers.models.mixtral import modeling_mixtral as models

        config = models.MixtralConfig(intermediate_size=shape.F, num_local_experts=shape.E, **sizes)
        make, rotary = partial(models.MixtralDecoderLayer, config, 0), models.MixtralRotaryEmbedding
    else:
        from transformers.models.qwen3_moe import modeling_qwen3_moe as models

        config = models.Qwen3MoeConfig(moe_intermediate_size=shape.F, num_experts=shape.E, norm_topk_prob=True, **sizes)
        make, rotary = partial(models.Qwen3MoeDecoderLayer, config, 0), models.Qwen3MoeRotaryEmbedding
    with torch.device("meta"):
        layer = make()
    return layer, rotary(config).to(case.device)
