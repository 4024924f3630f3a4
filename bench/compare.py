"""Two CSV files of results beside each other: what got faster, what slower."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .report import EQUAL, Result, figure


def compare(old: Sequence[Result], new: Sequence[Result], console: Console) -> bool:
    """Print the ratios of the times of all that both measured; whether ours got slower, or failed, or nothing is in both.

    Differences of at most 4 % are called equal. Roofs are compared too: one that moved says that the machine did.
    """
    before, after = ({_key(result): result for result in results} for results in (old, new))
    table = Table("op", "shape", "routing", "stage", "variant")
    for header in ("old ms", "new ms", "new / old", ""):
        table.add_column(header, justify="right", no_wrap=True)
    both = [key for key in after if key in before]
    for key in both:
        verdict = _verdict(before[key], after[key])
        table.add_row(
            *key[:5], _ms(before[key]), _ms(after[key]), _ratio(before[key], after[key]), _STYLES.get(verdict, verdict)
        )
    console.print(table if both else "Nothing was measured in both files.")
    for name, results, others in (("old", before, after), ("new", after, before)):
        if alone := [key for key in results if key not in others]:
            of = "; ".join(dict.fromkeys(", ".join(key[:4]) for key in alone))
            console.print(f"{len(alone)} only in the {name} file, of {escape(of)}", style="dim", highlight=False)
    for attribute in ("device", "versions"):
        was, now = ({getattr(result, attribute) for result in results} for results in (old, new))
        if was != now:
            console.print(f"{attribute}: {', '.join(sorted(was))} -> {', '.join(sorted(now))}", highlight=False)
    return not both or any(
        after[key].kind == "ours" and _verdict(before[key], after[key]) in ("slower", "FAILED") for key in both
    )


_STYLES = {"slower": "[red]slower[/]", "FAILED": "[red]FAILED[/]", "faster": "[green]faster[/]"}


def _key(result: Result) -> tuple[str, ...]:
    return result.op, result.shape, result.routing, result.stage, result.variant, result.dtype, result.mode


def _verdict(old: Result, new: Result) -> str:
    if new.ms is None:
        return "FAILED"
    if old.ms is None:
        return "failed before"
    if abs(new.ms / old.ms - 1) <= EQUAL:
        return "≈"
    return "slower" if new.ms > old.ms else "faster"


def _ms(result: Result) -> str:
    return "" if result.ms is None else figure(result.ms)


def _ratio(old: Result, new: Result) -> str:
    return "" if old.ms is None or new.ms is None else f"{new.ms / old.ms:.2f}"
