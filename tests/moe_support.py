"""What the tests of dMoE share: layers, their oracle, and a step of them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from blocksparse_moe import MoEConfig, RouterConfig, dMoE
from blocksparse_moe_kernels import Topology, reference

from .support import DEVICE, HAS_CUDA, randn

SMALL = MoEConfig(hidden_size=8, ffn_hidden_size=6, num_experts=3, router=RouterConfig(top_k=2))
UNEQUAL = replace(SMALL, ffn_hidden_size=(5, 2, 7), activation="geglu", bias=True)


def narrow_dtype(backend: str) -> torch.dtype:
    """bf16; but fp16 for Triton's interpreter, which computes bf16 wrongly."""
    return torch.float16 if backend == "triton" and not HAS_CUDA else torch.bfloat16


def build(config: MoEConfig, backend: str = "torch", dtype: torch.dtype = torch.float32) -> dMoE:
    """A layer whose activations are of size one, and whose biases are not zero."""
    layer = dMoE(config, device=DEVICE, dtype=dtype, backend=backend)
    fan_in = {layer.experts.up_name: config.hidden_size, "down_proj": config.columns.widest, "weight": config.hidden_size}
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            scale = fan_in.get(name.rpartition(".")[2], 1) ** -0.5
            parameter.copy_(randn(*parameter.shape, dtype=dtype, scale=scale))
    return layer


def oracle(layer: dMoE, x: Tensor, expert_ids: Tensor, grad: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The reference in `dtype` (its router at least in fp32): the output "y", and the gradients of x and every parameter."""
    config, wide = layer.config, torch.promote_types(dtype, torch.float32)
    leaves = {"x": x, **dict(layer.named_parameters())}
    leaves = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in leaves.items()}
    logits = leaves["x"].reshape(-1, config.hidden_size).to(wide) @ leaves["router.weight"].to(wide).T
    weights = logits.softmax(dim=-1).gather(1, expert_ids)
    if config.router.normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    up = layer.experts.up_name
    y = reference.expert_mlp(
        leaves["x"].reshape(-1, config.hidden_size),
        Topology.from_ids(expert_ids, config.num_experts),
        leaves[f"experts.{up}"],
        leaves["experts.down_proj"],
        weights,
        activation=config.activation,
        up_proj_bias=leaves.get(f"experts.{up}_bias"),
        down_proj_bias=leaves.get("experts.down_proj_bias"),
        columns=None if config.columns.are_equal else config.columns,
    ).view(x.shape)
    grads = torch.autograd.grad(y, list(leaves.values()), grad.to(dtype), allow_unused=True, materialize_grads=True)
    return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}


def run(layer: nn.Module, x: Tensor, grad: Tensor | None = None) -> dict[str, Tensor]:
    """One step: the output "y", and the gradients of x and every parameter."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(torch.ones_like(y) if grad is None else grad.to(y.dtype))
    return {"y": y.detach(), "x": x.grad, **{name: parameter.grad for name, parameter in layer.named_parameters()}}


def assert_equal(ours: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert ours.keys() == others.keys()
    for name, value in ours.items():
        assert value is not None, f"{name} has no gradient"
        assert value.dtype == others[name].dtype and torch.equal(value, others[name]), f"{name} differs"


def assert_close(ours: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    """Up to the order of fp32 sums of terms of size one."""
    for name, value in others.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


CHAIN = 4
"""Rounded intermediates between input and gradient: dA', the activation's derivative, dPre, and the sum over rows."""


def assert_agrees(
    layer: dMoE, x: Tensor, expert_ids: Tensor, grad: Tensor, ours: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """Our error is at most twice (the reference's own error in `dtype` + a rounding of each intermediate).

    A rounding is of the size of the result, or of what cancels in it.

    Activations are of size one, hence most terms. The backward of the router's softmax cancels terms <grad, y> of a token.
    The reference's relative error is its worst over the results of the step: that of a single one may be nil by chance.
    """
    exact = oracle(layer, x, expert_ids, grad, torch.float64)
    torchs = oracle(layer, x, expert_ids, grad, dtype)
    dots = torch.linalg.vecdot(grad.abs(), exact["y"].abs()).max().item() if x.numel() else 0.0
    errors, torch_errors = {}, {}
    for name, value in ours.items():
        assert value.shape == exact[name].shape, f"{name}: {tuple(value.shape)}, expected {tuple(exact[name].shape)}"
        if value.numel() == 0:
            continue
        terms = max(1.0, dots) if name in ("x", "router.weight") else 1.0
        size = max(terms, exact[name].abs().max().item())
        errors[name] = (value.double() - exact[name]).abs().max().item() / size
        torch_errors[name] = (torchs[name].double() - exact[name]).abs().max().item() / size
    budget = 2 * (max(torch_errors.values(), default=0.0) + CHAIN * torch.finfo(dtype).eps)
    for name, error in errors.items():
        assert error <= budget, f"{name}: relative error {error:.3e}, budget {budget:.3e}, torch's own {torch_errors[name]:.3e}"
