"""Other implementations of the same layer, each used when it is installed. A peer is an adapter and one row of `PEERS`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from ..inputs import Case
from ..variants import Layer
from . import huggingface


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
    "transformers eager": Peer(huggingface.why_not, partial(huggingface.build, implementation="eager")),
    "transformers grouped_mm": Peer(huggingface.why_not, partial(huggingface.build, implementation="grouped_mm")),
    "transformers grouped_mm compiled": Peer(
        huggingface.why_not_compiled, partial(huggingface.build, implementation="grouped_mm", compiled=True)
    ),
}


def build_peers(case: Case, names: Iterable[str]) -> tuple[list[Layer], dict[str, str]]:
    """The layers of the named peers, and why the others of them are left out."""
    left_out = {name: reason for name in names if (reason := PEERS[name].why_not(case)) is not None}
    return [PEERS[name].build(case) for name in names if name not in left_out], left_out
