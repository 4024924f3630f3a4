"""Tiny models of every Hugging Face family with a mixture of experts: a row each.

A row names the class to build and what its config needs beside `SHARED`. Weights are drawn so that activations have size one
inside the experts and limits are low enough to bind: what is dropped, a bias or a clamp, shows in the result.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn

SHARED = dict(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=40,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=20,
    shared_experts_intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    num_experts=8,
    num_local_experts=8,
    n_routed_experts=8,
    moe_num_experts=8,
    num_experts_per_tok=2,
    moe_topk=2,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    swiglu_limit=1.0,
    # Latent attention, indexers of sparse attention, linear attention, state spaces.
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    index_topk=4,
    index_head_dim=8,
    index_n_heads=2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_heads=4,
    linear_head_dim=8,
    mamba_num_heads=4,
    mamba_head_dim=8,
    mamba_n_heads=4,
    mamba_d_head=16,
    mamba_d_state=8,
    ssm_state_size=8,
    n_groups=2,
    sliding_window=4,
    # Four residual streams in the place of one.
    hc_mult=2,
    hc_count=2,
    hc_lowrank=8,
    max_position_embeddings=64,
    attention_dropout=0.0,
    use_cache=False,
    output_router_logits=True,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
"""Values for the fields of a config, where it has them."""

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
INKLING = dict(
    swa_num_attention_heads=4, swa_num_key_value_heads=4, swa_head_dim=8, d_rel=4, rel_extent=16, sliding_window_size=4
)
SOFTCAPS = dict(unpadded_vocab_size=48, mlp_gate_softcap=1.0, mlp_up_softcap=1.0, **INKLING)

NO_AUX_LOSS = dict(output_router_logits=False)  # in 5.17 and before it raises


@dataclass(frozen=True)
class Family:
    """How a family is built.

    Attributes:
        model: class of the model, in the family's modeling file.
        changes: fields of its config that differ from `SHARED`.
        layers: MoE layers of the tiny model.
        since: lowest version of transformers that has it; in the experts interface, unless `experts` is given.
        folder: folder of the modeling file, where a family has several models.
        experts: class of the experts, for a family that the experts interface does not serve.
        inputs: arguments of the model beside `input_ids`.
    """

    model: str
    changes: dict[str, Any] = field(default_factory=dict)
    layers: int = 2
    since: str = "5.9"
    folder: str | None = None
    experts: str | None = None
    inputs: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "afmoe": Family("AfmoeForCausalLM", dict(num_dense_layers=1), layers=1),
    "aria": Family("AriaTextForCausalLM", since="5.18"),
    "axk1": Family("AXK1ForCausalLM", layers=1, since="5.15"),
    "axk2": Family("AXK2ForCausalLM", layers=1, since="5.15"),
    "bailing_hybrid": Family("BailingHybridForCausalLM", layers=1, since="5.20"),
    "beam": Family("BeamForCausalLM", dict(mlp_layer_types=["dense", "sparse"]), layers=1, since="5.21"),
    "cohere2_moe": Family("Cohere2MoeForCausalLM", dict(logit_scale=1.0, mlp_layer_types=["dense", "sparse"]), layers=1),
    "deepseek_ocr2": Family("DeepseekOcr2TextModel", dict(mlp_layer_types=["dense", "sparse"]), layers=1, since="5.11"),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", layers=1),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", layers=1),
    "deepseek_v32": Family("DeepseekV32ForCausalLM", layers=1, since="5.11"),
    "deepseek_v4": Family(
        "DeepseekV4ForCausalLM", dict(num_key_value_heads=1, mlp_layer_types=["hash_moe", "moe"], o_groups=2, o_lora_rank=8)
    ),
    "diffusion_gemma": Family(
        "DiffusionGemmaEncoderTextModel", dict(top_k_experts=2, global_head_dim=8, num_global_key_value_heads=4), since="5.11"
    ),
    "dots1": Family("Dots1ForCausalLM", layers=1),
    "dots3_note": Family("Dots3NoteForCausalLM", layers=1, since="5.23"),
    "ernie4_5_moe": Family("Ernie4_5_MoeForCausalLM", dict(moe_k=2), layers=1),
    "ernie4_5_vl_moe": Family(
        "Ernie4_5_VLMoeTextModel",
        dict(
            moe_k=2,
            moe_intermediate_size=[24, 12],
            mlp_layer_types=["dense", "sparse"],
            rope_parameters={**ROPE, "mrope_section": [1, 1, 2]},
        ),
        inputs=dict(moe_mm_token_type_ids=torch.tensor([[0, 0, 1, 1, 1, 0, 0], [0] * 7])),
    ),
    "exaone_moe": Family("ExaoneMoeForCausalLM", layers=1),
    "flex_olmo": Family("FlexOlmoForCausalLM"),
    "flint": Family("FlintForCausalLM", dict(mlp_only_layers=[0]), layers=1, since="5.21"),
    "gemma4": Family(
        "Gemma4ForCausalLM",
        dict(
            enable_moe_block=True,
            top_k_experts=2,
            global_head_dim=8,
            vocab_size_per_layer_input=48,
            hidden_size_per_layer_input=8,
        ),
    ),
    "glm4_moe": Family("Glm4MoeForCausalLM", layers=1),
    "glm4_moe_lite": Family("Glm4MoeLiteForCausalLM", layers=1),
    "glm4v_moe": Family(
        "Glm4vMoeTextModel", dict(rope_parameters={**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}), layers=1
    ),
    "glm5_next": Family(
        "Glm5NextTextModel",
        dict(qk_rope_head_dim=0, head_dim=0, index_kpool=2, mlp_layer_types=["dense", "sparse"]),
        layers=1,
        since="5.17",
    ),
    "glm_moe_dsa": Family("GlmMoeDsaForCausalLM", dict(mlp_layer_types=["dense", "sparse"]), layers=1),
    "gpt_oss": Family("GptOssForCausalLM"),
    "granitemoe": Family("GraniteMoeForCausalLM", NO_AUX_LOSS, since="5.13"),
    "granitemoe_swa": Family("GraniteMoeSWAForCausalLM", NO_AUX_LOSS, since="5.15"),
    "granitemoehybrid": Family("GraniteMoeHybridForCausalLM", dict(shared_intermediate_size=20, **NO_AUX_LOSS), since="5.13"),
    "granitemoeshared": Family("GraniteMoeSharedForCausalLM", dict(shared_intermediate_size=20, **NO_AUX_LOSS), since="5.13"),
    "hunyuan_v1_moe": Family("HunYuanMoEV1ForCausalLM"),
    "hy_v3": Family("HYV3ForCausalLM", layers=1),
    "hy_v4": Family("HYV4ForCausalLM", layers=1, since="5.17"),
    "hy_v4_vl": Family("HYV4VLTextModel", dict(rope_parameters={**ROPE, "mrope_section": [2, 1, 1]}), layers=1, since="5.24"),
    "inkling": Family("InklingForCausalLM", dict(logits_mup_width_multiplier=1.0, **INKLING), since="5.14"),
    "inkling2": Family("Inkling2ForCausalLM", SOFTCAPS, since="5.23"),
    "inkling2_loop": Family(
        "Inkling2LoopForCausalLM",
        dict(
            n_layers_per_attn_res_block=1,
            loop_layer_index_start=1,
            loop_layer_index_end=2,
            loop_num_passes=2,
            loop_gate_rank=4,
            **SOFTCAPS,
        ),
        since="5.24",
    ),
    "jamba": Family("JambaForCausalLM", layers=1),
    "kimi_linear": Family("KimiLinearForCausalLM", layers=1, since="5.17"),
    "kolibri1": Family("Kolibri1ForCausalLM", since="5.20"),
    "laguna": Family("LagunaForCausalLM", layers=1),
    "lara_mini": Family("LaraMiniForCausalLM", since="5.24"),
    "lfm2_moe": Family("Lfm2MoeForCausalLM", dict(layer_types=["conv", "full_attention"], num_dense_layers=1), layers=1),
    "mellum": Family("MellumForCausalLM", since="5.11"),
    "mimo_v2_flash": Family("MiMoV2FlashForCausalLM", dict(num_key_value_heads=2), layers=1, since="5.13"),
    "minimax": Family("MiniMaxForCausalLM"),
    "minimax_m2": Family("MiniMaxM2ForCausalLM"),
    "minimax_m3_vl": Family(
        "MiniMaxM3VLForCausalLM", dict(dense_intermediate_size=40, shared_intermediate_size=20), since="5.12"
    ),
    "mistral4": Family("Mistral4ForCausalLM", layers=1),
    "mistral_large4": Family("MistralLarge4TextModel", layers=1, since="5.22"),
    "mixtral": Family("MixtralForCausalLM"),
    "muse_spark": Family("MuseSparkTextModel", dict(moe_hidden_size=20), since="5.20"),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        dict(layers_block_type=["attention", "moe"], moe_shared_expert_intermediate_size=20, moe_latent_size=16),
        layers=1,
    ),
    "olmoe": Family("OlmoeForCausalLM"),
    "openai_privacy_filter": Family("OpenAIPrivacyFilterForTokenClassification"),
    "phimoe": Family("PhimoeForCausalLM"),
    "qwen2_moe": Family("Qwen2MoeForCausalLM"),
    "qwen3_5_moe": Family("Qwen3_5MoeForCausalLM"),
    "qwen3_moe": Family("Qwen3MoeForCausalLM"),
    "qwen3_next": Family("Qwen3NextForCausalLM"),
    "qwen3_omni_moe": Family("Qwen3OmniMoeThinkerTextModel"),
    "qwen3_omni_moe_talker": Family(
        "Qwen3OmniMoeTalkerModel",
        dict(num_local_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=20),
        folder="qwen3_omni_moe",
        inputs=dict(inputs_embeds=torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(2))),
    ),
    "qwen3_vl_moe": Family("Qwen3VLMoeTextModel"),
    "qwen4_exp": Family("Qwen4ExpForCausalLM", since="5.16"),
    "solar_open": Family("SolarOpenForCausalLM"),
    "unlimited_ocr": Family("UnlimitedOcrTextModel", layers=1, since="5.20"),
    "zaya": Family("ZayaForCausalLM", dict(num_experts_per_tok=1, router_hidden_size=16), since="5.13"),
    # Families of their own making, outside the experts interface.
    "dbrx": Family(
        "DbrxForCausalLM",
        dict(
            d_model=32,
            n_heads=4,
            n_layers=2,
            max_seq_len=64,
            attn_config=dict(kv_n_heads=4, rope_theta=10000.0, clip_qkv=8.0),
            ffn_config=dict(ffn_hidden_size=24, moe_num_experts=8, moe_top_k=2),
            **NO_AUX_LOSS,
        ),
        since="5.15",
        experts="DbrxExperts",
    ),
    "jetmoe": Family("JetMoeForCausalLM", dict(kv_channels=8, num_key_value_heads=2), experts="JetMoeMoE"),
    "llama4": Family("Llama4ForCausalLM", dict(intermediate_size_mlp=40, intermediate_size=24), experts="Llama4TextExperts"),
    "longcat_flash": Family(
        "LongcatFlashForCausalLM",
        dict(num_layers=2, ffn_hidden_size=40, expert_ffn_hidden_size=24, zero_expert_num=2),
        experts="LongcatFlashExperts",
    ),
    "step3p7": Family(
        "Step3p7TextModel",
        dict(mlp_layer_types=["dense", "sparse"], share_expert_dim=20, swiglu_limits=[1.0, 1.0]),
        layers=1,
        since="5.16",
        experts="Step3p7Experts",
    ),
}

QUICK = ("mixtral", "gpt_oss", "nemotron_h", "muse_spark", "llama4")
"""Families that differ in layout, gate or way of being patched: those that `make check` tries."""


def slow_but_for(quick: Iterable[str], names: Iterable[str]) -> list[Any]:
    """Names as parameters of a test, of which the quick part of the suite leaves out most."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


