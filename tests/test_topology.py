"""Topology: from ids, counts and pairs, its schedules, and its order, of any size."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from blocksparse_moe_kernels import Topology, reference, torch_products
from blocksparse_moe_kernels.config import choose_block_m

from .support import DEVICE, Routing
from .topology_support import ID_LAYOUTS, assert_describes, assert_same, block_ms, integers, large_ids, slots_of, wide_routings

# -------------------------------------------------------------------- constructors


@given(wide_routings, st.sampled_from(sorted(ID_LAYOUTS)))
def test_from_ids(routing, layout):
    ids, E = ID_LAYOUTS[layout](routing.expert_ids), routing.num_experts
    T, K = ids.shape
    topology = Topology.from_ids(ids, E)
    assert_describes(topology, [slot // K for slot in range(T * K)], ids.flatten().tolist(), T, E)

    slots, offsets = reference.topology(ids, E)
    assert topology.slots[: len(slots)].tolist() == slots
    assert topology.offsets.tolist() == offsets


@given(wide_routings, st.sampled_from(sorted(ID_LAYOUTS)), st.integers(1, 40), st.booleans())
def test_sort_kernels(routing, layout, block_m, few):
    """The counting sort in Triton gives what torch's sort gives, in one launch and in three."""
    from blocksparse_moe_kernels.triton import topology as kernels

    def sort_ids(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "FEW_SLOTS", kernels.FEW_SLOTS if few else 0)
            patch.setattr(kernels, "replay", torch_products.replay)  # each call in full
            return kernels.sort_ids(*args)

    ids, E = ID_LAYOUTS[layout](routing.expert_ids), routing.num_experts
    expected = Topology.from_ids(ids.cpu(), E, block_ms=(block_m,))
    (schedule,) = expected.schedules
    tables = (expected.experts_by_size(), schedule.tiles, schedule.num_tiles)
    results = (expected.tokens, expected.slots, expected.rows, expected.offsets, *tables)
    for found, tensor in zip(sort_ids(ids, E, block_m), results, strict=True):
        assert found.dtype == tensor.dtype and torch.equal(found.cpu(), tensor)


@pytest.mark.slow
@pytest.mark.parametrize(("T", "E"), [(300, 5), (2100, 5), (300, 700), (2100, 1025), (0, 1025)])
def test_sort_kernels_in_one_launch_and_in_three(T, E):
    from blocksparse_moe_kernels.triton.topology import sort_ids

    ids = large_ids(T, 2, E, outside=True)
    expected = Topology.from_ids(ids.cpu(), E, block_ms=(16,))
    *fields, by_size, tiles, num_tiles = sort_ids(ids, E, 16)
    for found, name in zip(fields, ("tokens", "slots", "rows", "offsets"), strict=True):
        assert torch.equal(found.cpu(), getattr(expected, name))
    assert torch.equal(tiles.cpu(), expected.schedules[0].tiles)
    assert torch.equal(by_size.cpu(), expected.experts_by_size())
    assert num_tiles == (tiles[0] >= 0).sum()


@pytest.mark.gpu
def test_sort_op():
    torch.library.opcheck(torch.ops.blocksparse_moe_kernels.sort_ids.default, (large_ids(300, 2, 5, outside=True), 5, 16))


@pytest.mark.parametrize("shape", [(0, 2), (3, 0), (0, 0), (1, 1), (5, 3)])
@pytest.mark.parametrize("E", [1, 3])
def test_from_ids_of_extreme_sizes(shape, E):
    ids = torch.arange(shape[0] * shape[1], device=DEVICE).view(shape) % E
    topology = Topology.from_ids(ids, E, block_ms=(4,))
    assert_describes(
        topology, [token for token in range(shape[0]) for _ in range(shape[1])], ids.flatten().tolist(), shape[0], E
    )
    assert_covers(topology, 4)


@given(st.lists(st.integers(-2, 6), min_size=1, max_size=8), st.integers(0, 24), st.sampled_from([torch.int32, torch.int64]))
@example([2**31 - 1, 2**31 - 1], 5, torch.int32)
@example([2**62, 2**62, 1], 5, torch.int64)
def test_from_counts(counts, num_rows, dtype):
    """Counts beyond M are cut off, rows beyond the counts are dropped, a negative count is none."""
    topology = Topology.from_counts(integers(counts, dtype), num_rows, block_ms=(16,))
    experts = [expert for expert, count in enumerate(counts) for _ in range(min(count, num_rows))][:num_rows]
    experts += [-1] * (num_rows - len(experts))
    assert_describes(topology, range(num_rows), experts, num_rows, len(counts))
    assert_same(topology, Topology.from_ids(integers(experts).view(-1, 1), len(counts), block_ms=(16,)))


