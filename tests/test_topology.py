"""Topology and its schedules, against brute force and the oracle, whatever the routing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from blocksparse_moe_kernels import Columns, Topology, reference, torch_products
from blocksparse_moe_kernels.config import choose_block_m

from .support import DEVICE, Routing, routings

FIELDS = ("tokens", "slots", "rows", "offsets", "token_slots", "token_offsets")

ID_LAYOUTS = {
    "contiguous": Tensor.contiguous,
    "transposed": lambda ids: ids.T.contiguous().T,
    "sliced": lambda ids: ids.repeat_interleave(2, dim=1)[:, ::2],
    "one token for all": lambda ids: ids[:1].expand_as(ids),
}
wide_routings = routings(max_tokens=16, max_experts=9, max_top_k=11)
block_ms = st.one_of(st.integers(1, 40), st.sampled_from([16, 64, 127, 128, 1000]))


def integers(values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(list(values), dtype=dtype, device=DEVICE)


def assert_describes(
    topology: Topology, tokens: Sequence[int], experts: Sequence[int], num_tokens: int, num_experts: int
) -> None:
    """The topology is that of slots with these tokens and experts, in a stable order: by expert, then by slot."""
    M, T, E = len(experts), num_tokens, num_experts
    here = [0 <= token < T and 0 <= expert < E for token, expert in zip(tokens, experts, strict=True)]
    kept = sorted((slot for slot in range(M) if here[slot]), key=lambda slot: experts[slot])
    num_rows = len(kept)

    assert (topology.num_tokens, topology.num_slots, topology.num_experts) == (T, M, E)
    assert topology.num_rows.shape == () and int(topology.num_rows) == num_rows
    assert topology.slots[:num_rows].tolist() == kept
    assert topology.tokens[:num_rows].tolist() == [tokens[slot] for slot in kept]
    assert sorted(topology.slots.tolist()) == list(range(M))
    assert topology.rows.tolist() == [kept.index(slot) if here[slot] else -1 for slot in range(M)]

    counts = [sum(experts[slot] == expert for slot in kept) for expert in range(E)]
    assert topology.counts.tolist() == counts
    by_size = topology.experts_by_size()
    assert by_size.dtype == torch.int32 and by_size.tolist() == sorted(range(E), key=lambda expert: -counts[expert])
    assert topology.offsets.tolist() == [sum(counts[:expert]) for expert in range(E + 1)]
    assert topology.row_experts().tolist() == [experts[slot] for slot in kept] + [E] * (M - num_rows)
    assert topology.to_dense_mask().tolist() == [
        [row < num_rows and experts[kept[row]] == expert for expert in range(E)] for row in range(M)
    ]

    for name in FIELDS:
        field = getattr(topology, name)
        assert field is None or (field.dtype == torch.int32 and field.device == topology.device and field.is_contiguous())
    assert topology.token_offsets is None or topology.token_offsets.shape == (T + 1,)
    for token in range(T):
        assert slots_of(topology, token) == [slot for slot in range(M) if tokens[slot] == token]


def slots_of(topology: Topology, token: int) -> list[int]:
    """Slots of a token in the order in which `combine` adds them."""
    if topology.token_offsets is None:
        K = topology.slots_per_token
        return list(range(K * token, K * token + K))
    assert topology.token_slots is not None
    first, last = topology.token_offsets[token : token + 2].tolist()
    return topology.token_slots[first:last].tolist()


def assert_same(found: Topology, expected: Topology) -> None:
    assert found.num_tokens == expected.num_tokens
    assert [schedule.block_m for schedule in found.schedules] == [schedule.block_m for schedule in expected.schedules]
    pairs = [(getattr(found, name), getattr(expected, name)) for name in FIELDS]
    pairs += [(a.tiles, b.tiles) for a, b in zip(found.schedules, expected.schedules, strict=True)]
    for a, b in pairs:
        assert (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu()))


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


def large_ids(T: int, K: int, E: int, *, outside: bool = True) -> Tensor:
    """Uneven routing; some ids lie outside [0, E)."""
    ids = (torch.rand(T, K, device=DEVICE) ** 3 * E).long()
    return torch.where(torch.rand(T, K, device=DEVICE) < 0.05, torch.where(ids % 2 == 0, -1, E + ids), ids) if outside else ids


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


# -------------------------------------------------------------------- compile, meta, copies


def everything(ids: Tensor) -> list[Topology]:
    T, K = ids.shape
    tokens = torch.arange(T, device=ids.device)[:, None].expand(T, K).flatten()
    return [
        Topology.from_ids(ids, 5, block_ms=(4, 16)),
        Topology.from_counts(ids[:5, 0], 6, block_ms=(4,)),
        Topology.from_pairs(tokens, ids.flatten(), num_tokens=T, num_experts=5, block_ms=(4,)),
    ]


def derived(topology: Topology) -> list[Tensor]:
    """What kernels and users ask of a topology."""
    columns = Columns.of([1 + expert % 3 for expert in range(topology.num_experts)])
    return [
        topology.schedule(7).tiles,
        topology.row_experts(),
        topology.counts,
        topology.to_dense_mask(),
        topology.to_dense_mask(Columns.equal(3, topology.num_experts)),
        topology.to_dense_mask(columns),
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*lru_cache:UserWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_compiled(backend):
    """One graph whatever the routing, and another when the number of tokens begins to vary."""

    def run(ids):
        topologies = everything(ids)
        return topologies, derived(topologies[0])

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for T, outside in [(7, True), (7, False), (9, True), (20, False)]:
        ids = large_ids(T, 2, 5, outside=outside)
        (topologies, tensors), (expected, expected_tensors) = compiled(ids), run(ids)
        for found, eager in zip(topologies, expected, strict=True):
            assert type(found) is Topology
            assert_same(found, eager)
        for found, eager in zip(tensors, expected_tensors, strict=True):
            assert torch.equal(found, eager)
    assert counter.frame_count <= 2


def test_meta_device():
    """Shapes and dtypes are known without data."""
    ids = large_ids(6, 2, 5).cpu()
    for meta, real in zip(everything(ids.to("meta")), everything(ids), strict=True):
        tensors = [(getattr(meta, name), getattr(real, name)) for name in FIELDS]
        tensors += [(a.tiles, b.tiles) for a, b in zip(meta.schedules, real.schedules, strict=True)]
        tensors += zip(derived(meta), derived(real), strict=True)
        for a, b in tensors:
            assert (a is None and b is None) or (a.is_meta and a.shape == b.shape and a.dtype == b.dtype)
        assert "meta" in str(meta)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda topology: pickle.loads(pickle.dumps(topology))])
def test_copies(copied):
    for topology in everything(large_ids(6, 2, 5)):
        copy_of_it = copied(topology)
        assert_same(copy_of_it, topology)
        assert copy_of_it.offsets.data_ptr() != topology.offsets.data_ptr()


# -------------------------------------------------------------------- what a user sees


IDS = torch.zeros(3, 2, dtype=torch.int64)
FLAT = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Topology.from_ids(FLAT, 4), ValueError, r"from_ids: expert_ids must be \[T, K\].*shape \(4,\).*\[:, None\]"),
        (lambda: Topology.from_ids(IDS, 0), ValueError, "from_ids: .*at least one expert; got num_experts=0"),
        (lambda: Topology.from_counts(FLAT[:0], 3), ValueError, "from_counts: .*at least one expert"),
        (lambda: Topology.from_counts(IDS, 3), ValueError, r"from_counts: counts must be \[E\].*got shape \(3, 2\)"),
        (lambda: Topology.from_counts(FLAT, -1), ValueError, "from_counts: .*num_rows at least 0.* -1"),
        (lambda: Topology.from_counts(FLAT, 2**31), ValueError, r"from_counts: 2147483648 slots.*2\*\*31"),
        (
            lambda: Topology.from_ids(torch.zeros(2**30, 2, dtype=torch.int64, device="meta"), 4),
            ValueError,
            r"from_ids: 2147483648 slots do not fit 32-bit row numbers; split the batch",
        ),
        (
            lambda: Topology.from_pairs(FLAT, FLAT[:3], num_tokens=2, num_experts=2),
            ValueError,
            r"from_pairs: tokens and experts must be \[M\] both; got \(4,\) and \(3,\)",
        ),
        (lambda: Topology.from_pairs(IDS, IDS, num_tokens=2, num_experts=2), ValueError, r"must be \[M\] both; got \(3, 2\)"),
        (lambda: Topology.from_pairs(FLAT, FLAT, num_tokens=-1, num_experts=2), ValueError, "num_tokens .*; got -1"),
        (lambda: Topology.from_pairs(FLAT, FLAT, num_tokens=2**31, num_experts=2), ValueError, r"num_tokens .*2\*\*31"),
        (lambda: Topology.from_pairs(FLAT, FLAT, num_tokens=2, num_experts=0), ValueError, "at least one expert"),
        (lambda: Topology.from_ids(IDS, 4).schedule(0), ValueError, "schedule: block_m must be at least 1; got 0"),
        (lambda: Topology.from_ids(IDS, 4, block_ms=(-2,)), ValueError, "schedule: block_m must be at least 1; got -2"),
        (
            lambda: Topology.from_ids(IDS, 4).to_dense_mask(Columns.equal(3, 5)),
            ValueError,
            "to_dense_mask: columns describe 5 experts; the topology has 4",
        ),
        (lambda: Topology.from_ids(IDS, 4).plot(Columns.equal(3, 5)), ValueError, "plot: columns describe 5 experts"),
    ],
)
def test_mistakes(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.bool, torch.float32, torch.bfloat16])
def test_ids_that_are_no_ids(dtype):
    for call, name in [
        (lambda: Topology.from_ids(IDS.to(dtype), 4), "from_ids: expert_ids"),
        (lambda: Topology.from_counts(FLAT.to(dtype), 4), "from_counts: counts"),
        (lambda: Topology.from_pairs(FLAT.to(dtype), FLAT, num_tokens=2, num_experts=2), "from_pairs: tokens"),
        (lambda: Topology.from_pairs(FLAT, FLAT.to(dtype), num_tokens=2, num_experts=2), "from_pairs: experts"),
    ]:
        with pytest.raises(TypeError, match=f"{name} must be int32 or int64; got {dtype}"):
            call()


def test_prints_itself():
    ids = torch.tensor([[0, 2], [2, -1], [2, 0], [2, 5]])
    assert (
        str(Topology.from_ids(ids, 4))
        == """\