UNBUILT = {
    "nllb_moe": "drops tokens beyond a capacity, and its experts are modules of their own",
    "switch_transformers": "drops tokens beyond a capacity, and its experts are modules of their own",
}
"""Folders of models that have experts and no row, and why."""


def missing(family: Family) -> str | None:
    """Why the installed transformers has not got the family; None when it has."""
    installed = version("transformers")
    return None if Version(installed) >= Version(family.since) else f"transformers {installed} is older than {family.since}"


def build(name: str, device: torch.device | str = "cpu") -> nn.Module:
    """The tiny model of a family, in fp32 with eager experts: the same weights at each call."""
    family = FAMILIES[name]
    folder = family.folder or name
    model_class = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), family.model)
    config_class = model_class.config_class
    known = {item.name for item in dataclasses.fields(config_class)}
    config = config_class(**{key: value for key, value in SHARED.items() if key in known} | family.changes)
    config._experts_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config).eval()
        _draw_weights(model)
    return model.to(device)


@torch.no_grad()
def _draw_weights(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, nn.Embedding):
                nn.init.normal_(parameter)
            elif name.endswith("bias"):
                # Those of experts are parameters of their own; small ones elsewhere, as they steer routers.
                nn.init.normal_(parameter, std=0.5 if name.endswith("proj_bias") else 0.1)
            elif parameter.ndim > 1:
                nn.init.normal_(parameter, std=_fan_in(module, parameter) ** -0.5)
        if hasattr(module, "tid2eid"):  # a hash router: token -> experts
            module.tid2eid.random_(SHARED["n_routed_experts"])