@st.composite
def token_expert_pairs(draw):
    T, E = draw(st.integers(0, 6)), draw(st.integers(1, 6))
    pairs = draw(st.lists(st.tuples(st.integers(-2, T + 1), st.integers(-2, E + 1)), max_size=24))
    return [token for token, _ in pairs], [expert for _, expert in pairs], T, E


@given(token_expert_pairs(), *[st.sampled_from([torch.int32, torch.int64])] * 2)
def test_from_pairs(pairs, token_dtype, expert_dtype):
    tokens, experts, T, E = pairs
    topology = Topology.from_pairs(integers(tokens, token_dtype), integers(experts, expert_dtype), num_tokens=T, num_experts=E)
    assert_describes(topology, tokens, experts, T, E)


@given(wide_routings)
def test_pairs_of_ids_are_the_topology_of_ids(routing):
    ids, E = routing.expert_ids, routing.num_experts
    T, K = ids.shape
    tokens = torch.arange(T, device=DEVICE)[:, None].expand(T, K)
    from_pairs = Topology.from_pairs(tokens.flatten(), ids.flatten(), num_tokens=T, num_experts=E)
    from_ids = routing.topology
    for name in ("slots", "rows", "offsets"):
        assert torch.equal(getattr(from_pairs, name), getattr(from_ids, name))
    num_rows = int(from_ids.num_rows)
    assert torch.equal(from_pairs.tokens[:num_rows], from_ids.tokens[:num_rows])
    assert all(slots_of(from_pairs, token) == slots_of(from_ids, token) for token in range(T))


@given(wide_routings, st.randoms(use_true_random=False))
def test_order_of_tokens_changes_rows_within_experts_only(routing, random):
    order = random.sample(range(len(routing.expert_ids)), len(routing.expert_ids))
    permuted = Routing(routing.expert_ids[order], routing.num_experts).topology
    assert torch.equal(permuted.offsets, routing.topology.offsets)
    for expert in range(routing.num_experts):
        first, last = permuted.offsets[expert : expert + 2].tolist()
        tokens = [order[token] for token in permuted.tokens[first:last].tolist()]
        assert sorted(tokens) == routing.topology.tokens[first:last].tolist()


# -------------------------------------------------------------------- schedules


def assert_covers(topology: Topology, block_m: int) -> int:
    """The tiles cut each expert's rows into pieces of `block_m`, in order; the rest of the list is -1. Returns how many."""
    schedule = topology.schedule(block_m)
    M, E = topology.num_slots, topology.num_experts
    assert schedule.block_m == block_m
    assert schedule.tiles.dtype == torch.int32
    assert schedule.capacity == (M + min(E, M) * (block_m - 1)) // block_m
    offsets = topology.offsets.tolist()
    expected = [
        [expert, row, min(block_m, offsets[expert + 1] - row)]
        for expert in range(E)
        for row in range(offsets[expert], offsets[expert + 1], block_m)
    ]
    assert schedule.tiles.T.tolist() == expected + [[-1, -1, -1]] * (schedule.capacity - len(expected))
    columns = schedule.experts, schedule.first_rows, schedule.lengths
    assert torch.equal(torch.stack(columns), schedule.tiles)
    return len(expected)


@given(wide_routings, block_ms)
@example(Routing(torch.zeros(0, 2, dtype=torch.int64, device=DEVICE), 3), 1)
def test_schedule(routing, block_m):
    assert_covers(routing.topology, block_m)


@given(token_expert_pairs(), block_ms)
def test_schedule_of_pairs(pairs, block_m):
    tokens, experts, T, E = pairs
    assert_covers(Topology.from_pairs(integers(tokens), integers(experts), num_tokens=T, num_experts=E), block_m)


@given(st.integers(1, 60), st.integers(1, 12), block_ms)
def test_capacity_is_reached(M, E, block_m):
    """A row for every expert and all others for one: no routing of M rows needs more tiles."""
    used = min(E, M)
    counts = [1] * (used - 1) + [M - used + 1] + [0] * (E - used)
    topology = Topology.from_counts(integers(counts), M)
    assert assert_covers(topology, block_m) == topology.schedule(block_m).capacity


