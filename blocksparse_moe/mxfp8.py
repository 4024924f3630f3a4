"""Experts whose weights are kept in MXFP8, in about half the memory of bf16: for inference.

experts = quantize_experts(layer.experts.gate_up_proj, layer.experts.down_proj)
y = mxfp8_expert_mlp(x, topology, experts, routing_weights)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from blocksparse_moe_kernels import Topology, get_activation
from blocksparse_moe_kernels.config import ceil_div
from blocksparse_moe_kernels.launch import check_operands, check_same, check_shape, check_type, check_weights
from blocksparse_moe_kernels.mxfp8 import BLOCK, DTYPES, MXFP8

from . import custom_ops as custom_ops
from .autocast import autocast_dtype
from .custom_ops.define import flatten
from .products import choose, mxfp8_launchers


class MXFP8Experts(nn.Module):
    """Weights of the experts, each with its blocks along its contraction. What computes is `mxfp8_expert_mlp`.

    Buffers, all uint8, so that a change of dtype leaves them alone: `up_codes` [E, halves * F, H] and `down_codes` [E, H, F],
    the bytes of E4M3 numbers, `up_scales` [E, halves * F, ceil(H / 32)] and `down_scales` [E, H, ceil(F / 32)]. They are the
    state dict, and the arguments: `MXFP8Experts(**torch.load(file))` are those of `torch.save(experts.state_dict(), file)`.

    Raises:
        TypeError: no tensor of uint8; ValueError: shapes or devices.
    """

    up_codes: Tensor
    up_scales: Tensor
    down_codes: Tensor
    down_scales: Tensor

    def __init__(self, up_codes: Tensor, up_scales: Tensor, down_codes: Tensor, down_scales: Tensor) -> None:
        super().__init__()
        given = {"up_codes": up_codes, "up_scales": up_scales, "down_codes": down_codes, "down_scales": down_scales}
        for name, tensor in given.items():
            _check_bytes(name, tensor)
            if tensor.device != up_codes.device:
                raise ValueError(f"MXFP8Experts: up_codes are on {up_codes.device} and {name} on {tensor.device}; move one.")
            self.register_buffer(name, tensor)
        _check_shapes("MXFP8Experts", up_codes, down_codes)
        for name in ("up", "down"):
            shape = given[f"{name}_codes"].shape
            check_shape("MXFP8Experts", f"{name}_scales", given[f"{name}_scales"], ((*shape[:-1], ceil_div(shape[-1], BLOCK)),))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        """Other dtypes, which torch would convert number by number, are refused."""
        for name, _ in self.named_buffers():
            if (tensor := state_dict.get(f"{prefix}{name}")) is not None:
                _check_bytes(name, tensor)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    @property
    def up_proj(self) -> MXFP8:
        """[E, halves * F, H], in blocks along H: a view, which `dequantize()` makes fp32."""
        return MXFP8(self.up_codes.view(torch.float8_e4m3fn), self.up_scales, -1, torch.float32)

    @property
    def down_proj(self) -> MXFP8:
        """[E, H, F], in blocks along F, as `up_proj`."""
        return MXFP8(self.down_codes.view(torch.float8_e4m3fn), self.down_scales, -1, torch.float32)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales: 33 for every 32 numbers."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def extra_repr(self) -> str:
        E, H, F = self.down_codes.shape
        return f"{E} experts, H={H}, F={F}, {self.up_codes.shape[1]} rows up, {self.nbytes:,} bytes on {self.down_codes.device}"


def _check_bytes(name: str, tensor: Tensor) -> None:
    check_type("MXFP8Experts", name, tensor, Tensor, "Make them by quantize_experts(up_proj, down_proj).")
    if tensor.dtype != torch.uint8:
        raise TypeError(f"MXFP8Experts: {name} must be uint8; got {tensor.dtype}. Codes are given as bytes.")


def _check_shapes(operation: str, up_proj: Tensor, down_proj: Tensor) -> None:
    E, H, F = down_proj.shape if down_proj.ndim == 3 else (0, 0, 0)
    if not E or up_proj.shape not in ((E, F, H), (E, 2 * F, H)):
        raise ValueError(
            f"{operation}: up_proj must be [E, 2F, H] or [E, F, H], and down_proj [E, H, F]; got "
            f"{list(up_proj.shape)} and {list(down_proj.shape)}."
        )


@torch.no_grad()
def quantize_experts(up_proj: Tensor, down_proj: Tensor, *, backend: str = "auto") -> MXFP8Experts:
    """The weights of experts of one size in MXFP8.

    Args:
        up_proj: [E, halves * F, H], or [E, 2, F, H] for halves that lie apart, as of `ops.expert_mlp`, in fp64, fp32, fp16 or
            bf16.
        down_proj: [E, H, F], in the same dtype.
        backend: "auto", "triton" or "torch"; the result is the same.
    Raises:
        TypeError: no tensors, or dtypes; ValueError: shapes or devices; NotImplementedError: the backend cannot.
    """
    for name, weight in (("up_proj", up_proj), ("down_proj", down_proj)):
        check_type("quantize_experts", name, weight, Tensor, "Give the stacked weights of the experts.")
        if weight.dtype not in DTYPES:
            raise TypeError(
                f"quantize_experts: {name} must be fp64, fp32, fp16 or bf16; got {weight.dtype}. Give the weights in high "
                "precision: what is quantised already must be dequantised first."
            )
    if up_proj.ndim == 4:
        up_proj = up_proj.flatten(1, 2)
    _check_shapes("quantize_experts", up_proj, down_proj)
    check_same("quantize_experts", "down_proj", down_proj, "up_proj", up_proj)
    kernels = mxfp8_launchers(choose(backend, up_proj.device, up_proj.dtype)[0])
    up, down = kernels.quantize(up_proj), kernels.quantize(down_proj)
    return MXFP8Experts(up.codes.view(torch.uint8), up.scales, down.codes.view(torch.uint8), down.scales)


def mxfp8_expert_mlp(
    x: Tensor,
    topology: Topology,
    experts: MXFP8Experts,
    routing_weights: Tensor | None = None,
    *,
    activation: str = "swiglu",
    up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    quantize_activations: bool = False,
    backend: str = "auto",
) -> Tensor:
    """`ops.expert_mlp` of weights that are in MXFP8. Without gradients.

    Args:
        x: [T, H], in the dtype to compute in, or autocast's.
        experts: made by `quantize_experts`.
        quantize_activations: round x and the hidden activation to MXFP8, too, as `expert_mlp(..., precision="mxfp8")` does.
            Else they are multiplied as they are, and only memory traffic is saved.
    Returns:
        [T, H] in the dtype of x, or autocast's.
    Otherwise as `ops.expert_mlp`.
    """
    check_type("mxfp8_expert_mlp", "x", x, Tensor, "Make one with torch.as_tensor.")
    check_type("mxfp8_expert_mlp", "experts", experts, MXFP8Experts, "Make them by quantize_experts(up_proj, down_proj).")
    check_type("mxfp8_expert_mlp", "quantize_activations", quantize_activations, bool, "Give True or False.")
    codes = (experts.up_proj.codes, experts.down_proj.codes)
    check_operands(
        "mxfp8_expert_mlp", topology, x=x, routing_weights=routing_weights, up_proj=codes[0], down_proj=codes[1],
        up_proj_bias=up_proj_bias, down_proj_bias=down_proj_bias,
    )  # fmt: skip
    check_weights("mxfp8_expert_mlp", topology, routing_weights)
    E, H, F = codes[1].shape
    rows = get_activation(activation).halves * F
    check_shape("mxfp8_expert_mlp", "up_proj", codes[0], ((E, rows, H),))
    check_shape("mxfp8_expert_mlp", "x", x, ((topology.num_tokens, H),))
    if topology.num_experts != E:
        raise ValueError(f"mxfp8_expert_mlp: the topology covers {topology.num_experts} experts; the weights are of {E}.")
    if up_proj_bias is not None:
        check_shape("mxfp8_expert_mlp", "up_proj_bias", up_proj_bias, ((E, rows), (E, rows // F, F)))
    if down_proj_bias is not None:
        check_shape("mxfp8_expert_mlp", "down_proj_bias", down_proj_bias, ((E, H),))
    dtype = autocast_dtype(x) or x.dtype
    up_bias = None if up_proj_bias is None else up_proj_bias.to(dtype).reshape(E, rows)
    down_bias = None if down_proj_bias is None else down_proj_bias.to(dtype).reshape(E, H)
    if torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (x, routing_weights, up_proj_bias, down_proj_bias)
    ):
        raise NotImplementedError(
            "mxfp8_expert_mlp: weights in MXFP8 are for inference; call it under torch.no_grad(), or train with "
            'expert_mlp(..., precision="mxfp8") and weights in high precision.'
        )
    chosen = choose(backend, x.device, dtype)[0]
    return torch.ops.blocksparse_moe.mxfp8_expert_mlp(
        x.to(dtype), experts.up_codes, experts.up_scales, up_bias, experts.down_codes, experts.down_scales, down_bias,
        routing_weights, *flatten(topology, chosen), quantize_activations, activation, chosen,
    )  # fmt: skip
