"""The tiles of the kernels: what is chosen is what the tables say, and what they say fits."""

from __future__ import annotations

import json

import pytest
import torch

from blocksparse_moe_kernels import config
from blocksparse_moe_kernels.config import (
    SHARED_MEMORY_KB,
    GemmConfig,
    TileKey,
    choose_block_k,
    choose_block_m,
    column_product_tile,
    read_table,
    row_product_tile,
    table_file,
    tile_keys,
)

TABLES = [architecture for architecture in SHARED_MEMORY_KB if table_file(architecture).is_file()]
HALF = (torch.bfloat16, torch.float16)


def looked_up(key: TileKey, architecture: int, dtype: torch.dtype = torch.bfloat16) -> GemmConfig:
    if key.product == "rows":
        return row_product_tile(key.block, dtype, architecture, key.path == "tma", key.narrow)
    return column_product_tile(key.block, dtype, architecture, key.path == "tma")


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """A folder in place of the shipped one."""
    config._measured_tiles.cache_clear()
    monkeypatch.setattr(config, "table_file", lambda architecture: tmp_path / f"sm_{architecture}.json")
    yield tmp_path
    config._measured_tiles.cache_clear()


@pytest.mark.parametrize("architecture", [90, 100])
@pytest.mark.parametrize(
    ("key", "tile"),
    [
        (TileKey("rows", "tma", 16), GemmConfig(16, 256, 64, 4, 4, tma=True)),
        (TileKey("rows", "tma", 64), GemmConfig(64, 256, 64, 4, 4, tma=True)),
        (TileKey("rows", "tma", 128), GemmConfig(128, 256, 64, 8, 3, tma=True)),
        (TileKey("rows", "tma", 16, narrow=True), GemmConfig(16, 128, 128, 4, 4, tma=True)),
        (TileKey("rows", "tma", 128, narrow=True), GemmConfig(128, 64, 128, 4, 4, tma=True)),
        (TileKey("rows", "pointers", 32), GemmConfig(32, 128, 64, 4, 3)),
        (TileKey("rows", "pointers", 128), GemmConfig(128, 256, 64, 8, 3)),
        (TileKey("rows", "pointers", 128, narrow=True), GemmConfig(128, 256, 64, 8, 3)),
        (TileKey("columns", "tma", 64), GemmConfig(256, 128, 64, 8, 3, tma=True)),
        (TileKey("columns", "pointers", 16), GemmConfig(64, 128, 16, 4, 4)),
    ],
)
def test_what_hopper_takes_today(key, tile, architecture):
    """A table that is tuned anew changes this list, so that its review sees what changes."""
    assert all(looked_up(key, architecture, dtype) == tile for dtype in HALF)


def test_what_was_not_measured_is_arithmetic():
    for architecture in (80, 86, 89, 120):
        for tma in (False, True):
            assert row_product_tile(64, torch.bfloat16, architecture, tma) == GemmConfig(64, 128, 32, 4, 3)
            assert column_product_tile(64, torch.bfloat16, architecture, tma) == GemmConfig(128, 128, 32, 8, 3)
    for architecture in SHARED_MEMORY_KB:
        assert row_product_tile(32, torch.float32, architecture, tma=True) == GemmConfig(32, 64, 32, 4, 2)
        assert column_product_tile(16, torch.float32, architecture) == GemmConfig(64, 64, 16, 4, 2)


def test_keys_are_what_can_be_chosen():
    keys = tile_keys(90)
    assert {key.block for key in keys if key.product == "rows"} == {choose_block_m(rows, 1) for rows in range(1, 1025)}
    assert {key.block for key in keys if key.product == "columns"} == {choose_block_k(rows, 1) for rows in range(1, 1025)}
    assert len(set(keys)) == len(keys) == 2 * (4 * 2 + 3)
    assert {key.path for key in tile_keys(80)} == {"pointers"}


def test_hopper_is_measured_and_nobody_borrows_beside_a_table():
    assert 90 in TABLES
    assert all(other in TABLES and borrower not in TABLES for borrower, other in config._BORROWED.items())


@pytest.mark.parametrize("architecture", TABLES)
def test_a_table_is_complete_and_every_entry_is_loaded(architecture):
    entries = json.loads(table_file(architecture).read_text())
    assert [TileKey(**entry["key"]) for entry in entries] == list(tile_keys(architecture)), "each once, in order"
    for entry in entries:
        key, tile = TileKey(**entry["key"]), GemmConfig(**entry["tile"])
        assert looked_up(key, architecture) == tile
        assert (tile.block_m if key.product == "rows" else tile.block_k) == key.block
        assert tile.tma == (key.path == "tma")
        assert tile.num_warps in (4, 8) and 1 <= tile.num_stages <= 8
        bytes_a_step = 2 * tile.block_k * (tile.block_m + tile.block_n)
        assert bytes_a_step * (tile.num_stages - 1) <= SHARED_MEMORY_KB[architecture] * 1024


@pytest.mark.parametrize("architecture", TABLES)
def test_what_was_measured_says_where(architecture):
    for entry in json.loads(table_file(architecture).read_text()):
        assert entry.keys() == {"key", "tile", "machine", "measured"}
        assert (entry["machine"] is None) == (entry["measured"] is None)
        if entry["measured"] is not None:
            assert entry["machine"].keys() == {"gpu", "torch", "triton", "date"}
            for line in entry["measured"]:
                assert line.keys() == {"op", "shape", "ms", "share_of_dense"}
                assert line["ms"] > 0 and line["share_of_dense"] > 0


def test_a_table_of_its_own_replaces_the_arithmetic(tables):
    assert looked_up(TileKey("columns", "pointers", 32), 86) == GemmConfig(128, 128, 32, 8, 3)
    config._measured_tiles.cache_clear()
    key, tile = TileKey("columns", "pointers", 32), GemmConfig(64, 64, 32, 4, 5)
    text = json.dumps([{"key": key._asdict(), "tile": vars(tile), "machine": None, "measured": None}])
    (tables / "sm_86.json").write_text(text)
    assert read_table(text) == {key: tile}
    assert looked_up(key, 86) == column_product_tile(32, torch.float16, 86, tma=True) == tile


def test_a_missing_entry_is_named_with_the_cure(tables):
    (tables / "sm_90.json").write_text("[]")
    with pytest.raises(LookupError, match=r"sm_90 must have .* none for .*product='rows', path='tma', block=64.*bench tune"):
        row_product_tile(64, torch.bfloat16, 90, tma=True)
