"""Other implementations of the same layer, each used when it is installed. A peer is an adapter and one row of `PEERS`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from ..inputs import Case
from ..variants import Layer, Variant, first_line
from . import huggingface, megablocks, scattermoe, sonic_moe, stk, torch_grouped_mm, transformer_engine, triton_kernels

Built = TypeVar("Built", Layer, Variant)


@dataclass(frozen=True)
class Peer(Generic[Built]):
    """An adapter.

    Attributes:
        why_not: why the peer cannot run on a case, or None.
        build: its layer on the tensors of a case; of a product, its variant on the operands.
    """

    why_not: Callable[[Case], str | None]
    build: Callable[..., Built]


PEERS: dict[str, Peer[Layer]] = {
    "sonic-moe": Peer(sonic_moe.why_not, sonic_moe.build),
    "triton_kernels": Peer(triton_kernels.why_not, triton_kernels.build),
    "megablocks grouped": Peer(megablocks.why_not_grouped, partial(megablocks.build, implementation="grouped")),
    "megablocks sparse": Peer(megablocks.why_not_sparse, partial(megablocks.build, implementation="sparse")),
    "scattermoe": Peer(scattermoe.why_not, scattermoe.build),
    "Transformer Engine": Peer(transformer_engine.why_not, transformer_engine.build),
    "torch grouped_mm": Peer(torch_grouped_mm.why_not, torch_grouped_mm.build),
    "transformers eager": Peer(huggingface.why_not, partial(huggingface.build, implementation="eager")),
    "transformers grouped_mm": Peer(huggingface.why_not_grouped, partial(huggingface.build, implementation="grouped_mm")),
    "transformers grouped_mm compiled": Peer(
        huggingface.why_not_compiled, partial(huggingface.build, implementation="grouped_mm", compiled=True)
    ),
}

PRODUCT_PEERS: dict[str, dict[str, Peer[Variant]]] = {
    "sdd": {"stk": Peer(stk.why_not, stk.sdd)},
    "dsd": {"stk": Peer(stk.why_not, stk.dsd)},
}
"""By op: products alone, of the operands that ours get."""


def peer_names() -> tuple[str, ...]:
    """Of the layer, then of its products."""
    return tuple(dict.fromkeys([*PEERS, *(name for peers in PRODUCT_PEERS.values() for name in peers)]))


def build_peers(case: Case, names: Iterable[str]) -> tuple[list[Layer], dict[str, str]]:
    """The layers of those of the named peers that have one, and why others of them are left out."""
    return _build(case, {name: PEERS[name] for name in names if name in PEERS}, case)


def build_product_peers(op: str, case: Case, names: Iterable[str], *operands: object) -> tuple[list[Variant], dict[str, str]]:
    """The same for one product, `op`, of the given operands."""
    peers = PRODUCT_PEERS[op]
    return _build(case, {name: peers[name] for name in names if name in peers}, *operands)


def _build(case: Case, peers: Mapping[str, Peer[Built]], *arguments: object) -> tuple[list[Built], dict[str, str]]:
    built: list[Built] = []
    left_out: dict[str, str] = {}
    for name, peer in peers.items():
        reason = peer.why_not(case)
        if reason is None:
            try:
                built.append(peer.build(*arguments))
            except Exception as error:  # other people's code may fail in any way; said in its place, the others go on
                reason = f"cannot be built: {first_line(error)}"
        if reason is not None:
            left_out[name] = reason
    return built, left_out
