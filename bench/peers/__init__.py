"""Other implementations of the same layer, each used when it is installed. A peer is an adapter and one row of `PEERS`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from ..inputs import Case
from ..variants import Layer, first_line
from . import huggingface, megablocks, scattermoe, sonic_moe, torch_grouped_mm, transformer_engine


@dataclass(frozen=True)
class Peer:
    """An adapter.

    Attributes:
        why_not: why the peer cannot run on a case, or None.
        build: its layer on the tensors of a case.
    """

    why_not: Callable[[Case], str | None]
    build: Callable[[Case], Layer]


PEERS = {
    "sonic-moe": Peer(sonic_moe.why_not, sonic_moe.build),
    "megablocks grouped": Peer(megablocks.why_not, megablocks.build),
    "scattermoe": Peer(scattermoe.why_not, scattermoe.build),
    "Transformer Engine": Peer(transformer_engine.why_not, transformer_engine.build),
    "torch grouped_mm": Peer(torch_grouped_mm.why_not, torch_grouped_mm.build),
    "transformers eager": Peer(huggingface.why_not, partial(huggingface.build, implementation="eager")),
    "transformers grouped_mm": Peer(huggingface.why_not, partial(huggingface.build, implementation="grouped_mm")),
    "transformers grouped_mm compiled": Peer(
        huggingface.why_not_compiled, partial(huggingface.build, implementation="grouped_mm", compiled=True)
    ),
}


def build_peers(case: Case, names: Iterable[str]) -> tuple[list[Layer], dict[str, str]]:
    """The layers of the named peers, and why the others of them are left out."""
    layers: list[Layer] = []
    left_out: dict[str, str] = {}
    for name in names:
        reason = PEERS[name].why_not(case)
        if reason is None:
            try:
                layers.append(PEERS[name].build(case))
            except Exception as error:  # other people's code may fail in any way; said in its place, the others go on
                reason = f"cannot be built: {first_line(error)}"
        if reason is not None:
            left_out[name] = reason
    return layers, left_out
