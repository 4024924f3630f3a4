"""The demo: a small Mixtral trained three ways on real text, and compared.

settings    what was asked for, and the text
training    the model, its three trainings, and what is counted on the way
results     differences, checks, metrics.json
report      the terminal and the two pictures
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from rich.console import Console

from blocksparse_moe_kernels.versions import require

from .settings import DemoError, Settings, Text

__all__ = ["DemoError", "Settings", "run"]

INTERRUPTED = 130
FILES = ("metrics.json", "loss.png", "load.png")


def run(settings: Settings) -> int:
    """Run the demo: show it on the terminal and write metrics.json, loss.png and load.png into `settings.output`.

    Returns:
        The exit code: 0, or 1 if a check failed, or 130 if Ctrl-C ended the training early.
    Raises:
        DemoError: it cannot run as asked.
    """
    try:
        require("transformers", "5.9", "the demo")
        require("matplotlib", "3.9", "the demo")
    except ImportError as error:
        raise DemoError(str(error)) from error
    text = Text.load(settings)
    try:
        _check_writable(settings.output)
    except OSError as error:
        raise DemoError(f"--output {settings.output} cannot be written into: {error.strerror}.") from error
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that has no blocks to draw with gets question marks

    with _ctrl_c_ends_at_once():
        from .report import Report
        from .training import train

    report = Report(Console())
    results = train(settings, text, report)
    if results is None:
        report.say("Ended by Ctrl-C before the first step was done; nothing was written.")
        return INTERRUPTED
    report.write(results)
    report.show(results)
    report.say(f"\nWrote {', '.join(FILES[:-1])} and {FILES[-1]} into {settings.output}")
    if results.interrupted:
        return INTERRUPTED
    return 0 if all(check.holds for check in results.checks) else 1


@contextmanager
def _ctrl_c_ends_at_once() -> Iterator[None]:
    """While modules are loaded: an interrupted import may be swallowed, or leave anything behind."""

    def end(number: int, frame: object) -> None:
        os.write(2, b"\nblocksparse-moe demo: ended by Ctrl-C; nothing was written.\n")
        os._exit(INTERRUPTED)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _check_writable(folder: Path) -> None:
    """OSError if the files cannot be written there, which would show when the training is done."""
    folder.mkdir(parents=True, exist_ok=True)
    TemporaryFile(dir=folder).close()
    for file in (folder / name for name in FILES):
        if file.exists():
            file.open("ab").close()
