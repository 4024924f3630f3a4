"""The gate: hidden states to logits in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..custom_ops.gate import linear_fp32

_NARROW = (torch.bfloat16, torch.float16)


def gate_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, narrow: bool = False) -> Tensor:
    """x [T, H] weight [E, H]^T + bias [E], [T, E] fp32, whatever the dtypes.

    Operands of one 16-bit dtype are multiplied as they are, which is exact, and added up in fp32; others are widened first.

    Args:
        narrow: round the wider operand to the 16-bit dtype of the other one.
    """
    if narrow and (x.dtype in _NARROW) != (weight.dtype in _NARROW):
        dtype = x.dtype if x.dtype in _NARROW else weight.dtype
        x, weight = x.to(dtype), weight.to(dtype)
    if x.dtype == weight.dtype and x.dtype in _NARROW:
        logits = linear_fp32(x, weight)
    else:
        logits = F.linear(x.float(), weight.float())
    return logits if bias is None else logits + bias.float()
