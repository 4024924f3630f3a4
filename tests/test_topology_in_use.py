"""Topology compiled, copied, printed, plotted, misused; without host syncs and in CUDA graphs on a GPU."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from blocksparse_moe_kernels import Columns, Topology

from .support import DEVICE
from .topology_support import FIELDS, assert_same, large_ids

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
