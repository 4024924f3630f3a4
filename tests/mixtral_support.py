"""What the tests of patched models share: a tiny Mixtral, and a training step of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from .support import DEVICE

transformers = pytest.importorskip("transformers", minversion="5.9")
from transformers import MixtralConfig, MixtralForCausalLM  # noqa: E402

SIZES = dict(vocab_size=48, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
LENGTH = dict(max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None)
NUM_EXPERTS = 5


def config(**changes) -> MixtralConfig:
    sizes = dict(intermediate_size=20, num_local_experts=NUM_EXPERTS, num_experts_per_tok=2)
    return MixtralConfig(**{**SIZES, **LENGTH, **sizes, "experts_implementation": "eager", **changes})


def mixtral(**changes) -> MixtralForCausalLM:
    """A tiny model whose activations are of size one, so that experts matter in logits and gradients."""
    model = MixtralForCausalLM(config(**changes)).to(DEVICE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
            else:
                nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ == "MixtralExperts"]


def tokens() -> Tensor:
    return torch.randint(2, SIZES["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def step(model: nn.Module, call: Callable | None = None, **options) -> dict[str, Tensor]:
    """One training step: what the model returns, and the gradient of every parameter."""
    model.zero_grad()
    ids = tokens()
    out = (model if call is None else call)(input_ids=ids, labels=ids, **options)
    out.loss.backward()
    results = {name: out[name].detach() for name in ("logits", "loss", "aux_loss") if out.get(name) is not None}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        results[name] = parameter.grad
    return results


def assert_close(ours: dict[str, Tensor], others: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """The largest difference of each tensor, relative to its largest element."""
    assert ours.keys() == others.keys()
    for name, value in ours.items():
        assert value.dtype == others[name].dtype
        difference = (value - others[name]).abs().max() / others[name].abs().max()
        assert difference <= tolerance, f"{name}: relative difference {difference:.2e}"


def routed(module: nn.Module, ids: list[list[int]], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of an experts module."""
    T, K = len(ids), len(ids[0]) if ids else 2
    x = torch.randn(T, SIZES["hidden_size"], device=DEVICE, dtype=dtype).requires_grad_()
    weights = torch.rand(T, K, device=DEVICE).requires_grad_()
    return x, torch.tensor(ids, dtype=torch.int64, device=DEVICE).view(T, K), weights


def named_experts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if type(module).__name__ == "MixtralExperts"]
