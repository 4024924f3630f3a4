"""Train the demo's language model with its experts in several precisions, from one seed, and draw what becomes of the loss.

    python examples/low_precision.py        # prints a table, writes runs/low_precision/low_precision.png

bf16 by autocast, MXFP8 (emulated where the GPU has none) and, where Transformer Engine is installed, its FP8 with a scale of
each tensor. Everything but the experts' products is the same.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from transformers import MixtralForCausalLM

from blocksparse_moe import patch_huggingface
from blocksparse_moe.demo.settings import Settings, Text
from blocksparse_moe.demo.training import model_config

PRECISIONS = ("bf16", "mxfp8", "fp8_current")
MEAN_OF = 25
"""Steps that a point of the curves averages."""


class Training:
    """One training, its experts in one precision; NotImplementedError says why one cannot run here."""

    def __init__(self, precision: str, start: MixtralForCausalLM, settings: Settings) -> None:
        self.precision = precision
        self.model = copy.deepcopy(start).to(settings.torch_device).train()
        with self.autocast():
            self.report = patch_huggingface(self.model, precision=precision).report.splitlines()[0]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95))
        self.losses: list[float] = []

    def autocast(self) -> torch.autocast:
        return torch.autocast(next(self.model.parameters()).device.type, torch.bfloat16)

    def step(self, batch: Tensor) -> None:
        with self.autocast():
            loss = self.model(input_ids=batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    @property
    def curve(self) -> list[float]:
        """The loss, averaged over the last steps at each."""
        return [statistics.fmean(self.losses[max(0, end - MEAN_OF) : end]) for end in range(1, len(self.losses) + 1)]


def draw(trainings: list[Training]) -> Figure:
    """The curves, and what each differs from the first one by."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    first = trainings[0].curve
    for number, training in enumerate(trainings):
        color = f"C{number}"
        left.plot(training.curve, label=training.precision, color=color)
        if number:
            right.plot([100 * (one / two - 1) for one, two in zip(training.curve, first, strict=True)], color=color)
    left.set_ylabel("loss, nats per byte")
    left.legend(frameon=False, title="experts in")
    right.set_ylabel(f"difference from {trainings[0].precision}, %")
    right.set_ylim(-2, 2)
    right.axhspan(-1, 1, color="0.93", zorder=0)
    for axes in (left, right):
        axes.set_xlabel(f"step (mean of the last {MEAN_OF})")
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device", default=None)
    parser.add_argument("--output", type=Path, default=Path("runs/low_precision"))
    arguments = parser.parse_args()

    settings = Settings(steps=arguments.steps, batch_size=arguments.batch_size, device=arguments.device)
    text = Text.load(settings)
    torch.manual_seed(settings.seed)
    start = MixtralForCausalLM(model_config(settings))
    console = Console()
    trainings = []
    for precision in PRECISIONS:
        try:
            trainings.append(Training(precision, start, settings))
        except NotImplementedError as error:
            console.print(f"left out: {precision} ({error})", highlight=False)
    generator = torch.Generator().manual_seed(settings.seed)
    for _ in track(range(settings.steps), "training"):
        batch = text.batch(settings, generator)
        for training in trainings:
            training.step(batch)

    table = Table("experts in", "loss", f"over {trainings[0].precision}", "how")
    for training in trainings:
        last = training.curve[-1]
        table.add_row(training.precision, f"{last:.4f}", f"{last / trainings[0].curve[-1] - 1:+.2%}", training.report)
    console.print(table)
    arguments.output.mkdir(parents=True, exist_ok=True)
    draw(trainings).savefig(arguments.output / "low_precision.png", dpi=110)
    print(f"loss {trainings[0].losses[0]:.3f} -> {trainings[0].losses[-1]:.3f}")


if __name__ == "__main__":
    main()
