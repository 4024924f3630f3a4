"""The picture of a topology: where its block-sparse matrix has entries."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from .block_sparse import Columns, check_columns
from .topology import Topology
from .versions import require

require("matplotlib", "3.9", "Topology.plot")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.collections import PolyCollection  # noqa: E402
from matplotlib.colors import hsv_to_rgb  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LABELLED_EXPERTS = 16
_GOLDEN_RATIO = 0.618034


def plot_topology(topology: Topology, columns: Columns | None = None, ax: Axes | None = None) -> Axes:
    """Draw rows down and experts across, each expert's block in a colour of its own, dropped rows blank. Synchronises.

    As rows are sorted, an expert's entries are one rectangle: what is drawn grows with E, not with M, at any resolution.

    Args:
        topology: M rows over E experts.
        columns: columns of each expert; one each if not given.
        ax: axes to draw into; a new figure's if not given.
    Returns:
        The axes.
    Raises:
        ValueError: columns of another number of experts.
    """
    if columns is not None:
        check_columns("Topology.plot", topology, columns)
    E, M = topology.num_experts, topology.num_slots
    rows = topology.offsets.tolist()
    edges = range(E + 1) if columns is None else columns.offsets()
    if ax is None:
        _, ax = plt.subplots(figsize=(6, 6), layout="constrained")

    used = [
        (expert, [(left, top), (right, top), (right, bottom), (left, bottom)])
        for expert, ((top, bottom), (left, right)) in enumerate(zip(pairwise(rows), pairwise(edges), strict=True))
        if top < bottom
    ]
    # An edge of the face's colour keeps a rectangle visible that is thinner than a pixel.
    blocks = PolyCollection(
        [corners for _, corners in used],
        facecolors=[_colour(expert) for expert, _ in used],
        edgecolors="face",
        linewidths=1,
    )
    ax.add_collection(blocks, autolim=False)

    dropped = M - rows[-1]
    if dropped:
        ax.axhline(rows[-1], color="gray", linewidth=0.8, linestyle="--")
    ax.set(
        xlim=(0, edges[-1]),
        ylim=(max(M, 1), 0),
        xlabel="expert" if columns is None else "column, expert after expert",
        ylabel="row, sorted by expert",
        title=f"{topology.num_tokens} tokens, {rows[-1]} rows, {dropped} dropped, {E} experts",
    )
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    if E <= _LABELLED_EXPERTS:
        centres = [(left + right) / 2 for left, right in pairwise(edges)]
        ax.set_xticks(centres, [str(expert) if columns is None else f"e{expert}" for expert in range(E)])
    return ax


def _colour(expert: int) -> tuple[float, float, float]:
    """Hues a golden angle apart: no two alike, and neighbours far from each other."""
    return tuple(hsv_to_rgb((expert * _GOLDEN_RATIO % 1, 0.75, 0.85)))