Topology: 4 tokens, 8 slots, 4 experts on cpu
  6 rows, 2 dropped; per expert 0 to 4, mean 1.5, 2 empty
  expert    0        2 ████████████████
  expert    1        0
  expert    2        4 ████████████████████████████████
  expert    3        0"""
    )
    lines = str(Topology.from_ids(ids, 40)).splitlines()
    assert lines[1] == "  7 rows, 1 dropped; per expert 0 to 4, mean 0.2, 37 empty"
    assert len(lines) == 2 + 16 + 1 and lines[-1] == "  ... 24 more experts"
    assert (
        str(Topology.from_ids(ids[:0], 1))
        == """\
Topology: 0 tokens, 0 slots, 1 experts on cpu
  0 rows, 0 dropped; per expert 0 to 0, mean 0.0, 1 empty
  expert    0        0"""
    )


@pytest.fixture
def plt():
    matplotlib = pytest.importorskip("matplotlib", reason="needs matplotlib")
    before = matplotlib.get_backend()
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")
    matplotlib.use(before)


def boxes(axes) -> list[tuple[float, ...]]:
    """(left, top, right, bottom) of each block that is drawn."""
    return [tuple(path.get_extents().extents.tolist()) for path in axes.collections[0].get_paths()]


def test_plots_itself(plt):
    ids = torch.tensor([[0, 2], [2, -1], [2, 0], [2, 5]], device=DEVICE)
    topology = Topology.from_ids(ids, 4)
    axes = topology.plot()
    assert boxes(axes) == [(0, 0, 1, 2), (2, 2, 3, 6)]
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 4), (8, 0))
    assert axes.get_title() == "4 tokens, 6 rows, 2 dropped, 4 experts"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "2", "3"]
    axes.figure.canvas.draw()

    assert boxes(topology.plot(Columns.of([3, 1, 5, 2]))) == [(0, 0, 3, 2), (4, 2, 9, 6)]
    _, given_axes = plt.subplots()
    assert topology.plot(ax=given_axes) is given_axes
    assert Topology.from_ids(ids[:0], 4).plot().get_ylim() == (1, 0)


def test_plot_of_a_large_topology(plt):
    """A million rows: as many shapes as experts, no two of one colour, and every expert is seen, one with a single row too."""
    counts = torch.full((200,), 5000, device=DEVICE)
    counts[7] = 1
    axes = Topology.from_counts(counts, 1_000_000).plot(Columns.equal(768, 200))
    assert len(boxes(axes)) == 200
    colours = axes.collections[0].get_facecolors()
    assert len({tuple(colour) for colour in colours.tolist()}) == 200
    axes.figure.canvas.draw()
    left, top, right, _ = boxes(axes)[7]
    x, y = axes.transData.transform(((left + right) / 2, top))
    width, height = axes.figure.canvas.get_width_height()
    image = torch.frombuffer(bytearray(axes.figure.canvas.buffer_rgba()), dtype=torch.uint8).view(height, width, 4)
    around = image[height - int(y) - 2 : height - int(y) + 2, int(x), :3]
    assert (around != 255).any()


# -------------------------------------------------------------------- on a GPU


@pytest.fixture
def no_host_sync():
    """What follows `.start()` may not wait for the device."""

    class Watch:
        start = staticmethod(lambda: torch.cuda.set_sync_debug_mode("error"))

    yield Watch
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_no_host_sync(no_host_sync, deterministic):
    ids = large_ids(4096, 8, 128)[:, :7]
    columns = Columns.of([1 + expert % 3 for expert in range(128)])

    def build():
        T, K = ids.shape
        tokens = torch.arange(T, device=ids.device)[:, None].expand(T, K).flatten()
        topologies = [
            Topology.from_ids(ids, 128, block_ms=(64,)),
            Topology.from_ids(ids.int(), 128, block_ms=(64, 16)),
            Topology.from_counts(ids[:128, 0], 5000, block_ms=(64,)),
            Topology.from_pairs(tokens, ids.flatten(), num_tokens=T, num_experts=128, block_ms=(64,)),
        ]
        return topologies, [derived(topology) for topology in topologies], topologies[0].to_dense_mask(columns)

    torch.use_deterministic_algorithms(deterministic)
    try:
        warm, _, _ = build()
        no_host_sync.start()
        topologies, _, _ = build()
        torch.cuda.set_sync_debug_mode("default")
    finally:
        torch.use_deterministic_algorithms(False)
    for found, expected in zip(topologies, warm, strict=True):
        assert_same(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "K", "E"), [(131_072, 8, 128), (1, 8, 4096), (32_768, 10, 512), (100_001, 3, 7)])
def test_cuda_agrees_with_cpu(T, K, E):
    ids = large_ids(T, K, E)
    tokens = torch.arange(T, device=DEVICE).repeat_interleave(K)
    for height in (1, 48, 128):
        for build in (
            lambda at, b: Topology.from_ids(ids.to(at), E, block_ms=(b,)),
            lambda at, b: Topology.from_counts(ids[:, 0].to(at).clamp(0, 50)[:E], T, block_ms=(b,)),
            lambda at, b: Topology.from_pairs(tokens.to(at), ids.flatten().to(at), num_tokens=T, num_experts=E, block_ms=(b,)),
        ):
            assert_same(build("cuda", height), build("cpu", height))


@pytest.mark.gpu
def test_captured_in_a_cuda_graph():
    """A graph replayed with another routing gives that routing's topology."""
    ids = large_ids(512, 4, 60)
    Topology.from_ids(ids, 60, block_ms=(64,))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = Topology.from_ids(ids, 60, block_ms=(64,))
    for _ in range(3):
        ids.copy_(large_ids(512, 4, 60))
        graph.replay()
        assert_same(captured, Topology.from_ids(ids, 60, block_ms=(64,)))
