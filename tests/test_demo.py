"""The demo and the command line: what they show, write, promise and refuse."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from blocksparse_moe import Topology
from blocksparse_moe.__main__ import app
from blocksparse_moe.demo import Settings
from blocksparse_moe.demo.results import BOUND, EAGER, FACTOR, FIRST_STEPS, GROUPED_MM, OURS, Curve, Results

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("matplotlib", reason="needs matplotlib")

from blocksparse_moe.demo import report, training

ROOT = Path(__file__).parent.parent
TINY = ("--batch-size", "2", "--sequence-length", "16")
FILES = ("metrics.json", "loss.png", "load.png")


def demo(*options: str | Path, device: str | None = "cpu", tiny: bool = True):
    """Run the command in this process, on a CPU and on tiny batches unless told otherwise."""
    where = () if device is None else ("--device", device)
    arguments = ["demo", *where, *(TINY if tiny else ()), *map(str, options)]
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, arguments)


def metrics(folder: Path) -> dict:
    return json.loads((folder / "metrics.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(folder, result) of a demo of six steps."""
    folder = tmp_path_factory.mktemp("demo") / "new" / "folder"
    result = demo("--steps", "6", "--seed", "3", "--output", folder)
    assert result.exit_code == 0, result.output
    return folder, result


# ---------------------------------------------------------------- what it finds


def test_three_trainings_agree(finished):
    found = metrics(finished[0])
    losses = {name: run["losses"] for name, run in found["runs"].items()}
    assert list(losses) == [EAGER, GROUPED_MM, OURS]
    assert all(len(of_run) == found["steps"] == 6 for of_run in losses.values())
    assert losses[OURS] == pytest.approx(losses[EAGER], rel=1e-5)
    assert losses[OURS][-1] < losses[OURS][0]
    assert all(run["tokens_per_second"] > 0 for run in found["runs"].values())
    assert 0 < found["runs"][OURS]["difference_to_eager"]["gradients"] <= BOUND
    assert all(check["holds"] for check in found["checks"])
    assert not found["interrupted"]


def test_loads_are_those_of_every_step(finished):
    """[layers, E, steps]: every step routes T * K rows in every layer, and none is dropped."""
    found = metrics(finished[0])
    load = torch.tensor(found["load"])
    assert load.shape == (2, 8, 6)
    assert (load.sum(dim=1) == 2 * 16 * 2).all()
    assert found["dropped"] == {"slots": 0, "of": int(load.sum())}


def test_shows_everything(finished):
    folder, result = finished
    for part in ("grouped_mm", "blocksparse", "tokens/s", "dropped rows of 768", "layer 1", "expert 7", "backend torch"):
        assert part in result.stdout
    *shown, last = result.stdout.splitlines()
    assert max(map(cell_len, shown)) <= 100
    assert last == f"Wrote metrics.json, loss.png and load.png into {folder}"
    for name in FILES[1:]:
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    found = metrics(folder)
    assert found["sample"]["text"]
    assert {"python", "torch", "transformers", "device"} <= found["versions"].keys()
    assert found["configuration"]["model"]["parameters"] > 10**6


@pytest.mark.slow
def test_seed_decides(finished, tmp_path):
    first = metrics(finished[0])["runs"][OURS]["losses"]
    for seed, same in ((3, True), (4, False)):
        assert demo("--steps", "2", "--seed", str(seed), "--output", tmp_path).exit_code == 0
        assert (metrics(tmp_path)["runs"][OURS]["losses"] == first[:2]) == same


@pytest.mark.slow
def test_learns_a_file(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 2)
    result = demo("--steps", "1", "--text", text, "--experts", "3", "--top-k", "3", "--output", tmp_path)
    assert result.exit_code == 0, result.output
    found = metrics(tmp_path)
    assert found["configuration"]["text"] == "text"
    assert torch.tensor(found["load"]).eq(32).all()


