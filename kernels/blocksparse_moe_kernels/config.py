"""Tile configurations of the GEMM kernels, chosen by what the host knows. Nothing searches at call time.

Where an architecture was measured, the tiles for 16-bit operands stand in `configs/sm_XX.json`, which `python -m bench tune`
writes and people review; elsewhere, and for fp32, they are plain arithmetic.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

import torch

SHARED_MEMORY_KB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory that one block may use, by compute capability (CUDA programming guide, table of technical specifications)."""

HAVE_TMA = (90, 100)
"""Architectures whose tensor memory accelerator the kernels use."""

_BORROWED = {100: 90}
"""Architectures that take the measured tiles of another one, until they have a table of their own."""

_HEIGHTS, _DEPTHS = (16, 32, 64, 128), (16, 32, 64)
"""What `choose_block_m` and `choose_block_k` choose from."""


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


class TileKey(NamedTuple):
    """What a measured tile is chosen by.

    Attributes:
        product: "rows" for sdd and dsd, "columns" for the transposed dsd.
        path: "tma" where the tensor memory accelerator can address the operands, else "pointers".
        block: of "rows" the height of the row tiles (block_m), of "columns" the depth of a step (block_k).
        narrow: of "rows" only; for so few rows that wide tiles would leave multiprocessors idle.
    """

    product: Literal["rows", "columns"]
    path: Literal["tma", "pointers"]
    block: int
    narrow: bool = False


def tile_keys(architecture: int) -> tuple[TileKey, ...]:
    """What a table of the architecture must have an entry for."""
    paths = dict.fromkeys(_path(architecture, tma) for tma in (True, False))
    return (
        *(TileKey("rows", *choice) for choice in product(paths, _HEIGHTS, (False, True))),
        *(TileKey("columns", *choice) for choice in product(paths, _DEPTHS)),
    )


def _path(architecture: int, tma: bool) -> Literal["tma", "pointers"]:
    return "tma" if tma and architecture in HAVE_TMA else "pointers"


def table_file(architecture: int) -> Path:
    """Where the measured tiles of an architecture are, if there are any."""
    return Path(__file__).parent / "configs" / f"sm_{architecture}.json"


def read_table(text: str) -> dict[TileKey, GemmConfig]:
    """The tiles of a table, as `python -m bench tune` writes it."""
    return {TileKey(**entry["key"]): GemmConfig(**entry["tile"]) for entry in json.loads(text)}


@cache
def _measured_tiles(architecture: int) -> dict[TileKey, GemmConfig] | None:
    file = table_file(_BORROWED.get(architecture, architecture))
    return read_table(file.read_text(encoding="utf-8")) if file.is_file() else None


def _measured_tile(architecture: int, key: TileKey) -> GemmConfig | None:
    """The tile for 16-bit operands; None where the architecture was not measured."""
    tiles = _measured_tiles(architecture)
    if tiles is None:
        return None
    if key not in tiles:
        raise LookupError(
            f"config: the table of tiles for sm_{architecture} must have an entry for every key; it has none for {key}. Add a "
            "tile that works, and `python -m bench tune` looks for a faster one."
        )
    return tiles[key]


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
    return row_product_tile(block_m, dtype, architecture, tma, narrow=True) if are_few(num_slots, width, wide, device) else wide


def are_few(num_slots: int, width: int, wide: GemmConfig, device: torch.device) -> bool:
    """Whether `wide` tiles of a product of so many rows would leave multiprocessors idle."""
    return num_slots * ceil_div(width, wide.block_n) < num_programs(device)


def row_product_tile(
    block_m: int, dtype: torch.dtype, architecture: int, tma: bool = False, narrow: bool = False
) -> GemmConfig:
    """`narrow`: for so few rows that wide tiles would leave multiprocessors idle."""
    if dtype == torch.float32:
        return GemmConfig(block_m, 64, 32, 4, 2)
    measured = _measured_tile(architecture, TileKey("rows", _path(architecture, tma), block_m, narrow))
    return measured or GemmConfig(block_m, 128, 32, 8 if block_m == 128 else 4, 3)


@lru_cache(maxsize=1024)
def column_product_config(
    num_slots: int, num_experts: int, dtype: torch.dtype, device: torch.device, tma: bool = False
) -> GemmConfig:
    """Tile of the transposed dsd, which reduces over the rows of an expert."""
    return column_product_tile(choose_block_k(num_slots, num_experts), dtype, architecture_of(device), tma)


def column_product_tile(block_k: int, dtype: torch.dtype, architecture: int, tma: bool = False) -> GemmConfig:
    if dtype == torch.float32:
        return GemmConfig(64, 64, min(block_k, 32), 4, 2)
    measured = _measured_tile(architecture, TileKey("columns", _path(architecture, tma), block_k))
    return measured or GemmConfig(128, 128, min(block_k, 32), 8, 3)
