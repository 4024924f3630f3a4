"""The demo: a small Mixtral trained three ways on real text, and compared.

settings    what was asked for, and the text
training    the model, its three trainings, and what is counted on the way
results     differences, checks, metrics.json
report      the terminal and the two pictures
"""

from __future__ import annotations

from rich.console import Console

from blocksparse_moe_kernels.versions import require

from .settings import DemoError, Settings, Text

__all__ = ["DemoError", "Settings", "run"]

INTERRUPTED = 130


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
        settings.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"--output {settings.output} cannot be made: {error.strerror}.") from error

    from .report import Report
    from .training import train

    report = Report(Console())
    results = train(settings, text, report)
    if results is None:
        report.say("Ended by Ctrl-C before the first step was done; nothing was written.")
        return INTERRUPTED
    report.show(results)
    report.write(results)
    if results.interrupted:
        return INTERRUPTED
    return 0 if all(check.holds for check in results.checks) else 1
