"""What the tests of the products in Gluon share: a model of their rings, and operands that find faults."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from blocksparse_moe_kernels.config import architecture_of
from blocksparse_moe_kernels.triton import gluon_rings, sdd_gluon
from blocksparse_moe_kernels.triton.sdd_activation_backward_gluon import Plan, lag_of

from .support import DEVICE, HAS_CUDA


def half(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


# ---------------------------------------------------------------- the rings of a program


class Barrier:
    """An mbarrier: it completes a phase when all arrivals and all bytes that were announced have come."""

    def __init__(self, count: int) -> None:
        self.count = self.missing = count
        self.bytes = self.phase = 0

    def arrive(self, expected: int = 0, came: int = 0) -> None:
        self.missing -= not came
        self.bytes += expected - came
        assert self.missing >= 0
        if self.missing == self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count

    def has_completed(self, parity: int) -> bool:
        return self.phase % 2 != parity


def run_schedule(seed: int, steps: int, tiles: int, gathers: bool, fault: str = "", plan: Plan | None = None) -> None:
    """The rings of a program under a random schedule. A wgmma and a copy end when the schedule says so.

    gathers: whether consumers copy the rows of one operand for themselves; else the producer loads both.
    plan: of a kernel that goes through its tiles in pieces.

    AssertionError: a step is multiplied with data of another one, data is overwritten while it is read, or nobody goes on.
    """
    X, W = sdd_gluon.X_SLOTS.value, gluon_rings.SLOTS.value if plan is None else plan.slots
    lead, chance = sdd_gluon.LEAD.value, random.Random(seed)
    full, empty = [Barrier(1) for _ in range(W)], [Barrier(2) for _ in range(W)]
    weight, rows = [None] * W, [[None] * X, [None] * X]
    multiplying: list[list] = [[], []]  # of each consumer, oldest first: (slot of the weight, slot of x)
    copying: list[list] = [[], []]  # slots of x and steps, in turn
    loading: list = []
    pieces = [None if plan is None else Pieces(plan, tiles, fault) for _ in range(2)]

    def producer():
        for number in range(tiles * steps):
            slot, phase = number % W, number // W % 2
            while not empty[slot].has_completed(phase ^ 1):
                yield
            assert all(slot != read for group in multiplying for read, _ in group), "weight overwritten"
            full[slot].arrive(expected=1)
            weight[slot] = None
            loading.append((slot, number))
            yield

    def copy(group: int, number: int) -> None:
        if not gathers:
            return
        slot = number % X
        assert all(slot != read for _, read in multiplying[group]), "rows overwritten"
        assert pieces[group] is None or not pieces[group].is_stored_from(slot), "results overwritten"
        rows[group][slot] = None
        copying[group].append((slot, number))

    def consumer(group: int):
        for number in range(lead):
            copy(group, number)
        if pieces[group] is not None:
            pieces[group].begin()
        for number in range(tiles * steps):
            slot, phase = number % W, number // W % 2
            while len(copying[group]) > lead - 1 + (fault == "copies waited for too late"):
                yield
            while not full[slot].has_completed(phase):
                yield
            assert weight[slot] == number, "another step"
            assert not gathers or rows[group][number % X] == number, "another step"
            multiplying[group].append((slot, number % X))
            yield
            while len(multiplying[group]) > 1 and fault != "slots freed too early":
                yield
            if number % steps:
                empty[(slot - 1) % W].arrive()
            elif pieces[group] is not None:
                yield from pieces[group].begin_tile(number // steps)
            copy(group, number + lead)
            yield
            if number % steps == steps - 1:
                while multiplying[group]:
                    yield
                empty[slot].arrive()
                if pieces[group] is not None:
                    yield from pieces[group].finish_tile(number // steps, number % X)

    running, idle = {0: consumer(0), 1: consumer(1), 2: producer()}, 0
    favourite = chance.randrange(3)
    while running:
        event, group = chance.random(), chance.randrange(2)
        if event < 0.15 and loading:
            slot, number = loading.pop(chance.randrange(len(loading)))
            weight[slot] = number
            full[slot].arrive(came=1)
        elif event < 0.3 and copying[group]:
            slot, number = copying[group].pop(0)
            rows[group][slot] = number
        elif event < 0.45 and multiplying[group]:
            multiplying[group].pop(0)
        elif event < 0.6 and pieces[group] is not None and pieces[group].on_the_way(chance):
            pass
        else:
            name = favourite if favourite in running and chance.random() < 0.5 else chance.choice(list(running))
            if next(running[name], running) is running:
                del running[name]
            idle += 1
            assert idle < 400 * tiles * (steps + 8), "nobody goes on"
    assert not any(some and (some.loading or some.announced()) for some in pieces), "a load that nobody waited for"


class Pieces:
    """What `sdd_activation_backward_gluon` does with the pieces of its tiles, in one consumer."""

    def __init__(self, plan: Plan, tiles: int, fault: str) -> None:
        self.tiles, self.fault, self.buffers, self.scaled = tiles, fault, plan.buffers, 64 // plan.piece
        self.number, self.lag = 256 // plan.piece, lag_of(plan)
        self.loaded = [Barrier(1) for _ in range(plan.buffers)]
        self.held: list[int | None] = [None] * plan.buffers
        self.loading: list[tuple[int, int]] = []  # places and pieces
        self.storing: list[tuple] = []  # places, and slots of x with parts of them, in turn

    def begin(self) -> None:
        for piece in range(self.buffers - self.lag):
            self.load(0, piece)

    def begin_tile(self, tile: int):
        """Under the first wgmma."""
        while self.storing and self.fault != "results not waited for":
            yield
        for piece in range(self.buffers - self.lag, self.buffers):
            self.load(tile, piece)

    def load(self, tile: int, piece: int) -> None:
        tile, piece = tile + piece // self.number, piece % self.number
        if tile < self.tiles:
            place = piece % self.buffers
            assert place not in self.storing, "results overwritten"
            self.loaded[place].arrive(expected=1)
            self.held[place] = None
            self.loading.append((place, tile * self.number + piece))

    def finish_tile(self, tile: int, slot: int):
        for piece in range(self.number):
            place, part = piece % self.buffers, (slot, piece % self.scaled)
            while not self.loaded[place].has_completed(piece // self.buffers % 2):
                yield
            assert self.held[place] == tile * self.number + piece, "another piece"
            yield
            while len(self.storing) > 2 * (self.lag - 1 + (self.fault == "stores waited for too late")):
                yield
            assert place not in self.storing and part not in self.storing, "results overwritten"
            self.storing += [place, part]
            if piece >= self.lag:
                self.load(tile, piece - self.lag + self.buffers)
            yield

    def on_the_way(self, chance: random.Random) -> bool:
        """A load or a store ends, if there is one."""
        if self.loading and (not self.storing or chance.random() < 0.5):
            place, piece = self.loading.pop(chance.randrange(len(self.loading)))
            self.held[place] = piece
            self.loaded[place].arrive(came=1)
        elif self.storing:
            self.storing.pop(0)
        else:
            return False
        return True

    def is_stored_from(self, slot: int) -> bool:
        return any(isinstance(read, tuple) and read[0] == slot for read in self.storing)

    def announced(self) -> bool:
        return any(barrier.bytes for barrier in self.loaded)


# ---------------------------------------------------------------- on a GPU


needs_hopper = pytest.mark.skipif(HAS_CUDA and architecture_of(DEVICE) != 90, reason="the kernels in Gluon are for sm_90")


ROUTINGS = {
    "uneven": lambda T, E, K: (torch.rand(T, K, device=DEVICE) ** 2 * (E + 1)).long(),  # E itself is none
    "every other expert": lambda T, E, K: torch.randint(0, E // 2, (T, K), device=DEVICE) * 2,
    "all rows to one expert": lambda T, E, K: torch.full((T, K), E - 1, device=DEVICE),
    "nothing is kept": lambda T, E, K: torch.full((T, K), -1, device=DEVICE),
}
SIZES = {  # T, H, F, E, K
    "multiples of all tiles": (4096, 2048, 768, 16, 4),
    "of 16 bytes only": (4001, 320, 776, 16, 4),
    "fewer tiles than programs": (96, 256, 136, 4, 2),
    "narrow": (1000, 1024, 8, 8, 2),
}


def randn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def inside(values: Tensor) -> Tensor:
    """The same as a view of a wider tensor, NaN around it."""
    *others, last = values.shape
    wide = torch.full((*others, last + 24), torch.nan, device=DEVICE, dtype=values.dtype)
    wide[..., 8 : last + 8] = values
    return wide[..., 8 : last + 8]


def assert_same(ours: list[Tensor], plain: list[Tensor]) -> None:
    assert len(ours) == len(plain)
    for some, others in zip(ours, plain, strict=True):
        assert not some.isnan().any()
        assert torch.equal(some, others)
