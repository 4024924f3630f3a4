"""Transformer Engine: its permutation, two `GroupedLinear` and our SwiGLU between them, in the precision of the weights.

Written after the documentation of 2.20; never run here. `GroupedLinear` reads the number of rows of each expert on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..inputs import Case
from ..variants import Layer
from .requirements import missing, unsupported


def why_not(case: Case) -> str | None:
    return missing("transformer-engine", "2.17") or unsupported(case, (torch.bfloat16, torch.float16))


def build(case: Case) -> Layer:
    import transformer_engine.pytorch as te

    shape = case.shape
    x, weights, up_proj, down_proj = case.leaves()
    expert_ids = case.expert_ids.int()  # as its permutation wants them

    def grouped_linear(w: Tensor) -> tuple[nn.Module, list[nn.Parameter]]:
        """Of weights [E, out, in], which it shares; and the parameters, one [out, in] for each expert."""
        parameters = [nn.Parameter(one) for one in w.detach()]
        module = te.GroupedLinear(shape.E, w.shape[2], w.shape[1], bias=False, params_dtype=w.dtype, device=case.device)
        for expert, parameter in enumerate(parameters):
            setattr(module, f"weight{expert}", parameter)
        return module, parameters

    (up, up_parameters), (down, down_parameters) = grouped_linear(up_proj), grouped_linear(down_proj)

    def forward() -> Tensor:
        counts = case.expert_ids.flatten().bincount(minlength=shape.E).tolist()
        rows, row_ids = te.moe_permute(x, expert_ids, num_out_tokens=shape.M, map_type="index")
        gate, value = up(rows, counts).chunk(2, dim=1)
        y = down(F.silu(gate) * value, counts)
        return te.moe_unpermute(y, row_ids, merging_probs=weights, map_type="index")

    def gradients(found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        grad_x, grad_weights, *parts = found
        return grad_x, grad_weights, torch.stack(parts[: shape.E]), torch.stack(parts[shape.E :])

    leaves = (x, weights, *up_parameters, *down_parameters)
    return Layer("Transformer Engine", "peer", leaves, forward, gradients)
