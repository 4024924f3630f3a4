"""Train the demo's language model with several ways to balance its experts, from one seed, and draw what becomes of them.

    python examples/balance.py              # prints a table, writes runs/balance/balance.png

Every MoE block of the model is a dMoE, and a MoEMonitor sees the load of its experts. One training is not balanced at all, for
comparison.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from transformers import MixtralForCausalLM

from blocksparse_moe import MoEConfig, MoEMonitor, RouterConfig, RouterOutput, dMoE
from blocksparse_moe.demo.settings import Settings, Text
from blocksparse_moe.demo.training import model_config
from blocksparse_moe.router import BiasBalancer, load_balancing_loss

COEFFICIENT = 0.02
GAMMA = 1e-2
"""DeepSeek-V3 takes 1e-3, for many thousand steps."""

Loss = Callable[[RouterOutput, int], Tensor]
LOSSES: dict[str, Loss | None] = {
    "nothing": None,
    "loss": lambda routing, sequences: load_balancing_loss(routing),
    "loss by sequence": lambda routing, sequences: load_balancing_loss(routing, sequences=sequences),
    "bias": None,
}


class Block(nn.Module):
    """A dMoE in the place of Mixtral's own block; keeps what its router decided last, for the loss."""

    def __init__(self, settings: Settings, bias: bool) -> None:
        super().__init__()
        config = model_config(settings)
        router = RouterConfig(settings.top_k, score="sigmoid", correction_bias=bias)
        self.layer = dMoE(MoEConfig(config.hidden_size, config.intermediate_size, settings.experts, router=router))
        self.routing: RouterOutput | None = None

    def forward(self, x: Tensor) -> Tensor:
        y, self.routing = self.layer(x, return_routing=True)
        return y


class Training:
    """One training, with one way to balance."""

    def __init__(self, method: str, start: MixtralForCausalLM, settings: Settings) -> None:
        self.method, self.settings = method, settings
        self.model = copy.deepcopy(start)
        torch.manual_seed(settings.seed)  # the same weights for every method
        for layer in self.model.model.layers:
            layer.mlp = Block(settings, bias=method == "bias")
        self.model.to(settings.torch_device).train()
        self.blocks = [module for module in self.model.modules() if isinstance(module, Block)]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95))
        self.balancer = BiasBalancer(self.model, gamma=GAMMA) if method == "bias" else None
        self.monitor = MoEMonitor(self.model, window=settings.steps)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, batch: Tensor) -> None:
        begin = time.perf_counter()
        loss = self.model(input_ids=batch, labels=batch, output_router_logits=False).loss
        total, balance = loss, LOSSES[self.method]
        if balance is not None:
            losses = [balance(block.routing, len(batch)) for block in self.blocks if block.routing is not None]
            total = loss + COEFFICIENT * torch.stack(losses).mean()
        total.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if self.balancer is not None:
            self.balancer.step()
        self.losses.append(loss.item())  # waits for the device
        self.seconds.append(time.perf_counter() - begin)
        self.monitor.step()
        self.optimizer.zero_grad()

    @property
    def loads(self) -> list[Tensor]:
        """Of each layer [steps, E], 1 = mean."""
        return [layer.history / layer.history.mean(dim=1, keepdim=True) for layer in self.monitor.read()]

    @property
    def hottest(self) -> Tensor:
        """[steps]: largest load over the mean, averaged over layers."""
        return torch.stack([load.amax(dim=1) for load in self.loads]).mean(dim=0)


def draw(trainings: list[Training]) -> Figure:
    """Losses and largest loads of all, and a heat map for each training and layer."""
    layers = len(trainings[0].loads)
    figure = Figure(figsize=(12, 4 + 1.6 * layers), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subfigures(2, 1, height_ratios=(3, 1.6 * layers))
    left, right = top.subplots(1, 2)
    for training in trainings:
        style = {"color": "black", "linestyle": ":"} if training.method == "nothing" else {}
        left.plot(_smooth(training.losses), label=training.method, **style)
        right.plot(_smooth(training.hottest.tolist()), **style)
    left.set_ylabel("loss, nats per byte")
    left.legend(frameon=False, title="balanced by")
    right.set_ylabel("largest load over mean")
    right.set_ylim(bottom=1)
    for axes in (left, right):
        axes.set_xlabel("step (mean of the last 10)")
        axes.spines[["top", "right"]].set_visible(False)
    maps = bottom.subplots(layers, len(trainings), sharex=True, sharey=True, squeeze=False)
    for column, training in zip(maps.T, trainings, strict=True):
        column[0].set_title(training.method, fontsize="medium")
        for axes, load in zip(column, training.loads, strict=True):
            picture = axes.imshow(load.T.numpy(), aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=4)
        column[-1].set_xlabel("step")
    for layer, axes in enumerate(maps[:, 0]):
        axes.set_ylabel(f"layer {layer}: expert")
    bottom.colorbar(picture, ax=list(maps.flat), label="load, 1 = mean")
    return figure


def _smooth(values: list[float]) -> list[float]:
    return [statistics.fmean(values[max(0, end - 10) : end]) for end in range(1, len(values) + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default=None)
    parser.add_argument("--output", type=Path, default=Path("runs/balance"))
    arguments = parser.parse_args()

    settings = Settings(steps=arguments.steps, device=arguments.device, batch_size=4)
    text = Text.load(settings)
    torch.manual_seed(settings.seed)
    start = MixtralForCausalLM(model_config(settings))
    trainings = [Training(method, start, settings) for method in LOSSES]
    generator = torch.Generator().manual_seed(settings.seed)
    for _ in track(range(settings.steps), "training"):
        batch = text.batch(settings, generator)
        for training in trainings:
            training.step(batch)

    table = Table("balanced by", "loss", "largest load / mean", "ms a step", "time")
    usual = statistics.median(trainings[0].seconds)
    for training in trainings:
        seconds = statistics.median(training.seconds)
        loss, load = _smooth(training.losses)[-1], _smooth(training.hottest.tolist())[-1]
        table.add_row(training.method, f"{loss:.3f}", f"{load:.2f}", f"{1000 * seconds:.1f}", f"{seconds / usual:.3f} x")
    Console().print(table)
    arguments.output.mkdir(parents=True, exist_ok=True)
    draw(trainings).savefig(arguments.output / "balance.png", dpi=110)
    first, last = (statistics.fmean(training.losses[index] for training in trainings) for index in (0, -1))
    print(f"loss {first:.3f} -> {last:.3f}")


if __name__ == "__main__":
    main()
