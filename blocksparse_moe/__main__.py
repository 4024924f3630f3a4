"""The command line: `blocksparse-moe`, also `python -m blocksparse_moe`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import __version__

app = typer.Typer(
    name="blocksparse-moe",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"blocksparse-moe {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it and exit.")
    ] = False,
) -> None:
    """Exact mixture-of-experts layers as two block-sparse products."""


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Training steps of each of the three.")] = 150,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="cuda where there is one")] = None,
    backend: Annotated[str, typer.Option(help="Who computes our experts: auto, torch or triton.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, of all weights.")] = "float32",
    text: Annotated[
        Path | None, typer.Option(help="File to learn, read as bytes.", show_default="sources of the standard library")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder of metrics.json, loss.png and load.png.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Of the first weights, the batches and the sample.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Sequences in a batch.")] = 8,
    sequence_length: Annotated[int, typer.Option(help="Bytes in a sequence.")] = 128,
    experts: Annotated[int, typer.Option(help="Experts in each layer.")] = 8,
    top_k: Annotated[int, typer.Option(help="Experts that each token visits.")] = 2,
) -> None:
    """Train a small Mixtral three ways and compare.

    The same weights and batches go to the `eager` experts of transformers, to its `grouped_mm`, and to this package after
    `patch_huggingface(model)`. Shown are losses and how far they differ, tokens per second, dropped rows, the load of every
    expert, and what the trained model writes.

    Ctrl-C ends the training after the step in hand and reports what there is; a second one stops at once.

    Exit codes: 0, everything promised holds; 1, a check failed; 2, it cannot run as asked; 130, ended by Ctrl-C.
    """
    from .demo import DemoError, Settings, run

    try:
        settings = Settings(
            steps=steps,
            device=device,
            backend=backend,
            dtype=dtype,
            text=text,
            output=output,
            seed=seed,
            batch_size=batch_size,
            sequence_length=sequence_length,
            experts=experts,
            top_k=top_k,
        )
        code = run(settings)
    except DemoError as error:
        typer.echo(f"blocksparse-moe demo: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("\nblocksparse-moe demo: ended by Ctrl-C; nothing was written.", err=True)
        raise typer.Exit(130) from None
    raise typer.Exit(code)


@app.command()
def supports(
    model_type: Annotated[
        str | None, typer.Argument(help='As in a config, for example "mixtral". Default: all families.')
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table for a document.")] = False,
) -> None:
    """Which Hugging Face models `patch_huggingface` can compute, in the installed transformers.

    Exit codes: 0; 1, the model type that was asked for cannot be computed here; 2, transformers is missing or lacks it.
    """
    from .integrations import huggingface

    try:
        found = huggingface.all_supports() if model_type is None else [huggingface.supports(model_type)]
    except (ImportError, ValueError) as error:
        typer.echo(f"blocksparse-moe {error}", err=True)
        raise typer.Exit(2) from None
    if markdown:
        typer.echo(huggingface.markdown(found))
    else:
        for support in found:
            typer.echo(support)
    if model_type is not None and not found[0]:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
