"""Tile configurations of the GEMM kernels: plain arithmetic from what the host knows. Nothing searches at call time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

SHARED_MEMORY_KB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory that one block may use, by compute capability (CUDA programming guide, table of technical specifications)."""

_HAVE_TMA = (90, 100)


@dataclass(frozen=True)
class GemmConfig:
    """Tile of one GEMM kernel.

    Attributes:
        block_m: rows of the output tile (for the transposed product: columns of the sparse operand).
        block_n: columns of the output tile.
        block_k: depth of one step of the reduction.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
        tma: whether operands that the tensor memory accelerator can address go through it.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    tma: bool = False

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"GemmConfig: {name} must be a power of two of at least 16, as tensor cores need; got {size}.")


@lru_cache(maxsize=64)
def architecture_of(device: torch.device) -> int:
    """The architecture whose tiles suit `device`: the newest known one that is not newer; sm_90 for the interpreter."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return max((known for known in SHARED_MEMORY_KB if known <= 10 * major + minor), default=min(SHARED_MEMORY_KB))


def ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def next_power_of_2(number: int) -> int:
    """The least power of two that is at least `number`, a positive one."""
    return 1 << (number - 1).bit_length()


@lru_cache(maxsize=64)
def num_programs(device: torch.device) -> int:
    """Programs of a persistent kernel: one for each multiprocessor; few in the interpreter, so that each has several tiles."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def _mean_rows(num_slots: int, num_experts: int) -> float:
    """Rows of an expert that has any, as far as the host can know."""
    return num_slots / max(1, min(num_experts, num_slots))


def choose_block_m(num_slots: int, num_experts: int) -> int:
    """Height of the row tiles: a low tile wastes fewer rows, a high one reads the weights less often (measured on an H200)."""
    mean_rows = _mean_rows(num_slots, num_experts)
    return next((height for most, height in ((8, 16), (16, 32), (128, 64)) if mean_rows <= most), 128)


def choose_block_k(num_slots: int, num_experts: int) -> int:
    """Rows that a step of the transposed product reduces."""
    mean_rows = _mean_rows(num_slots, num_experts)
    return next((depth for most, depth in ((8, 16), (64, 32)) if mean_rows <= most), 64)


@lru_cache(maxsize=1024)
def row_product_config(
    num_slots: int, num_experts: int, width: int, dtype: torch.dtype, device: torch.device, tma: bool = False
) -> GemmConfig:
    """Tile of sdd and dsd, whose rows come in the tiles of a schedule.

    `width` is that of the result, all halves; `tma` says that the tensor memory accelerator can address the operands.
    """
    block_m, architecture = choose_block_m(num_slots, num_experts), architecture_of(device)
    wide = row_product_tile(block_m, dtype, architecture, tma)
    few = num_slots * ceil_div(width, wide.block_n) < num_programs(device)
    return row_product_tile(block_m, dtype, architecture, tma, narrow=True) if few else wide


def row_product_tile(
    block_m: int, dtype: torch.dtype, architecture: int, tma: bool = False, narrow: bool = False
) -> GemmConfig:
    """`narrow`: for so few rows that wide tiles would leave multiprocessors idle."""
    if dtype == torch.float32:
        return GemmConfig(block_m, 64, 32, 4, 2)
    if architecture not in _HAVE_TMA:
        return GemmConfig(block_m, 128, 32, 8 if block_m == 128 else 4, 3)
    if tma and narrow:
        return GemmConfig(block_m, 64, 128, 4, 4, tma)
    if block_m == 128:
        return GemmConfig(block_m, 256, 64, 8, 3, tma)
    return GemmConfig(block_m, 256, 64, 4, 4, tma) if tma else GemmConfig(block_m, 128, 64, 4, 3)


@lru_cache(maxsize=1024)
def column_product_config(
    num_slots: int, num_experts: int, dtype: torch.dtype, device: torch.device, tma: bool = False
) -> GemmConfig:
    """Tile of the transposed dsd, which reduces over the rows of an expert."""
    return column_product_tile(choose_block_k(num_slots, num_experts), dtype, architecture_of(device), tma)


def column_product_tile(block_k: int, dtype: torch.dtype, architecture: int, tma: bool = False) -> GemmConfig:
    if dtype == torch.float32:
        return GemmConfig(64, 64, min(block_k, 32), 4, 2)
    if architecture not in _HAVE_TMA:
        return GemmConfig(128, 128, min(block_k, 32), 8, 3)
    return GemmConfig(256, 128, block_k, 8, 3, tma) if tma else GemmConfig(128, 256, block_k, 8, 3)