@pytest.mark.slow
def test_a_text_of_one_sequence(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"sixteen letters\n")
    assert demo("--steps", "1", "--text", text, "--output", tmp_path).exit_code == 0


@pytest.mark.slow
def test_bfloat16_is_shown_and_not_checked(tmp_path):
    result = demo("--steps", "2", "--dtype", "bfloat16", "--output", tmp_path)
    assert result.exit_code == 0, result.output
    gradients, losses, dropped = metrics(tmp_path)["checks"]
    assert gradients["bound"] is losses["bound"] is None and dropped["bound"] == 0
    assert gradients["value"] > BOUND


@pytest.mark.slow
def test_names_an_implementation_that_cannot_run(tmp_path, monkeypatch):
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def broken(*arguments):
        raise NotImplementedError("no kernel for this device\nand more")

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, "grouped_mm", broken)
    result = demo("--steps", "2", "--output", tmp_path)
    assert result.exit_code == 0, result.output
    assert "grouped_mm cannot run here and is left out: no kernel for this device\n" in result.stdout
    assert metrics(tmp_path)["runs"][GROUPED_MM] == {"obstacle": "no kernel for this device"}


@pytest.mark.slow
def test_triton(tmp_path, monkeypatch):
    """On a CPU Triton's interpreter computes, so a single step of a tiny batch and a short sample."""
    monkeypatch.setattr(training, "SAMPLE_SECONDS", 1.0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = ("--steps", "1", "--batch-size", "1", "--sequence-length", "8", "--experts", "4", "--output", tmp_path)
    result = demo(*options, "--backend", "triton", device=device, tiny=False)
    assert result.exit_code == 0, result.output
    assert "backend triton (asked for)" in result.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gpu(dtype, tmp_path):
    result = demo("--steps", str(FIRST_STEPS), "--dtype", dtype, "--output", tmp_path, device=None, tiny=False)
    assert result.exit_code == 0, result.output
    assert "backend triton (the default on CUDA)" in result.stdout


# ---------------------------------------------------------------- what it counts


def record(expert_ids: torch.Tensor) -> training.ScheduleRecorder:
    """What a recorder counts of one forward through four experts with the given ids."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    experts = MixtralExperts(MixtralConfig(hidden_size=4, intermediate_size=4, num_local_experts=4))
    recorder = training.ScheduleRecorder(torch.nn.ModuleList([experts]))
    x = torch.zeros(expert_ids.shape[0], 4)
    experts.register_forward_pre_hook(lambda module, arguments: (x, expert_ids.clamp(0, 3), torch.zeros_like(expert_ids)))
    experts(x, expert_ids, None)
    recorder.count()
    return recorder


def test_counts_dropped_slots():
    recorder = record(torch.tensor([[0, 3], [3, 3], [-1, 0], [4, 3]]))
    assert (recorder.slots, recorder.dropped) == (8, 2)
    assert recorder.loads[0].tolist() == [[2, 0, 0, 4]]


@pytest.mark.parametrize("damage", ["lost", "foreign"])
def test_a_damaged_schedule_drops_slots(damage, monkeypatch):
    """The count comes from the schedule: a tile that is missing, or that names another expert, serves nobody."""
    schedule = Topology.schedule

    def damaged(topology, block_m):
        made = schedule(topology, block_m)
        made.tiles[:, 0] = -1 if damage == "lost" else made.tiles[:, 0] + torch.tensor([1, 0, 0])
        return made

    monkeypatch.setattr(Topology, "schedule", damaged)
    assert record(torch.tensor([[0, 1], [0, 2], [0, 3]])).dropped == 3


# ---------------------------------------------------------------- what it promises


def results(ours: list[float], grouped: list[float] | None = None, *, dtype: str = "float32", gradient: float = 0.0):
    """Results whose losses differ from eager's by the given relative amounts, after steps without a difference."""
    eager = [1.0] * (FIRST_STEPS + len(ours))
    start = [1.0] * FIRST_STEPS

    def curve(name, differences):
        return Curve(name, start + [1 + difference for difference in differences], [1.0] * len(eager))

    curves = {
        EAGER: Curve(EAGER, eager, [1.0] * len(eager)),
        GROUPED_MM: Curve(GROUPED_MM, obstacle="none here") if grouped is None else curve(GROUPED_MM, grouped),
        OURS: curve(OURS, ours),
    }
    curves[OURS].gradient_difference = gradient
    loads = torch.ones(1, 8, len(eager), dtype=torch.int64)
    return Results(
        settings=Settings(device="cpu", dtype=dtype),
        text="a text",
        model={},
        backend="",
        curves=curves,
        loads=loads,
        dropped=0,
        slots=int(loads.sum()),
        prompt="",
        sample="",
        interrupted=False,
    )


def verdicts(found: Results) -> list[bool]:
    return [check.holds for check in found.checks]


def test_later_losses_are_measured_by_transformers_own():
    assert all(verdicts(results([0.9e-5], [0.0])))
    assert not all(verdicts(results([2e-5], [0.0])))
    assert all(verdicts(results([2.9e-4, 0.0], [0.0, 1e-4])))
    assert not all(verdicts(results([(FACTOR + 0.1) * 1e-4, 0.0], [0.0, 1e-4])))


def test_what_cannot_be_judged_is_not():
    later = results([1e-3]).checks[2]
    assert later.bound is None and "grouped_mm" in later.note
    assert all(verdicts(results([1e-1], [0.0], dtype="bfloat16", gradient=1e-2)))


def test_early_losses_gradients_and_numbers_that_are_none():
    early = results([0.0], [0.0])
    early.curves[OURS].losses[3] = 1 + 2e-5
    assert verdicts(early) == [True, False, True, True]
    assert verdicts(results([0.0], [0.0], gradient=2e-5)) == [False, True, True, True]
    broken = results([float("nan")], [0.0])
    assert verdicts(broken) == [True, True, False, True]
    assert json.loads(broken.to_json())["runs"][OURS]["losses"][-1] is None


@pytest.mark.slow
def test_a_failed_check_is_the_exit_code(tmp_path, monkeypatch):
    monkeypatch.setattr("blocksparse_moe.demo.results.BOUND", 0.0)
    result = demo("--steps", "1", "--output", tmp_path)
    assert result.exit_code == 1
    assert " NO" in result.stdout


@pytest.mark.parametrize(("width", "colours"), [(60, None), (80, "truecolor"), (100, "256")])
def test_fits_the_terminal(width, colours):
    console = Console(file=io.StringIO(), width=width, color_system=colours, force_terminal=colours is not None)
    report.Report(console).show(results([0.0] * 200, [0.0] * 200))
    shown = console.file.getvalue()
    assert ("\x1b[" in shown) == (colours is not None)
    plain = "".join(part.partition("m")[2] if index else part for index, part in enumerate(shown.split("\x1b[")))
    assert max(len(line) for line in plain.splitlines()) <= width
    assert plain.count("expert ") == 8
    assert width < 80 or "…" not in plain


# ---------------------------------------------------------------- Ctrl-C


@pytest.mark.slow
def test_interrupt_keeps_what_there_is(tmp_path, monkeypatch):
    def step(self, curves):
        if len(curves[OURS].losses) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(report.Report, "step", step)
    before = signal.getsignal(signal.SIGINT)
    result = demo("--steps", "1000000", "--output", tmp_path)
    assert result.exit_code == 130
    assert "after 2 of 1000000 steps" in result.stdout
    found = metrics(tmp_path)
    assert found["interrupted"] and found["steps"] == 2
    assert all((tmp_path / name).exists() for name in FILES)
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupt_before_the_first_step(tmp_path, monkeypatch):
    start = report.Report.start

    def interrupted(self, *arguments):
        start(self, *arguments)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(report.Report, "start", interrupted)
    result = demo("--output", tmp_path)
    assert result.exit_code == 130
    assert "nothing was written" in result.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_interrupt_of_the_process(tmp_path):
    command = [sys.executable, "-m", "blocksparse_moe", "demo", "--device", "cpu", *TINY, "--steps", "1000000"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*command, "--output", tmp_path], cwd=ROOT, env=environment, text=True, **pipes) as process:
        next(line for line in process.stdout if "versions" in line)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=200)
    assert process.returncode == 130
    assert "Ended by Ctrl-C" in output
    assert errors == ""


