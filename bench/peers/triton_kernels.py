"""`triton_kernels` of OpenAI: its top-k with given experts sorts, then two ragged products and a reduction.

Written after the sources in Triton's main branch (`matmul.py` of commit 0223f697, `bench_mlp.py` of 0206ecf9); never run here.
Its products have no gradients. The package of this name on PyPI is another one.
"""

from __future__ import annotations

import math
from importlib.util import find_spec

import torch
from torch import Tensor

from ..inputs import Case
from ..variants import Layer
from .requirements import missing, unsupported


def why_not(case: Case) -> str | None:
    if (reason := missing("triton_kernels", "1.0")) is not None:
        return f"{reason}, from the sources of Triton"
    if find_spec("triton_kernels.matmul") is None:
        return "needs a newer triton_kernels, which has `triton_kernels.matmul`"
    return unsupported(case, (torch.bfloat16, torch.float16))


def build(case: Case) -> Layer:
    from triton_kernels.matmul import FnSpecs, FusedActivation, matmul
    from triton_kernels.reduce import reduce
    from triton_kernels.swiglu import swiglu_fn
    from triton_kernels.tensor import make_ragged_tensor_metadata
    from triton_kernels.topk import topk

    T, H, F, E, K, M = case.shape.T, case.shape.H, case.shape.F, case.shape.E, case.shape.K, case.shape.M
    x, weights, up_proj, down_proj = leaves = case.leaves()
    expert_ids = case.expert_ids.short()  # as its top-k writes them
    scores = x.new_zeros(T, E)  # top-k with given experts looks values up here, of which nothing is used
    up = up_proj.detach().view(E, 2, F, H).transpose(1, 2).reshape(E, 2 * F, H).transpose(1, 2)  # gate and up in turn
    down = down_proj.detach().transpose(1, 2)
    # silu(gate) * (up + 1) is what its SwiGLU computes for alpha = 1
    minus_one = torch.tensor([0.0, -1.0], device=case.device).repeat(E, F)
    swiglu = FusedActivation(FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"), reduction_n=2), (1.0, math.inf))

    def forward() -> Tensor:
        order = topk(scores, K, apply_softmax=False, y_indx=expert_ids).mask_metadata
        slots = order.col_sorted_indx
        rows = make_ragged_tensor_metadata(order.col_sum, M)
        hidden = matmul(x, up, minus_one, a_ragged_metadata=rows, gather_indx=slots // K, fused_activation=swiglu)
        y = matmul(hidden, down, None, a_ragged_metadata=rows, scatter_indx=slots)
        return reduce(y.view(T, K, H), dim=1, scale=weights[:, :, None].expand(T, K, H))[0]

    return Layer("triton_kernels", "peer", leaves, forward, inference_only=True)
