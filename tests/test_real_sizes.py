"""Every tile that can be chosen, at real sizes on a GPU: the whole output against sums in fp64, and 100 runs bit for bit.

The fresh memory that launchers ask for is poisoned, so a tile that no program wrote shows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from blocksparse_moe.products import implementation
from blocksparse_moe_kernels import BlockSparse, Columns, Topology, get_activation
from blocksparse_moe_kernels.config import GemmConfig, architecture_of
from tests.aot_cases import DTYPES, column_configs, distinct, row_configs
from tests.cases.helpers import FreshMemory
from tests.support import DEVICE, HAS_CUDA, assert_within_budget

pytestmark = pytest.mark.gpu

ARCHITECTURE = architecture_of(DEVICE)
EXPERTS, TOP_K = 48, 4
SIZES = {"multiples of all tiles": (6144, 2048, 768), "of 16 bytes only": (6001, 2040, 776), "odd": (6001, 1023, 385)}
"""T, H and F."""

RUNS = {torch.bfloat16: 100, torch.float16: 20, torch.float32: 20}


def tiles(configs: Callable[..., list[GemmConfig]]) -> list:
    """(dtype, tile): what either path of the table holds."""
    return [
        pytest.param(DTYPES[name], tile, id=f"{name}-{describe(tile)}")
        for name in DTYPES
        for tile in distinct([*configs(name, ARCHITECTURE), *configs(name, ARCHITECTURE, tma=False)])
    ]


def describe(tile: GemmConfig) -> str:
    size = f"{tile.block_m}x{tile.block_n}x{tile.block_k}"
    return f"{size}-w{tile.num_warps}-s{tile.num_stages}-{'tma' if tile.tma else 'pointers'}"


class Operands:
    """Random operands of the products of a layer, with routing that is uneven, leaves an expert empty and drops slots."""

    def __init__(self, sizes: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        T, H, F = SIZES[sizes]
        ids = (torch.rand(T, TOP_K, device=DEVICE) ** 2 * (EXPERTS + 1)).long()  # EXPERTS itself is none
        ids[ids == 5] = -1
        self.topology = Topology.from_ids(ids, EXPERTS)
        self.kept = int(self.topology.num_rows)
        self.dtype = dtype
        self.x = self.randn(T, H)
        self.up, self.up_bias = self.randn(EXPERTS, 2 * F, H, scale=H**-0.5), self.randn(EXPERTS, 2 * F)
        self.down, self.down_bias = self.randn(EXPERTS, H, F, scale=F**-0.5).transpose(1, 2), self.randn(EXPERTS, H)
        self.pre, self.hidden = self.sparse(2 * F), self.sparse(F)

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=DEVICE) * scale).to(self.dtype)

    def sparse(self, columns: int) -> BlockSparse:
        values = self.randn(self.topology.num_slots, columns)
        values[self.kept :] = torch.nan
        return BlockSparse(values, self.topology, Columns.equal(columns, EXPERTS))

    def by_expert(self, product: Callable[[int, slice], Tensor]) -> Tensor:
        """What `product` gives for each expert and its rows, one below the other."""
        bounds = self.topology.offsets.tolist()
        return torch.cat([product(expert, slice(*ends)) for expert, ends in enumerate(pairwise(bounds))])

    def rows_of_x(self) -> Tensor:
        return self.x[self.topology.tokens[: self.kept].long()]


def in_torch(operands: Operands, dtype: torch.dtype) -> dict[str, Tensor]:
    """The products by torch's own matrix products, expert by expert, on operands of `dtype`."""
    o, x = operands, operands.rows_of_x().to(dtype)
    up, down = o.up.to(dtype), o.down.to(dtype)
    up_bias, down_bias = o.up_bias.to(dtype), o.down_bias.to(dtype)
    pre, hidden = o.pre.values.to(dtype), o.hidden.values.to(dtype)
    up_x = o.by_expert(lambda e, rows: x[rows] @ up[e].T + up_bias[e])
    return {
        "pre": up_x,
        "act": get_activation("swiglu")(up_x),
        "sdd": o.by_expert(lambda e, rows: x[rows] @ down[e].T),
        "down": o.by_expert(lambda e, rows: hidden[rows] @ down[e] + down_bias[e]),
        "grad_rows": o.by_expert(lambda e, rows: pre[rows] @ up[e]),
        "grad_up": o.by_expert(lambda e, rows: pre[rows].T @ x[rows]),
        "grad_down": o.by_expert(lambda e, rows: hidden[rows].T @ x[rows]),
    }


def assert_right_and_repeatable(run: Callable[[], dict[str, Tensor]], operands: Operands, memory: FreshMemory) -> None:
    first = run()
    memory.check_guards()
    oracle, torchs = in_torch(operands, torch.float64), in_torch(operands, operands.dtype)
    for name, result in first.items():
        assert_within_budget(name, result, oracle[name], torchs[name], operands.dtype)
    del oracle, torchs
    for _ in range(RUNS[operands.dtype] - 1):
        memory.buffers.clear()
        assert all(torch.equal(result, first[name]) for name, result in run().items())


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("dtype", "tile"), tiles(row_configs) if HAS_CUDA else [])
def test_row_products(dtype, tile, sizes, fresh_memory):
    o, kernels, swiglu = Operands(sizes, dtype), implementation("triton"), get_activation("swiglu")
    assert o.topology.schedule(tile.block_m).capacity > 0

    def run() -> dict[str, Tensor]:
        pre, act = kernels.sdd_activation(o.x, o.up, o.topology, swiglu, bias=o.up_bias, config=tile)
        results = {
            "pre": pre.values,
            "act": act.values,
            "sdd": kernels.sdd(o.x, o.down, o.topology, config=tile).values,
            "down": kernels.dsd(o.hidden, o.down, bias=o.down_bias, config=tile),
            "grad_rows": kernels.dsd(o.pre, o.up, config=tile),
        }
        assert all(result[o.kept :].isnan().all() for result in results.values()), "rows behind the last are not written"
        return {name: result[: o.kept] for name, result in results.items()}

    assert_right_and_repeatable(run, o, fresh_memory)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("dtype", "tile"), tiles(column_configs) if HAS_CUDA else [])
def test_column_products(dtype, tile, sizes, fresh_memory):
    o, kernels = Operands(sizes, dtype), implementation("triton")

    def run() -> dict[str, Tensor]:
        grad_up = kernels.dsd_transposed(o.pre, o.x, order="tokens", like=o.up, config=tile)
        grad_down = kernels.dsd_transposed(o.hidden, o.x, order="tokens", like=o.down, config=tile)
        return {"grad_up": grad_up.flatten(0, 1), "grad_down": grad_down.flatten(0, 1)}

    assert_right_and_repeatable(run, o, fresh_memory)
