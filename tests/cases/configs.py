"""Every tile that a configuration can choose, on any architecture, with a dtype that chooses it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from blocksparse_moe_kernels.config import SHARED_MEMORY_KB, GemmConfig, column_product_tile, row_product_tile
from tests.support import HAS_CUDA

DTYPES = (torch.float32, torch.bfloat16 if HAS_CUDA else torch.float16)
HEIGHTS = (16, 32, 64, 128)


def _chosen(tile) -> list[tuple[GemmConfig, torch.dtype]]:
    return list(dict.fromkeys((tile(*choice), choice[1]) for choice in product(HEIGHTS, DTYPES, SHARED_MEMORY_KB)))


def _parametrized(configs: list[tuple[GemmConfig, torch.dtype]]) -> pytest.MarkDecorator:
    """The configurations; on a GPU at every depth of the pipeline, in the interpreter, which has none, at their own."""
    cases = []
    for config, dtype in configs:
        for num_stages in (1, 2, 3, 4) if HAS_CUDA else (config.num_stages,):
            tile = f"{config.block_m}x{config.block_n}x{config.block_k}"
            name = f"{tile}-w{config.num_warps}-s{num_stages}-{str(dtype).removeprefix('torch.')}"
            cases.append(pytest.param(replace(config, num_stages=num_stages), dtype, id=name))
    return pytest.mark.parametrize(("config", "dtype"), cases)


ROW_CONFIGS = _chosen(row_product_tile)
COLUMN_CONFIGS = _chosen(column_product_tile)
each_row_config = _parametrized(ROW_CONFIGS)
each_column_config = _parametrized(COLUMN_CONFIGS)