def _fan_in(module: nn.Module, weight: Tensor) -> int:
    if isinstance(module, nn.Conv1d):
        return math.prod(weight.shape[1:])
    return weight.shape[1] if getattr(module, "is_transposed", False) else weight.shape[-1]


def inputs(model: nn.Module, name: str) -> dict[str, Any]:
    """Arguments of one training step: two short sequences, so that some experts are without a token."""
    device = next(model.parameters()).device
    ids = torch.randint(3, SHARED["vocab_size"], (2, 7), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, **FAMILIES[name].inputs}
    if FAMILIES[name].model.endswith("ForCausalLM"):
        given["labels"] = ids
    if "inputs_embeds" in given:
        del given["input_ids"]
    return {key: value.to(device) for key, value in given.items()}


def experts_of(model: nn.Module, name: str) -> dict[str, nn.Module]:
    """The experts modules of the tiny model of a family, by their names in it."""
    by_hand = FAMILIES[name].experts
    return {
        path: module
        for path, module in model.named_modules()
        if (hasattr(module, "is_concatenated") if by_hand is None else type(module).__name__ == by_hand)
    }


@cache
def folders() -> dict[str, list[str]]:
    """Folders of the installed transformers with classes of experts -> those that the experts interface serves."""
    root = Path(importlib.import_module("transformers.models").__path__[0])
    sources = sorted((path.parent.name, path.read_text()) for path in root.glob("*/modeling_*.py"))
    return {
        folder: re.findall(r"^@use_experts_implementation.*\nclass (\w+)", source, re.MULTILINE)
        for folder, source in sources
        if re.search(r"^@use_experts_implementation|^class \w*Experts\(", source, re.MULTILINE)
    }


def experts_classes() -> set[type[nn.Module]]:
    """Every class of experts that the experts interface of the installed transformers serves."""
    return {
        getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)
        for folder, names in folders().items()
        for name in names
    }