@pytest.mark.slow
def test_interrupt_while_modules_are_loaded():
    code = "import signal; from blocksparse_moe.demo import _ctrl_c_ends_at_once as ends\nwith ends(): signal.raise_signal(2)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 130
    assert done.stderr.strip() == "blocksparse-moe demo: ended by Ctrl-C; nothing was written."


@pytest.mark.slow
def test_gradients_that_are_nil_but_for_rounding(tmp_path):
    """Attention among equal bytes."""
    text = tmp_path / "text"
    text.write_bytes(b"a" * 100)
    result = demo("--steps", "1", "--batch-size", "1", "--sequence-length", "3", "--text", text, "--output", tmp_path)
    assert result.exit_code == 0, result.stdout


# ---------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--steps", "0"), "--steps must be at least 1; got 0"),
        (("--steps", "-3"), "got -3"),
        (("--batch-size", "0"), "--batch-size"),
        (("--sequence-length", "1"), "--sequence-length"),
        (("--seed", "-1"), "--seed"),
        (("--experts", "2", "--top-k", "3"), "--top-k 3 exceeds --experts 2"),
        (("--dtype", "int7"), "'int7'"),
        (("--device", "tpu"), "'tpu'"),
        (("--device", "cuda:1000"), "cuda:1000 is not there"),
        (("--device", "cuda:-1"), "'cuda:-1'"),
        (("--backend", "fast"), "'fast'"),
        (("--text", "no such file"), "no such file cannot be read"),
        (("--text", "."), "cannot be read"),
        (("--text", os.devnull), "0 bytes"),
        (("--text", "short"), "5 bytes"),
        (("--output", "short"), "short cannot be written into"),
        (("--output", "taken"), "taken cannot be written into: Is a directory"),
    ],
)
def test_refuses_in_one_line(options, part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("short").write_text("short")
    Path("taken/loss.png").mkdir(parents=True)
    refused_in_one_line(demo(*options), part)
    assert not list(tmp_path.glob("runs/*/*"))


def refused_in_one_line(result, part: str) -> None:
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("blocksparse-moe demo: ") and part in line


def test_refuses_triton_on_a_cpu(tmp_path, monkeypatch):
    triton = pytest.importorskip("triton", reason="needs Triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    refused_in_one_line(demo("--backend", "triton", "--output", tmp_path), "needs a CUDA device")


@pytest.mark.parametrize("missing", ["transformers", "matplotlib"])
def test_refuses_without_a_package(missing, tmp_path, monkeypatch):
    from importlib import metadata

    version = metadata.version

    def without(name: str) -> str:
        if name == missing:
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without)
    refused_in_one_line(demo("--output", tmp_path), f"the demo needs {missing}")


def test_an_empty_standard_library_asks_for_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    refused_in_one_line(demo("--output", tmp_path), "name a file by --text")


# ---------------------------------------------------------------- the command line


def test_help_names_every_option():
    shown = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["demo", "--help"])
    assert shown.exit_code == 0
    for option in ("--steps", "--device", "--backend", "--dtype", "--text", "--output", "--seed"):
        assert option in shown.stdout


@pytest.mark.slow
def test_help_and_version_are_light():
    """Neither loads transformers or matplotlib."""
    code = """
import sys
from typer.testing import CliRunner
from blocksparse_moe.__main__ import app
for option in ("--help", "--version"):
    assert CliRunner().invoke(app, [option]).exit_code == 0
assert not {"transformers", "matplotlib"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
