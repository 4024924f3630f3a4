"""Experts whose weights are kept in MXFP8, in about half the memory of bf16: for inference.

experts = quantize_experts(layer.experts.gate_up_proj, layer.experts.down_proj)
y = mxfp8_expert_mlp(x, topology, experts, routing_weights)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blocksparse_moe_kernels import Topology, get_activation
from blocksparse_moe_kernels.launch import check_operands, check_shape, check_type, check_weights
from blocksparse_moe_kernels.mxfp8 import MXFP8

from . import custom_ops as custom_ops
from .autocast import autocast_dtype
from .custom_ops.define import flatten
from .products import choose, mxfp8_launchers


@dataclass(frozen=True, eq=False)
class MXFP8Experts:
    """Weights of the experts, each with its blocks along its contraction.

    Attributes:
        up_proj: [E, halves * F, H], in blocks along H.
        down_proj: [E, H, F], in blocks along F.
    """

    up_proj: MXFP8
    down_proj: MXFP8

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales: 33 for every 32 numbers."""
        return self.up_proj.nbytes + self.down_proj.nbytes


@torch.no_grad()
def quantize_experts(up_proj: Tensor, down_proj: Tensor, *, backend: str = "auto") -> MXFP8Experts:
    """The weights of experts of one size in MXFP8.

    Args:
        up_proj: [E, halves * F, H], or [E, 2, F, H] for halves that lie apart, as of `ops.expert_mlp`.
        down_proj: [E, H, F].
        backend: "auto", "triton" or "torch"; the result is the same.
    Raises:
        ValueError: shapes; NotImplementedError: the backend cannot.
    """
    for name, weight in (("up_proj", up_proj), ("down_proj", down_proj)):
        check_type("quantize_experts", name, weight, Tensor, "Give the stacked weights of the experts.")
    if up_proj.ndim == 4:
        up_proj = up_proj.flatten(1, 2)
    E, H, F = down_proj.shape if down_proj.ndim == 3 else (0, 0, 0)
    if not E or up_proj.shape not in ((E, F, H), (E, 2 * F, H)):
        raise ValueError(
            "quantize_experts: up_proj must be [E, 2F, H] or [E, F, H], and down_proj [E, H, F]; got "
            f"{list(up_proj.shape)} and {list(down_proj.shape)}."
        )
    quantize = mxfp8_launchers(choose(backend, up_proj.device, up_proj.dtype)[0]).quantize
    return MXFP8Experts(quantize(up_proj), quantize(down_proj))


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
    check_type("mxfp8_expert_mlp", "experts", experts, MXFP8Experts, "Make them by quantize_experts(up_proj, down_proj).")
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
    up, down = (code.view(torch.uint8) for code in codes)
    return torch.ops.blocksparse_moe.mxfp8_expert_mlp(
        x.to(dtype), up, experts.up_proj.scales, up_bias, down, experts.down_proj.scales, down_bias, routing_weights,
        *flatten(topology, chosen), quantize_activations, activation, chosen,
    )  # fmt: skip
