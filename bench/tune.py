"""Tiles of the GEMM kernels, measured on the GPU at hand: the table that `blocksparse_moe_kernels.config` reads.

Every key of the table is tuned on the products that look it up, at numbers of tokens at which they do. A candidate must compute
what the present tile computes, or is left out with its reason; those that do are timed against each other and against a dense
product of the same FLOPs. The present tile stays unless another one is more than 4 % faster.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from itertools import product
from pathlib import Path
from statistics import geometric_mean

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from torch import Tensor

from blocksparse_moe.products import implementation
from blocksparse_moe_kernels import get_activation
from blocksparse_moe_kernels.config import (
    HAVE_TMA,
    SHARED_MEMORY_KB,
    GemmConfig,
    TileKey,
    architecture_of,
    are_few,
    choose_block_k,
    choose_block_m,
    column_product_tile,
    row_product_tile,
    table_file,
    tile_keys,
)

from .check import disagreement
from .inputs import Case, make_case, random_dense, random_sparse, rows_of
from .report import EQUAL
from .runner import device_name
from .shapes import Shape
from .timing import Timing, Work, captured
from .variants import Tensors, first_line

DTYPE = torch.bfloat16
"""Of the operands; fp16 takes the same tiles."""

_SIDES, _STEPS, _WARPS, _DEEPEST = (64, 128, 256), (32, 64, 128), (4, 8), 5
_MOST_SUMS, _LEAST_SUMS = 128, 32
"""Registers of a thread that hold sums: more are spilled, and fewer of them do not need as many threads."""
_FEW_ROWS = 4096
"""At most so many are timed as CUDA graphs, whose memory all candidates hold at once."""

Timer = Callable[[dict[str, Work]], dict[str, Timing]]


@dataclass(frozen=True)
class Trial:
    """One product on one shape, that looks up the key which is tuned.

    Attributes:
        op: as in `bench.ops.OPS`.
        run: the product in a given tile.
        dense: one dense product of the same FLOPs.
        timed: makes of a work what is timed.
    """

    op: str
    shape: Shape
    run: Callable[[GemmConfig], Tensors]
    dense: Work
    timed: Callable[[Work], Work] = lambda work: work


@dataclass(frozen=True)
class Figures:
    """Milliseconds of one trial: of every tile that is right, and of the dense product."""

    op: str
    shape: str
    ms: dict[GemmConfig, float]
    dense_ms: float


@dataclass(frozen=True)
class Outcome:
    """What was found for one key.

    Attributes:
        figures: of each trial; empty where no shape looks the key up.
        faults: why tiles were left out.
    """

    key: TileKey
    present: GemmConfig
    figures: Sequence[Figures]
    faults: dict[GemmConfig, str]

    @property
    def tile(self) -> GemmConfig:
        return fastest(self.present, self.figures)


def tune_table(
    output: Path, products: Sequence[str], shapes: Sequence[Shape], device: torch.device, timer: Timer, console: Console
) -> None:
    """Tune the entries of `products`, print what was found, and write the table of the device to `output`.

    It is written after every key, so that an interrupted run leaves what it had.
    """
    architecture = architecture_of(device)
    keys = [key for key in tile_keys(architecture) if key.product in products]
    machine = {"gpu": device_name(device), "torch": torch.__version__, "triton": metadata.version("triton")}
    machine["date"] = datetime.now(UTC).date().isoformat()
    outcomes: list[Outcome] = []
    output.write_text(table_text(architecture, outcomes, machine), encoding="utf-8")
    for outcome in track(tune(keys, shapes, device, timer), "tiles", total=len(keys), console=console):
        outcomes.append(outcome)
        output.write_text(table_text(architecture, outcomes, machine), encoding="utf-8")
    print_outcomes(console, outcomes)


def tune(keys: Iterable[TileKey], shapes: Sequence[Shape], device: torch.device, timer: Timer) -> Iterator[Outcome]:
    """The keys one after the other; `timer` gives a `Timing` for each work."""
    architecture = architecture_of(device)
    for key in keys:
        present = present_tile(key, architecture)
        yield tune_key(key, candidates(key, present, architecture), trials(key, shapes, device), timer)


def tune_key(key: TileKey, tiles: Sequence[GemmConfig], trials: Iterable[Trial], timer: Timer) -> Outcome:
    """`tiles`, the present one first, against each other in every trial."""
    figures: list[Figures] = []
    faults: dict[GemmConfig, str] = {}
    for trial in trials:
        expected = tuple(result.float() for result in trial.run(tiles[0]))
        found = {tile: _fault(trial, tile, expected) for tile in tiles if tile not in faults}
        faults |= {tile: reason for tile, reason in found.items() if reason is not None}
        right = {tile_name(tile): tile for tile, reason in found.items() if reason is None}
        works: dict[str, Work] = {name: partial(trial.run, tile) for name, tile in right.items()} | {"dense": trial.dense}
        timings = timer({name: trial.timed(work) for name, work in works.items()})
        ms = {tile: timings[name].ms for name, tile in right.items()}
        figures.append(Figures(trial.op, trial.shape.name, ms, timings["dense"].ms))
    return Outcome(key, tiles[0], figures, faults)


def _fault(trial: Trial, tile: GemmConfig, expected: Tensors) -> str | None:
    try:
        results = trial.run(tile)
    except Exception as error:  # too much shared memory, or what the compiler cannot do: said in its place, the others go on
        return first_line(error)
    return disagreement(results, expected, results[0].dtype)


def fastest(present: GemmConfig, figures: Sequence[Figures]) -> GemmConfig:
    """The tile of the least geometric mean, of those that are right everywhere; `present` if that one is not 4 % faster."""
    if not figures:
        return present
    everywhere = [tile for tile in figures[0].ms if all(tile in one.ms for one in figures)]
    means = {tile: geometric_mean(one.ms[tile] for one in figures) for tile in everywhere}
    best = min(means, key=means.__getitem__)
    return best if means[present] > means[best] * (1 + EQUAL) else present


def present_tile(key: TileKey, architecture: int) -> GemmConfig:
    if key.product == "rows":
        return row_product_tile(key.block, DTYPE, architecture, key.path == "tma", key.narrow)
    return column_product_tile(key.block, DTYPE, architecture, key.path == "tma")


def candidates(key: TileKey, present: GemmConfig, architecture: int) -> list[GemmConfig]:
    """The present tile, and those that may be faster: of each size and number of warps the two deepest pipelines that fit.

    What surely does not fit into shared memory, or into the registers, is not among them; the compiler may need more for
    its own purposes, which a launch finds out. Tensor cores that read shared memory themselves (of 64 rows at least) keep as
    many steps there as the pipeline is deep, others one less.
    """
    given = (key.block,)
    sizes = product(given, _SIDES, _STEPS) if key.product == "rows" else product(_SIDES, _SIDES, given)
    found = [present]
    for (m, n, k), warps in product(sizes, _WARPS):
        sums = m * n // (32 * warps)
        if sums > _MOST_SUMS or (sums < _LEAST_SUMS and warps > _WARPS[0]):
            continue
        steps = SHARED_MEMORY_KB[architecture] * 1024 // ((m + n) * k * DTYPE.itemsize)
        deepest = min(_DEEPEST, steps if architecture in HAVE_TMA and m >= 64 else steps + 1)
        found += [GemmConfig(m, n, k, warps, depth, key.path == "tma") for depth in range(max(2, deepest - 1), deepest + 1)]
    return list(dict.fromkeys(found))


# -------------------------------------------------------------------- what is timed

Run = Callable[[GemmConfig], Tensors]


def trials(key: TileKey, shapes: Iterable[Shape], device: torch.device) -> Iterator[Trial]:
    """The products that look `key` up, on those of the shapes where they do, with as many tokens as still do.

    One at a time: each has weights of its own. The pointer kernels run on operands that TMA could address too. Few rows are
    timed as CUDA graphs, as their kernels are shorter than what the host needs to launch them.
    """
    graph = partial(captured, device=device)
    for shape, (op, prepare) in product(shapes, PRODUCTS[key.product].items()):
        if (fitting := fitting_shape(key, op, shape, device)) is not None:
            skew = 1.2 if fitting.K < fitting.E else 0.0
            run, dense = prepare(make_case(fitting, skew, dtype=DTYPE, device=device))
            few = device.type == "cuda" and fitting.M <= _FEW_ROWS
            yield Trial(op, fitting, run, dense, *([graph] if few else []))


def fitting_shape(key: TileKey, op: str, shape: Shape, device: torch.device) -> Shape | None:
    """`shape` with T, T / 2, T / 4 ... tokens: the first whose product `op` looks `key` up; None if none does."""
    if key.path == "tma" and (shape.H % 8 or shape.F % 8):
        return None
    fewer = (shape.T >> halvings for halvings in range(shape.T.bit_length()))
    resized = (shape if T == shape.T else shape.with_tokens(T) for T in fewer)
    return next((one for one in resized if _looked_up(key, op, one, device) == key), None)


def _looked_up(key: TileKey, op: str, shape: Shape, device: torch.device) -> TileKey:
    """The key that the launcher of `op` makes of the sizes, on the path of `key`."""
    if key.product == "columns":
        return TileKey("columns", key.path, choose_block_k(shape.M, shape.E))
    height, width = choose_block_m(shape.M, shape.E), 2 * shape.F if op == "sdd_activation" else shape.H
    wide = present_tile(TileKey("rows", key.path, height), architecture_of(device))
    return TileKey("rows", key.path, height, are_few(shape.M, width, wide, device))


def _sdd_activation(case: Case) -> tuple[Run, Work]:
    rows, dense, activation = rows_of(case), random_dense(case, case.shape.M, case.shape.H), get_activation("swiglu")

    def run(tile: GemmConfig) -> Tensors:
        pre, hidden = implementation("triton").sdd_activation(case.x, case.up_proj, rows, activation, config=tile)
        return pre.values, hidden.values

    return run, lambda: dense @ case.up_proj[0].T


def _dsd(case: Case) -> tuple[Run, Work]:
    s, w = random_sparse(case, case.shape.F), case.down_proj.transpose(1, 2)
    return lambda tile: (implementation("triton").dsd(s, w, config=tile),), lambda: s.values @ w[0]


def _grad_up(case: Case) -> tuple[Run, Work]:
    return _transposed(case, 2 * case.shape.F, like=case.up_proj)


def _grad_down(case: Case) -> tuple[Run, Work]:
    return _transposed(case, case.shape.F, like=case.down_proj.transpose(1, 2))


def _transposed(case: Case, width: int, like: Tensor) -> tuple[Run, Work]:
    s, dense = random_sparse(case, width), random_dense(case, case.shape.M, case.shape.H)

    def run(tile: GemmConfig) -> Tensors:
        return (implementation("triton").dsd_transposed(s, case.x, order="tokens", like=like, config=tile),)

    return run, lambda: s.values.T @ dense


PRODUCTS: dict[str, dict[str, Callable[[Case], tuple[Run, Work]]]] = {
    "rows": {"sdd_activation": _sdd_activation, "dsd": _dsd},
    "columns": {"grad_up": _grad_up, "grad_down": _grad_down},
}

# -------------------------------------------------------------------- what is written and printed


def table_text(architecture: int, outcomes: Iterable[Outcome], machine: dict[str, str]) -> str:
    """The whole table of an architecture as JSON: what was tuned, and the rest as it is. A line for each thing to review.

    Args:
        machine: what was measured on: "gpu", "torch", "triton" and "date".
    """
    file = table_file(architecture)
    entries = (
        {TileKey(**entry["key"]): entry for entry in json.loads(file.read_text(encoding="utf-8"))} if file.is_file() else {}
    )
    for key in tile_keys(architecture):
        entries.setdefault(key, _entry(key, present_tile(key, architecture), None, None))
    for outcome in outcomes:
        if outcome.figures:
            figures = [_measured(outcome.tile, one) for one in outcome.figures]
            entries[outcome.key] = _entry(outcome.key, outcome.tile, machine, figures)
    return "[\n" + ",\n".join(_entry_text(entries[key]) for key in tile_keys(architecture)) + "\n]\n"


def _entry(key: TileKey, tile: GemmConfig, machine: dict[str, str] | None, measured: list[dict] | None) -> dict[str, object]:
    return {"key": key._asdict(), "tile": asdict(tile), "machine": machine, "measured": measured}


def _measured(tile: GemmConfig, figures: Figures) -> dict[str, str | float]:
    ms = figures.ms[tile]
    share = round(figures.dense_ms / ms, 3)
    return {"op": figures.op, "shape": figures.shape, "ms": float(f"{ms:.4g}"), "share_of_dense": share}


def _entry_text(entry: dict[str, object]) -> str:
    return "{" + ",\n ".join(f"{json.dumps(name)}: {_lines(value)}" for name, value in entry.items()) + "}"


def _lines(value: object) -> str:
    """JSON; a list with a line for each of its elements."""
    return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "]" if isinstance(value, list) else json.dumps(value)


def print_outcomes(console: Console, outcomes: Sequence[Outcome]) -> None:
    """A line for each key; then what was left out, and why."""
    table = Table("product", "path", "block", "narrow", "present", "chosen", "time", "of dense", "trials")
    for outcome in outcomes:
        table.add_row(*_cells(outcome))
    console.print(table)
    for outcome in outcomes:
        for tile, reason in outcome.faults.items():
            line = f"left out: {tile_name(tile)} for {key_name(outcome.key)} ({reason})"
            console.print(escape(line), style="dim", highlight=False, soft_wrap=True)


def _cells(outcome: Outcome) -> list[str]:
    key, tile = outcome.key, outcome.tile
    same, figures = tile == outcome.present, outcome.figures
    cells = [key.product, key.path, str(key.block), "yes" if key.narrow else "", tile_name(outcome.present)]
    if not figures:
        return [*cells, "no shape chooses this entry"]
    time = geometric_mean(one.ms[tile] / one.ms[outcome.present] for one in figures)
    share = geometric_mean(one.dense_ms / one.ms[tile] for one in figures)
    name = "the same" if same else f"[bold]{tile_name(tile)}[/]"
    return [*cells, name, f"{time:.2f}", f"{100 * share:.0f} %", str(len(figures))]


def tile_name(tile: GemmConfig) -> str:
    return f"{tile.block_m}x{tile.block_n}x{tile.block_k} w{tile.num_warps} s{tile.num_stages}"


def key_name(key: TileKey) -> str:
    return f"{key.product}, {key.path}, {key.block}{', narrow' if key.narrow else ''}"
