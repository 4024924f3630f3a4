"""Every tile that a configuration can choose, on any architecture, with a dtype that chooses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from itertools import product

import pytest
import torch

from blocksparse_moe_kernels.config import SHARED_MEMORY_KB, GemmConfig, column_product_tile, row_product_tile
from tests.support import HAS_CUDA

DTYPES = (torch.float32, torch.bfloat16 if HAS_CUDA else torch.float16)
HEIGHTS = (16, 32, 64, 128)
ROWS_A_STEP = (16, 32, 64)
DEPTHS = (1, 2, 3, 4)


def _chosen(sizes: tuple[int, ...], *tiles: Callable[..., GemmConfig]) -> list[tuple[GemmConfig, torch.dtype]]:
    choices = product(tiles, sizes, DTYPES, SHARED_MEMORY_KB)
    return list(dict.fromkeys((tile(size, dtype, architecture), dtype) for tile, size, dtype, architecture in choices))


def _parametrized(configs: list[tuple[GemmConfig, torch.dtype]]) -> pytest.MarkDecorator:
    def name(config: GemmConfig, dtype: torch.dtype) -> str:
        tile = f"{config.block_m}x{config.block_n}x{config.block_k}"
        path = "tma" if config.tma else "pointers"
        return f"{tile}-w{config.num_warps}-s{config.num_stages}-{path}-{str(dtype).removeprefix('torch.')}"

    return pytest.mark.parametrize(("config", "dtype"), [pytest.param(*choice, id=name(*choice)) for choice in configs])


def _at_every_depth(configs: list[tuple[GemmConfig, torch.dtype]]) -> list[tuple[GemmConfig, torch.dtype]]:
    """On a GPU the pipeline at depths of 1 to 4; the interpreter has none."""
    if not HAS_CUDA:
        return configs
    deeper = [(replace(config, num_stages=depth), dtype) for config, dtype in configs for depth in DEPTHS]
    return list(dict.fromkeys(deeper))


ROW_CONFIGS = _chosen(
    HEIGHTS,
    row_product_tile,
    partial(row_product_tile, tma=True),
    partial(row_product_tile, tma=True, narrow=True),
)
COLUMN_CONFIGS = _chosen(ROWS_A_STEP, column_product_tile, partial(column_product_tile, tma=True))
each_row_config = _parametrized(ROW_CONFIGS)
each_column_config = _parametrized(COLUMN_CONFIGS)
each_row_config_and_depth = _parametrized(_at_every_depth(ROW_CONFIGS))
each_column_config_and_depth = _parametrized(_at_every_depth(COLUMN_CONFIGS))


def skip_what_does_not_fit(test: Callable) -> Callable:
    """A depth that no configuration chooses may need more shared memory than the GPU has; one that is chosen may not."""
    from triton.runtime.errors import OutOfResources

    @wraps(test)
    def run(config: GemmConfig, dtype: torch.dtype, **fixtures) -> None:
        try:
            test(config, dtype, **fixtures)
        except OutOfResources as error:
            if (config, dtype) in ROW_CONFIGS + COLUMN_CONFIGS:
                raise
            pytest.skip(f"no configuration has this depth, and it does not fit: {error}")

    return run
