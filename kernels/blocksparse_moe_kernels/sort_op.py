"""The sort of a topology as a registered op, so that torch.compile takes it whole: Triton's kernels on CUDA."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

MAX_EXPERTS = 1024
"""Above it, ranking the experts by size takes one program too long; see triton/topology.py."""

_HAS_TRITON = find_spec("triton") is not None
_LIBRARY = torch.library.Library("blocksparse_moe_kernels", "DEF")
_LIBRARY.define(
    "sort_ids(Tensor ids, int num_experts, int block_m) -> "
    "(Tensor tokens, Tensor slots, Tensor rows, Tensor offsets, Tensor by_size, Tensor tiles, Tensor num_tiles)"
)


def has_kernel(device: torch.device, num_experts: int) -> bool:
    """Whether `sort_ids` runs there; elsewhere torch's own sort gives the same result."""
    return device.type == "cuda" and _HAS_TRITON and num_experts <= MAX_EXPERTS


def tile_capacity(num_slots: int, num_experts: int, block_m: int) -> int:
    """Row tiles of height block_m that any routing of the slots needs at most."""
    return (num_slots + min(num_experts, num_slots) * (block_m - 1)) // block_m


def _run(ids: Tensor, num_experts: int, block_m: int) -> tuple[Tensor, ...]:
    from .triton.topology import sort_ids

    return sort_ids(ids, num_experts, block_m)


def _fake(ids: Tensor, num_experts: int, block_m: int) -> tuple[Tensor, ...]:
    M = ids.numel()
    shapes = ((M,), (M,), (M,), (num_experts + 1,), (num_experts,), (3, tile_capacity(M, num_experts, block_m)), ())
    return tuple(ids.new_empty(shape, dtype=torch.int32) for shape in shapes)


_LIBRARY.impl("sort_ids", _run, "CUDA")
torch.library.register_fake("blocksparse_moe_kernels::sort_ids", _fake, lib=_LIBRARY)
sort_ids = torch.ops.blocksparse_moe_kernels.sort_ids
