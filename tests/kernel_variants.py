"""How many kernels are compiled for layers of 50 different numbers of tokens; without a GPU, a launch being recorded only.

    python -m tests.kernel_variants            a line of JSON: variants of each kernel

In a process of its own, as tests.aot.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict

import torch

from blocksparse_moe_kernels.triton.dsd_transposed import dsd_transposed

from .aot import Launch, kernels, recorder
from .aot_cases import (
    ACTIVATIONS,
    Topology,
    activation_backward,
    choose_block_m,
    combine,
    dsd,
    sdd,
    sdd_activation,
    sort_ids,
)

NUM_EXPERTS, TOP_K, HIDDEN, FFN = 128, 8, 2048, 768
TOKENS = sorted({1, 2, 3, 16, 8192, *random.Random(0).sample(range(1, 8193), 45)})


def launch_layer(num_tokens: int) -> None:
    """The kernels of a forward and backward pass of Qwen3-30B-A3B's experts, on the meta device."""

    def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    ids = new(num_tokens, TOP_K, dtype=torch.int64)
    topology, activation = Topology.from_ids(ids, NUM_EXPERTS), ACTIVATIONS["swiglu"]
    x, weights = new(num_tokens, HIDDEN), new(num_tokens, TOP_K, dtype=torch.float32)
    up, down = new(NUM_EXPERTS, 2 * FFN, HIDDEN), new(NUM_EXPERTS, HIDDEN, FFN).transpose(1, 2)
    sort_ids(ids, NUM_EXPERTS, choose_block_m(topology.num_slots, NUM_EXPERTS))
    pre, hidden = sdd_activation(x, up, topology, activation)
    combine(dsd(hidden, down), topology, weights)
    grad_pre, scaled, _ = activation_backward(sdd(x, down, topology), pre, activation, weights)
    dsd_transposed(scaled, x, order="tokens", like=down)
    combine(dsd(grad_pre, up), topology)
    dsd_transposed(grad_pre, x, order="tokens", like=up)


def variants() -> dict[str, int]:
    launches: list[Launch] = []
    for kernel in kernels():
        kernel.run = recorder(kernel, launches)
    for num_tokens in TOKENS:
        launch_layer(num_tokens)
    found: dict[str, set[str]] = defaultdict(set)
    for launch in launches:
        source, options = launch.source()
        found[launch.kernel.__name__].add(repr((source.signature, source.constants, source.attrs, options)))
    return {kernel: len(of_it) for kernel, of_it in found.items()}


if __name__ == "__main__":
    print(json.dumps(variants()))