@given(wide_routings, st.lists(block_ms, max_size=3, unique=True))
def test_schedules_made_ahead_are_those_made_later(routing, heights):
    later = routing.topology
    tokens = torch.arange(later.num_tokens, device=DEVICE).repeat_interleave(routing.expert_ids.shape[1])
    ahead = [
        Topology.from_ids(routing.expert_ids, later.num_experts, block_ms=heights),
        Topology.from_counts(later.counts, later.num_slots, block_ms=heights),
        Topology.from_pairs(
            tokens,
            routing.expert_ids.flatten(),
            num_tokens=later.num_tokens,
            num_experts=later.num_experts,
            block_ms=heights,
        ),
    ]
    assert [schedule.block_m for schedule in later.schedules] in ([], [choose_block_m(later.num_slots, later.num_experts)])
    for topology in ahead:
        assert not heights or [schedule.block_m for schedule in topology.schedules] == heights
        for made, block_m in zip(topology.schedules, heights, strict=bool(heights)):
            assert topology.schedule(block_m) is made
            assert torch.equal(made.tiles, later.schedule(block_m).tiles)


# -------------------------------------------------------------------- many experts, many rows, order


def assert_large(topology: Topology, flat_ids: Tensor, num_experts: int) -> None:
    """As `assert_describes`, in vectorised form."""
    here = (flat_ids >= 0) & (flat_ids < num_experts)
    counts = flat_ids[here].bincount(minlength=num_experts)
    assert torch.equal(topology.counts.long(), counts)
    assert torch.equal(topology.offsets[1:].long(), counts.cumsum(0))
    order = torch.where(here, flat_ids, num_experts).argsort(stable=True)
    assert torch.equal(topology.slots.long(), order)
    num_rows = int(topology.num_rows)
    assert torch.equal(topology.rows[order[:num_rows]].cpu(), torch.arange(num_rows, dtype=torch.int32))
    assert (topology.rows[~here] == -1).all()


@pytest.mark.case("D1")
@pytest.mark.parametrize("E", [3, 60, 255, 256, 257, 512, 1023, 1024, 1025, 2048, 4096])
def test_number_of_experts(E):
    """sglang 21610: a scan over experts stops at one thread block."""
    ids = large_ids(3000, 2, E)
    topology = Topology.from_ids(ids, E)
    assert_large(topology, ids.flatten(), E)
    assert_covers(topology, 48)


@pytest.mark.case("D3")
@pytest.mark.parametrize("E", [255, 256, 257, 301, 65_536])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_survive(E, dtype):
    """ms-swift 9981: recorded ids wrap in 8 bits. Here: saved, loaded, and read back from the rows."""
    ids = torch.arange(-2, E + 2, device=DEVICE, dtype=dtype).flip(0).view(-1, 2 if E % 2 == 0 else 1)
    topology = pickle.loads(pickle.dumps(Topology.from_ids(ids, E)))
    flat, here = ids.flatten(), (ids.flatten() >= 0) & (ids.flatten() < E)
    assert torch.equal(topology.row_experts()[topology.rows[here].long()], flat[here].long())
    assert (topology.rows[~here] == -1).all() and int(topology.num_rows) == E


@pytest.mark.case("D5")
@pytest.mark.parametrize("M", [65_535, 65_536, 70_000])
def test_many_rows(M):
    """vLLM 12239, aiter 1869: another path, or another limit, beyond 65 535 rows."""
    E = 256
    ids = large_ids(M, 1, E, outside=False)
    tokens = torch.arange(M, device=DEVICE)
    topologies = [
        Topology.from_ids(ids, E),
        Topology.from_ids(ids.view(-1, 5 if M % 5 == 0 else 8), E),
        Topology.from_pairs(tokens, ids.flatten(), num_tokens=M, num_experts=E),
    ]
    for topology in topologies:
        assert_large(topology, ids.flatten(), E)
    assert torch.equal(Topology.from_counts(ids.flatten().bincount(minlength=E), M).offsets, topologies[0].offsets)


@pytest.mark.case("I4")
def test_order_is_stable_and_repeatable():
    """llama.cpp 26464: slots taken by an atomic counter. 50 runs over 4096 tokens; by token, then k, within an expert."""
    ids = large_ids(4096, 8, 128)
    first = Topology.from_ids(ids, 128, block_ms=(64,))
    assert_large(first, ids.flatten(), 128)
    for _ in range(50):
        assert_same(Topology.from_ids(ids, 128, block_ms=(64,)), first)
