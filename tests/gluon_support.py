"""What the tests of the products in Gluon share: a model of their rings, and operands that find faults."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from blocksparse_moe_kernels.config import architecture_of
from blocksparse_moe_kernels.triton import gluon_rings, sdd_gluon

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


def run_schedule(seed: int, steps: int, tiles: int, gathers: bool, fault: str = "") -> None:
    """The rings of a program under a random schedule. A wgmma and a copy end when the schedule says so.

    gathers: whether consumers copy the rows of one operand for themselves; else the producer loads both.

    AssertionError: a step is multiplied with data of another one, data is overwritten while it is read, or nobody goes on.
    """
    X, W = sdd_gluon.X_SLOTS.value, gluon_rings.SLOTS.value
    lead, chance = sdd_gluon.LEAD.value, random.Random(seed)
    full, empty = [Barrier(1) for _ in range(W)], [Barrier(2) for _ in range(W)]
    weight, rows = [None] * W, [[None] * X, [None] * X]
    multiplying: list[list] = [[], []]  # of each consumer, oldest first: (slot of the weight, slot of x)
    copying: list[list] = [[], []]  # slots of x and steps, in turn
    loading: list = []

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
        rows[group][slot] = None
        copying[group].append((slot, number))

    def consumer(group: int):
        for number in range(lead):
            copy(group, number)
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
            copy(group, number + lead)
            yield
            if number % steps == steps - 1:
                while multiplying[group]:
                    yield
                empty[slot].arrive()

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
        else:
            name = favourite if favourite in running and chance.random() < 0.5 else chance.choice(list(running))
            if next(running[name], running) is running:
                del running[name]
            idle += 1
            assert idle < 400 * tiles * steps, "nobody goes on"


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
