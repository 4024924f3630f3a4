"""`python -m bench`: the command line. Without a command, a quick set for this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer
from rich.console import Console

from blocksparse_moe.products import why_not
from blocksparse_moe_kernels.config import architecture_of

from .compare import compare as compare_results
from .faults import FAULTS
from .inputs import check_routing
from .lineup import STAGES, Choice
from .ops import LAYERS, OPS, ROUTED_BY_ITSELF, WITHOUT_BACKENDS, peers_of
from .peers import peer_names
from .report import CsvFile, Result, read_csv
from .runner import Plan, device_name, run, versions
from .shapes import GPU_SHAPES, SHAPES, Shape, parse_shape
from .timing import measure
from .tune import PRODUCTS, tune_table

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_SKEW = 1.2

Shapes = Annotated[list[str], typer.Option("--shape", help=f"{', '.join(SHAPES)}, or sizes T,H,F,E,K. Repeatable.")]
Skews = Annotated[
    list[float],
    typer.Option("--skew", help="Zipf exponent of the routing; 0: balanced, inf: K experts. Repeatable. Default: 1.2 and 0."),
]
Tokens = Annotated[list[int], typer.Option("--tokens", min=1, help="Replaces T of the shapes. Repeatable.")]
Dtype = Annotated[str, typer.Option("--dtype", help=f"{', '.join(_DTYPES)}. Default: bfloat16 on a GPU, float32 on a CPU.")]
Device = Annotated[str, typer.Option("--device", help="cuda, cuda:1 or cpu. Default: the GPU, if there is one.")]
Backends = Annotated[list[str], typer.Option("--backend", help="triton or torch. Repeatable. Default: all that run here.")]
Peers = Annotated[list[str], typer.Option("--peer", help=f"{', '.join(peer_names())}, or none. Repeatable. Default: all.")]
Stages = Annotated[list[str], typer.Option("--stage", help=f"Of the layer: {', '.join(STAGES)}. Repeatable. Default: all.")]
Seconds = Annotated[float, typer.Option("--seconds", min=0.0, help="Length of a variant's window, for one stage.")]
Windows = Annotated[int, typer.Option("--windows", min=1, help="Windows of each variant.")]
Graph = Annotated[bool, typer.Option("--graph", help="Time CUDA graphs of inference and of the parts.")]
Csv = Annotated[Path | None, typer.Option("--csv", help="Also write the results to this file.")]
CsvArgument = Annotated[Path, typer.Argument(metavar="CSV", help="Written by an earlier run with --csv.")]
Products = Annotated[list[str], typer.Option("--product", help=f"{', '.join(PRODUCTS)}. Repeatable. Default: all.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Threads of torch on a CPU.")]


@app.callback(invoke_without_command=True)
def quick(
    context: typer.Context, seconds: Seconds = 0.3, windows: Windows = 3, csv: Csv = None, threads: Threads = None
) -> None:
    """Microbenchmarks of the layer and its parts, beside other implementations of the same work.

    Every variant is checked against a reference first; one that fails prints no figure. Then windows of sustained work take
    turns, and times are medians (± half the distance of the quartiles).

    The roof is the dense product of the same FLOPs, or a copy of the same bytes, timed in the same run; of two, the slower.
    "× peer" is the time of the fastest peer over that of the line: more than 1 is faster; differences under 4 % count as
    equal (≈).

    Without a command: the whole layer, at sizes that suit this machine.
    """
    if context.invoked_subcommand is not None:
        sources = {name: context.get_parameter_source(name) for name in context.params}
        given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
        if given:
            _refuse(f"--{given[0]}: options of a command follow it, as in: bench {context.invoked_subcommand} --{given[0]} ...")
        return
    device = _device("")
    if device.type == "cuda":
        lineups = [("expert_mlp", SHAPES[name], _SKEW) for name in ("qwen3-30b-a3b", "olmoe-1b-7b")]
        stages = STAGES
    else:
        few, many = SHAPES["cpu-16"].with_tokens(512), SHAPES["cpu-64"].with_tokens(256)
        lineups = [("expert_mlp", few, _SKEW), ("expert_mlp", few, 0.0), ("expert_mlp", many, _SKEW)]
        stages = ("inference", "forward+backward")
    _run([Plan(lineups, _dtype("", device), device, Choice(stages=stages), seconds, windows)], csv, threads)


def _command(op: str) -> Callable[..., None]:
    def command(
        shape: Shapes = [],  # noqa: B006 - typer copies it
        tokens: Tokens = [],  # noqa: B006
        skew: Skews = [],  # noqa: B006
        dtype: Dtype = "",
        device: Device = "",
        backend: Backends = [],  # noqa: B006
        peer: Peers = [],  # noqa: B006
        stage: Stages = [],  # noqa: B006
        seconds: Seconds = 1.0,
        windows: Windows = 3,
        graph: Graph = False,
        csv: Csv = None,
        threads: Threads = None,
    ) -> None:
        on = _device(device)
        shapes = _shapes(shape or ["qwen3-30b-a3b" if on.type == "cuda" else "cpu-16"])
        if tokens:
            shapes = [one.with_tokens(T) for one in shapes for T in tokens]
        for option, given, known in (
            ("--stage", stage, op in LAYERS),
            ("--backend", backend, op not in WITHOUT_BACKENDS),
            ("--skew", skew, op not in ROUTED_BY_ITSELF),
        ):
            if given and not known:
                _refuse(f"{option}: {op} has none to choose. Leave {option} out.")
        stages = _known("--stage", stage, STAGES)
        if graph:
            _check_graph(on, stages)
            stages, backend = ("inference",), backend or ["triton"]  # the torch one reads offsets on the host
        choice = Choice(
            stages=stages or STAGES,
            backends=_known("--backend", backend, ("triton", "torch")) or None,
            peers=_peers(op, peer),
        )
        lineups = [(op, one, law) for one in shapes for law in _skews(op, one, skew)]
        _run([Plan(lineups, _dtype(dtype, on), on, choice, seconds, windows, graph)], csv, threads)

    return command


for _name, _op in OPS.items():
    app.command(_name, help=_op.__doc__)(_command(_name))


@app.command()
def plot(
    csv: CsvArgument, output: Annotated[Path, typer.Option("--output", help="Folder of the pictures.")] = Path("runs/plots")
) -> None:
    """Draw a CSV: share of the roof by shape, and the roofline; time over tokens and over skew, where there are several."""
    try:
        from .plot import plot as draw
    except ImportError as missing:
        _refuse(str(missing))
    results = _read(csv)
    try:
        paths = draw(results, output)
    except OSError as error:
        _refuse(f"--output: {output} cannot be written: {error.strerror or error}.")
    if not paths:
        _refuse(
            f"{csv} has nothing to draw: no line with a share of the roof, and no two of one op with other tokens or routing."
        )
    for path in paths:
        typer.echo(path)


@app.command()
def compare(old: CsvArgument, new: CsvArgument) -> None:
    """Compare the times of two CSV files; differences up to 4 % count as equal.

    Exit code 1: a variant of ours got slower, or fails its check now; or the files have nothing in common.
    """
    if compare_results(_read(old), _read(new), _console()):
        raise typer.Exit(1)


@app.command()
def fault(
    names: Annotated[list[str], typer.Argument(metavar="ID", help=f"{', '.join(FAULTS)}. Default: all.")] = [],  # noqa: B006
    device: Device = "",
    seconds: Seconds = 0.3,
    windows: Windows = 3,
    csv: Csv = None,
    threads: Threads = None,
) -> None:
    """Measure what public reports about speed are about."""
    on, plans = _device(device), []
    for name in _known("ID", names, tuple(FAULTS)) or tuple(FAULTS):
        one = FAULTS[name]
        lineups = [(one.op, shape, skew) for shape in _shapes(list(one.shapes)) for skew in one.skews]
        choice, title = Choice(stages=one.stages, peers=one.peers), f"{name}  {one.report} Wanted: {one.good}."
        plans.append(Plan(lineups, _dtype("", on), on, choice, seconds, windows, title=title))
    _run(plans, csv, threads)


@app.command()
def tune(
    output: Annotated[Path | None, typer.Option("--output", help="A new file. Default: configs-sm_XX.json.")] = None,
    shape: Shapes = [],  # noqa: B006 - typer copies it
    product: Products = [],  # noqa: B006
    seconds: Annotated[float, typer.Option("--seconds", min=0.0, help="Length of each of a candidate's windows.")] = 0.1,
) -> None:
    """Measure the tiles of the products on this GPU, and write the table of its architecture for review.

    Candidates must compute what the present tile computes; the present one stays unless another is more than 4 % faster,
    over all shapes that look an entry up. Nothing is tuned at call time: the package reads the table that it ships.
    """
    if not torch.cuda.is_available():
        _refuse(f"tune: tiles are measured on a CUDA GPU; torch {torch.__version__} sees none.")
    device = torch.device("cuda")
    if reason := why_not("triton", device, torch.bfloat16):
        _refuse(f"tune: backend 'triton' {reason}.")
    shapes, products = _shapes(shape or list(GPU_SHAPES)), _known("--product", product, tuple(PRODUCTS)) or tuple(PRODUCTS)
    output = output or Path(f"configs-sm_{architecture_of(device)}.json")
    if output.exists():
        _refuse(f"--output: {output} exists and is not overwritten; name another file.")
    try:
        tune_table(output, products, shapes, device, partial(measure, device=device, seconds=seconds, windows=3), _console())
    except OSError as error:
        _refuse(f"--output: {output} cannot be written: {error.strerror or error}.")
    except (RuntimeError, ValueError) as error:
        _refuse(f"tune: {error}")


def _read(path: Path) -> list[Result]:
    try:
        return read_csv(path)
    except OSError as error:
        _refuse(f"{path} cannot be read: {error.strerror or error}.")
    except ValueError as error:
        _refuse(str(error))


def _run(plans: Sequence[Plan], csv: Path | None, threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)
    console = _console()
    try:
        with nullcontext() if csv is None else CsvFile(csv) as file:
            console.print(f"{device_name(plans[0].device)}; {versions()}", highlight=False)
            results = [result for plan in plans for result in run(plan, console, file)]
    except (ValueError, NotImplementedError) as error:
        _refuse(str(error))
    except FileExistsError:
        _refuse(f"--csv: {csv} exists and is not overwritten; name another file.")
    except OSError as error:
        _refuse(str(error) if csv is None else f"--csv: {csv} cannot be written: {error.strerror or error}.")
    if any(result.failed and result.kind == "ours" for result in results):
        raise typer.Exit(1)


def _console() -> Console:
    """As wide as the terminal; wide enough for a table where there is none."""
    return Console() if sys.stdout.isatty() else Console(width=128)


def _shapes(texts: list[str]) -> list[Shape]:
    try:
        return [parse_shape(text) for text in texts]
    except ValueError as error:
        _refuse(str(error))


def _skews(op: str, shape: Shape, exponents: list[float]) -> Sequence[float]:
    """Those that were asked for; else skewed and balanced, as far as there are both."""
    if not exponents:
        return (0.0,) if op in ROUTED_BY_ITSELF or shape.K == shape.E else (_SKEW, 0.0)
    try:
        for exponent in exponents:
            check_routing(shape, exponent)
    except ValueError as error:
        _refuse(str(error))
    return exponents


def _peers(op: str, names: list[str]) -> tuple[str, ...]:
    """Those that were asked for; else all that do the work of `op`."""
    known = peers_of(op)
    if "none" in names:
        if len(names) > 1:
            _refuse("--peer: none goes alone.")
        return ()
    if names and not known:
        _refuse(f"--peer: nobody else does {op} here. Leave --peer out.")
    return _known("--peer", names, known) or known


def _dtype(name: str, device: torch.device) -> torch.dtype:
    return _DTYPES[_known("--dtype", [name or ("bfloat16" if device.type == "cuda" else "float32")], tuple(_DTYPES))[0]]


def _device(name: str) -> torch.device:
    if name.startswith("cuda") and not torch.cuda.is_available():
        _refuse(f"--device: {name} was asked for; torch {torch.__version__} sees no GPU. Use --device cpu.")
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "cpu") or (device.type == "cpu" and device.index is not None):
        _refuse(f"--device: expected cuda, cuda:N or cpu; got {name!r}.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        _refuse(f"--device: {name} was asked for; torch sees {torch.cuda.device_count()} GPUs, from cuda:0 on.")
    return device


def _check_graph(device: torch.device, stages: tuple[str, ...]) -> None:
    if device.type != "cuda":
        _refuse(f"--graph: a CUDA graph needs a CUDA device; this run is on {device.type}. Leave --graph out.")
    if others := [stage for stage in stages if stage != "inference"]:
        _refuse(f"--graph: of the layer only inference is captured, not {', '.join(others)}. Leave --stage out.")


def _known(option: str, names: list[str], known: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name not in known:
            _refuse(f"{option}: {name!r} is not known; choose from {', '.join(known)}.")
    return tuple(names)


def _refuse(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    app()
