"""The tuner without a clock: what it tries, what it keeps, and that the kernels' configuration reads what it writes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from bench import tune
from bench.__main__ import app
from bench.shapes import GPU_SHAPES, SHAPES, Shape
from bench.timing import Timing
from bench.tune import Figures, Outcome, Trial, candidates, fastest, fitting_shape, present_tile, table_text, tune_key
from blocksparse_moe_kernels import config
from blocksparse_moe_kernels.config import (
    SHARED_MEMORY_KB,
    GemmConfig,
    TileKey,
    column_product_tile,
    row_product_tile,
    tile_keys,
)

from .support import DEVICE, HAS_CUDA

CPU = torch.device("cpu")
KEY = TileKey("rows", "tma", 64)
PRESENT = GemmConfig(64, 256, 64, 4, 4, tma=True)
FASTER, CLOSE, WRONG = (replace(PRESENT, num_stages=stages) for stages in (2, 3, 5))
MACHINE = {"gpu": "a GPU", "torch": "2.13.0", "triton": "3.7.1", "date": "2026-01-01"}


def figures(**ms: float) -> Figures:
    tiles = {"present": PRESENT, "faster": FASTER, "close": CLOSE}
    return Figures("dsd", "a shape", {tiles[name]: time for name, time in ms.items()}, dense_ms=0.5)


def fake_timer(works):
    """Runs each work once; deeper pipelines are slower."""
    for work in works.values():
        work()
    return {name: Timing(1.0 if name == "dense" else float(name[-1]), 0.0) for name in works}


@pytest.fixture
def no_table(tmp_path, monkeypatch):
    """The shipped tables are elsewhere, and what is in `tmp_path` is read in their place."""
    config._measured_tiles.cache_clear()
    for module in (config, tune):
        monkeypatch.setattr(module, "table_file", lambda architecture: tmp_path / f"sm_{architecture}.json")
    yield tmp_path
    config._measured_tiles.cache_clear()


def test_less_than_4_percent_is_equal():
    assert fastest(PRESENT, [figures(present=1.0, faster=0.97)]) == PRESENT
    assert fastest(PRESENT, [figures(present=1.0, faster=0.95, close=0.96)]) == FASTER
    assert fastest(PRESENT, []) == PRESENT


def test_the_geometric_mean_decides():
    assert fastest(PRESENT, [figures(present=1.0, faster=0.5), figures(present=1.0, faster=1.8)]) == FASTER
    assert fastest(PRESENT, [figures(present=1.0, faster=0.5), figures(present=1.0, faster=2.1)]) == PRESENT
    assert fastest(PRESENT, [figures(present=1.0, faster=0.1), figures(present=1.0)]) == PRESENT, "it must be right everywhere"


@pytest.mark.parametrize("architecture", SHARED_MEMORY_KB)
def test_candidates_are_few_fit_and_begin_with_the_present_tile(architecture):
    for key in tile_keys(architecture):
        present = present_tile(key, architecture)
        first, *others = tiles = candidates(key, present, architecture)
        assert first == present and len(set(tiles)) == len(tiles) and 4 <= len(others) <= 40, key
        for tile in others:
            assert (tile.block_m if key.product == "rows" else tile.block_k) == key.block
            assert tile.tma == (key.path == "tma")
            steps = tile.num_stages if architecture in (90, 100) and tile.block_m >= 64 else tile.num_stages - 1
            assert 2 * steps * tile.block_k * (tile.block_m + tile.block_n) <= 1024 * SHARED_MEMORY_KB[architecture]
            assert 2 <= tile.num_stages <= 5 and tile.block_m * tile.block_n <= 128 * 32 * tile.num_warps


def test_shapes_get_as_many_tokens_as_look_the_key_up():
    qwen = SHAPES["qwen3-30b-a3b"]
    assert {height: fitting_shape(TileKey("rows", "tma", height), "dsd", qwen, CPU).T for height in (128, 64, 32, 16)} == {
        128: qwen.T, 64: 2048, 32: 256, 16: 128
    }  # fmt: skip
    assert {depth: fitting_shape(TileKey("columns", "tma", depth), "grad_up", qwen, CPU).T for depth in (64, 32, 16)} == {
        64: qwen.T, 32: 1024, 16: 128
    }  # fmt: skip
    assert fitting_shape(TileKey("rows", "tma", 16), "dsd", Shape("odd", 8, 12, 16, 4, 2), CPU) is None, "no TMA"
    assert fitting_shape(TileKey("rows", "pointers", 16), "dsd", Shape("odd", 8, 12, 16, 4, 2), CPU).T == 8


def test_few_rows_look_narrow_tiles_up(monkeypatch):
    monkeypatch.setattr(config, "num_programs", lambda device: 132)
    narrow, low = TileKey("rows", "tma", 16, narrow=True), TileKey("rows", "tma", 128, narrow=True)
    found = {name: fitting_shape(narrow, "dsd", SHAPES[name], CPU) for name in GPU_SHAPES}
    assert {name: shape and shape.T for name, shape in found.items()} == {
        "mixtral-8x7b": 4, "qwen3-30b-a3b": 2, "deepseek-v3-ep8": None, "olmoe-1b-7b": 2
    }  # fmt: skip
    assert all(fitting_shape(low, "dsd", SHAPES[name], CPU) is None for name in GPU_SHAPES)


def test_what_is_wrong_or_does_not_run_is_left_out_and_not_timed():
    ran: list[GemmConfig] = []
    broken = replace(PRESENT, block_n=128)

    def run(tile):
        ran.append(tile)
        if tile == broken:
            raise RuntimeError("out of resource: shared memory\nand a long story")
        value = 1.02 if tile == WRONG else 1.004 if tile == CLOSE else 1.0
        return (torch.full((32, 16), value, dtype=torch.bfloat16),)

    shape = Shape("a shape", 16, 16, 16, 4, 2)
    trials = [Trial(op, shape, run, lambda: None) for op in ("sdd_activation", "dsd")]
    outcome = tune_key(KEY, [PRESENT, FASTER, CLOSE, WRONG, broken], trials, fake_timer)
    assert set(outcome.faults) == {WRONG, broken}
    assert "relative error" in outcome.faults[WRONG] and outcome.faults[broken].startswith("RuntimeError: out of resource")
    assert [one.op for one in outcome.figures] == ["sdd_activation", "dsd"]
    assert all(one.ms == {PRESENT: 4.0, FASTER: 2.0, CLOSE: 3.0} and one.dense_ms == 1.0 for one in outcome.figures)
    assert outcome.tile == FASTER
    assert ran.count(broken) == ran.count(WRONG) == 1, "once left out, they are not run again"


def test_a_table_is_written_as_config_reads_it(no_table):
    """On an architecture without a table: what was tuned, and for the rest what the arithmetic says."""
    key, tile = TileKey("columns", "pointers", 32), GemmConfig(64, 128, 32, 4, 4)
    present = present_tile(key, 86)
    measured = Figures("grad_up", "a shape", {present: 0.25, tile: 0.123456}, dense_ms=0.1)
    text = table_text(86, [Outcome(key, present, [measured], {})], MACHINE)
    assert config.read_table(text) == {other: present_tile(other, 86) for other in tile_keys(86)} | {key: tile}
    assert max(map(len, text.splitlines())) < 140, "people read it"
    entries = {TileKey(**entry["key"]): entry for entry in json.loads(text)}
    line = {"op": "grad_up", "shape": "a shape", "ms": 0.1235, "share_of_dense": 0.81}
    assert entries[key]["machine"] == MACHINE and entries[key]["measured"] == [line]
    assert all(entry["measured"] is None for other, entry in entries.items() if other != key)

    (no_table / "sm_86.json").write_text(text)
    config._measured_tiles.cache_clear()
    assert column_product_tile(32, torch.bfloat16, 86) == tile
    assert row_product_tile(64, torch.bfloat16, 86) == GemmConfig(64, 128, 32, 4, 3)
    assert table_text(86, [], {}) == text, "what is not tuned again keeps its figures"
    unseen = Outcome(key, tile, [], {})
    assert table_text(86, [unseen], MACHINE | {"date": "2027-01-01"}) == text, "no shape looked it up"


def test_the_shipped_table_is_what_the_tuner_writes():
    assert table_text(90, [], {}) == config.table_file(90).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("product", ["rows", "columns"])
def test_products_run_in_every_tile_and_the_table_is_written(product, monkeypatch, tmp_path, capsys):
    """The real products, in the interpreter where there is no GPU; only the clock is not real."""
    if not HAS_CUDA:
        monkeypatch.setattr(tune, "DTYPE", torch.float16)  # the interpreter multiplies bf16 wrongly
    monkeypatch.setattr(tune, "candidates", lambda key, present, architecture: [present, replace(present, num_stages=2)])
    output = tmp_path / "table.json"
    tune.tune_table(output, (product,), [Shape("tiny", 6, 16, 24, 4, 2)], DEVICE, fake_timer, Console(width=200))
    printed = " ".join(capsys.readouterr().out.split())
    assert "no shape chooses this entry" in printed and "left out" not in printed
    entries = {TileKey(**entry["key"]): entry for entry in json.loads(output.read_text())}
    assert list(entries) == list(tile_keys(config.architecture_of(DEVICE)))
    tuned = entries[
        TileKey(product, "pointers", 16, narrow=HAS_CUDA and product == "rows")
    ]  # the interpreter's few programs are busy
    assert [line["op"] for line in tuned["measured"]] == list(tune.PRODUCTS[product])
    assert tuned["tile"]["num_stages"] == 2 and tuned["machine"].keys() == MACHINE.keys()


def test_without_a_gpu_one_line_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["tune"])
    assert result.exit_code == 2 and len(result.output.splitlines()) == 1
    assert "CUDA GPU" in result.output and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--product", "diagonals"], "--product"),
        (["--shape", "1,2,3"], "shape"),
        (["--output", str(config.table_file(90))], "not overwritten"),
        (["--output", "/nowhere/at/all.json"], "--output"),
    ],
)
def test_a_bad_option_of_the_tuner_is_refused(arguments, named, monkeypatch):
    """Before anything is measured; a table that exists is never overwritten, the shipped one neither."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for module in ("bench.__main__", "bench.tune"):
        monkeypatch.setattr(f"{module}.architecture_of", lambda device: 90)
    monkeypatch.setattr("bench.__main__.why_not", lambda *what: None)
    monkeypatch.setattr("bench.tune.device_name", lambda device: "a GPU")
    result = CliRunner().invoke(app, ["tune", *arguments])
    assert result.exit_code == 2 and named in result.output and "Traceback" not in result.output
