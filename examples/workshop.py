"""What the examples share: text that every machine has, read as bytes, and a loss on a part of it."""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

VOCABULARY = 256


def steps_asked_for(description: str) -> int:
    """`--steps` of the command line, or enough to see the loss fall."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    return parser.parse_args().steps


class Text(torch.utils.data.Dataset):
    """Sources of the Python standard library, cut into sequences of `length` bytes."""

    def __init__(self, length: int, files: int = 40) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:files])
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.sequences = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.sequences[index], "labels": self.sequences[index]}


@torch.no_grad()
def mean_loss(model: nn.Module, text: Text, batch_size: int = 16) -> float:
    """On the last sequences of the text, in nats per byte."""
    device = next(model.parameters()).device
    ids = text.sequences[-batch_size:].to(device)
    training = model.training
    model.eval()
    loss = model(input_ids=ids, labels=ids, output_router_logits=False).loss.item()
    model.train(training)
    return loss
