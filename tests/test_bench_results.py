"""What becomes of results: CSV, plots, comparisons, ratios to peers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from bench import ops
from bench.inputs import Case
from bench.lineup import Choice
from bench.report import CsvFile, Result, print_table, read_csv
from bench.runner import run_task

from .bench_support import QUICK, bench, tiny_case


@pytest.fixture
def case() -> Case:
    return tiny_case()


@pytest.fixture
def results(case) -> list[Result]:
    """Of two shapes, three T, two routings, without running anything that takes time."""
    (task,) = ops.topology(case, Choice())
    lines = run_task(task, case, seconds=0, windows=1)
    more = [replace(line, shape="tiny T=48", T=48, ms=2 * line.ms) for line in lines]
    return [*lines, *more, *(replace(line, routing="balanced") for line in lines)]


def write(path: Path, results: list[Result]) -> str:
    path.unlink(missing_ok=True)
    with CsvFile(path) as file:
        file.write(results)
    return str(path)


def test_a_csv_is_read_as_it_was_written(results, tmp_path):
    failed = replace(results[0], check="FAILED: why", ms=None, spread=None)
    path = tmp_path / "results.csv"
    write(path, [*results, failed])
    assert read_csv(path) == [*results, failed]
    header, *lines = path.read_text().splitlines()
    path.write_text("\n".join([header.removesuffix(",mode"), *(line.removesuffix(",eager") for line in lines)]))
    assert read_csv(path) == [*results, failed], "a file from before there were CUDA graphs"


def test_plots_come_from_a_csv(results, tmp_path):
    pytest.importorskip("matplotlib")
    result = bench("plot", write(tmp_path / "results.csv", results), "--output", str(tmp_path / "plots"))
    assert result.exit_code == 0, result.output
    names = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert [name.split("-")[0] for name in names] == ["roof", "roof", "skew", "tokens"]
    assert all(name in result.output for name in names)


def test_the_roofline_has_work_and_bytes(case, tmp_path):
    pytest.importorskip("matplotlib")
    (task,) = ops.sdd(case, Choice(backends=("torch",), peers=()))
    moved = (24 * 16 + 6 * 40 * 16 + 48 * 40) * 4
    assert task.bytes == moved
    lines = run_task(task, case, seconds=0, windows=1)
    assert all(line.spread is None for line in lines), "one sample has none"
    ours, dense = lines
    assert 1e3 * ours.tflops / ours.gb_per_s == pytest.approx(task.flops / moved)
    assert dense.tflops and dense.gb_per_s is None
    result = bench("plot", write(tmp_path / "results.csv", lines), "--output", str(tmp_path))
    assert "roofline-" in result.output, result.output


def test_tokens_that_no_law_spreads_are_not_drawn_over_one(results, tmp_path):
    pytest.importorskip("matplotlib")
    kept = [line for line in results if line.routing == "balanced"]
    path = write(tmp_path / "results.csv", [*kept, *(replace(line, routing="2 of 6") for line in kept)])
    assert "skew" not in bench("plot", path, "--output", str(tmp_path)).output


def test_nothing_to_draw_is_said(results, tmp_path):
    pytest.importorskip("matplotlib")
    path = write(tmp_path / "results.csv", [replace(results[0], share_of_roof=None)])
    result = bench("plot", path, "--output", str(tmp_path))
    assert result.exit_code == 2 and "nothing to draw" in result.output


def test_an_earlier_csv_stays(results, tmp_path):
    path = tmp_path / "results.csv"
    write(path, results)
    before = path.read_text()
    result = bench("topology", *QUICK, "--csv", str(path))
    assert result.exit_code == 2 and "not overwritten" in result.output and path.read_text() == before
    result = bench("dMoE", "--shape", "8,8,8,16,2", "--skew", "0", "--csv", str(tmp_path / "empty.csv"))
    assert result.exit_code == 2 and "E <= H" in result.output and not (tmp_path / "empty.csv").exists()


def test_each_peer_has_a_ratio(capsys):
    lines = [
        Result("s", 1, 1, 1, 1, 1, "balanced", "expert_mlp", "forward", name, kind, "ok", ms, *[None] * 7, *[""] * 4)
        for name, kind, ms in (("us", "ours", 2.0), ("slow us", "ours", 3.0), ("a", "peer", 5.0), ("b", "peer", 1.0))
    ]
    print_table(Console(width=120), lines)
    assert "forward: us is 0.50 × b, 2.50 × a" in capsys.readouterr().out


def test_a_comparison_fails_only_where_ours_got_slower(results, tmp_path):
    old = write(tmp_path / "old.csv", results)

    def new(kind: str, factor: float) -> str:
        changed = [replace(line, ms=line.ms * factor) if line.kind == kind else line for line in results]
        return write(tmp_path / "new.csv", changed)

    for kind, factor, code, verdict in (
        ("ours", 1.03, 0, "≈"),
        ("ours", 0.9, 0, "faster"),
        ("ours", 1.05, 1, "slower"),
        ("roof", 1.05, 0, "slower"),
    ):
        result = bench("compare", old, new(kind, factor))
        assert result.exit_code == code and verdict in result.output, result.output
    failed = [replace(line, ms=None, check="FAILED: wrong") if line.kind == "ours" else line for line in results]
    result = bench("compare", old, write(tmp_path / "new.csv", failed))
    assert result.exit_code == 1 and "FAILED" in result.output
    result = bench("compare", old, write(tmp_path / "new.csv", results[:2]))
    assert result.exit_code == 0 and "only in the old file" in result.output
    result = bench("compare", old, write(tmp_path / "new.csv", [replace(results[0], shape="other")]))
    assert result.exit_code == 1 and "Nothing was measured in both files" in result.output


@pytest.mark.parametrize("command", [("plot",), ("compare", "old.csv")])
def test_a_file_that_is_no_table_of_results_is_refused(command, results, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("old.csv"), results)
    Path("other.csv").write_text("op,shape\nsdd,tiny\n")
    Path("bytes.csv").write_bytes(b"\xff\xd0")
    for name in ("other.csv", "absent.csv", "bytes.csv"):
        result = bench(*command, name)
        assert result.exit_code == 2 and name in result.output and "Traceback" not in result.output
