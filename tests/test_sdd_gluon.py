"""The kernel of sdd in Gluon is used where it can be, and computes what the kernel in whose place it runs does, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", minversion="3.6")

from blocksparse_moe import expert_mlp
from blocksparse_moe_kernels import Topology, get_activation, versions
from blocksparse_moe_kernels.config import row_product_tile
from blocksparse_moe_kernels.launch import fold_halves, stack_activated, stack_weight
from blocksparse_moe_kernels.triton import replay, sdd
from blocksparse_moe_kernels.triton.descriptors import weight_form

from .support import HAS_CUDA

if not versions.gluon_is_known():
    pytest.skip("Gluon of this Triton is not known", allow_module_level=True)

from blocksparse_moe_kernels.triton import gluon_rings, sdd_gluon
from blocksparse_moe_kernels.triton.gluon_rings import TILE

from .gluon_support import ROUTINGS, SIZES, assert_same, half, inside, needs_hopper, randn, run_schedule

CLAMPED = "swiglu(alpha=1.702, gate_limit=7, up_limit=7, up_offset=1)"


def test_it_stands_in_for_a_tile_of_the_table():
    assert row_product_tile(128, torch.bfloat16, 90, tma=True) == TILE


# ---------------------------------------------------------------- where it is used

E, F, H = 2, 16, 256


def applies(x=None, w=None, bias=None, activation="swiglu", config=TILE) -> bool:
    """Of operands on a CPU, which counts as sm_90."""
    x = torch.empty(4, H, dtype=torch.bfloat16) if x is None else x
    w = torch.empty(E, 2 * F, x.shape[1], dtype=x.dtype) if w is None else w
    topology = Topology.from_ids(torch.zeros(x.shape[0], 1, dtype=torch.int64), E)
    chosen = None if activation is None else get_activation(activation)
    if chosen is None:
        weight = fold_halves(stack_weight("sdd", w, topology, None))
    else:
        weight, _ = stack_activated("sdd", w, topology, None, chosen)
    return sdd_gluon.applies(x, weight, weight_form(weight), bias, chosen, config)


GIVEN = {
    "nothing special": {},
    "fp16": {"x": half(4, H).half()},
    "limits": {"activation": CLAMPED},
    "halves apart": {"w": half(E, F, 2, H).transpose(1, 2)},
    "an odd number of 8 columns": {"w": half(E, 2 * 24, H)},
    "padded weights": {"w": half(E, 2 * F, H + 8)[..., :H]},
    "rows of x that lie apart": {"x": half(4, 2 * H + 8)[:, 8 : H + 8]},
    "no activation": {"activation": None},
    "no activation, in fp16": {"activation": None, "x": half(4, H).half()},
    "no activation, transposed weights": {"activation": None, "w": half(E, H, F).transpose(1, 2)},
    "no activation, halves that follow each other": {"activation": None, "w": half(E, 2, F, H)},
}
EXCLUDED = {
    "a bias": {"bias": half(E, 2 * F)},
    "no gate": {"activation": "gelu"},
    "interleaved": {"activation": "swiglu(interleaved)"},
    "no activation, a bias": {"activation": None, "bias": half(E, 2 * F)},
    "no activation, halves apart": {"activation": None, "w": half(E, F, 2, H).transpose(1, 2)},
    "no activation, weights without a dense axis": {"activation": None, "w": half(E, 2 * F, H, 2)[..., 0]},
    "no activation, no whole steps": {"activation": None, "x": half(4, H + 8)},
    "another tile": {"config": replace(TILE, block_m=64)},
    "pointers": {"config": replace(TILE, tma=False)},
    "transposed weights": {"w": half(E, H, 2 * F).transpose(1, 2)},
    "weights without a dense axis": {"w": half(E, 2 * F, H, 2)[..., 0]},
    "fp32": {"x": half(4, H).float()},
    "no whole steps": {"x": half(4, H + 8)},
    "fewer steps than slots": {"x": half(4, H - 64)},
    "x transposed": {"x": half(H, 4).T},
    "rows of x at odd addresses": {"x": half(4, H + 4)[:, :H]},
    "x at an odd address": {"x": half(4 * H + 1)[1:].view(4, H)},
    "offsets of more than 32 bits": {"x": torch.empty_strided((4, H), (2**29, 1), dtype=torch.bfloat16, device="meta")},
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_it_applies(given):
    assert applies(**given)


@pytest.mark.parametrize("given", EXCLUDED.values(), ids=EXCLUDED)
def test_it_does_not_apply(given):
    assert not applies(**given)


@pytest.mark.parametrize("architecture", [80, 89, 100, 120])
def test_only_hopper_has_it(architecture, monkeypatch):
    monkeypatch.setattr(gluon_rings, "architecture_of", lambda device: architecture)
    assert not applies()


@pytest.mark.parametrize(
    ("version", "known"), [("3.6.0", True), ("3.6.1+git1", True), ("3.7.1", True), ("3.8.0", False), ("4.6.0", False)]
)
def test_only_known_releases_have_it(version, known, monkeypatch):
    monkeypatch.setattr(versions.metadata, "version", lambda distribution: version)
    assert versions.gluon_is_known() == known


@pytest.mark.skipif(HAS_CUDA, reason="kernels are compiled where there is a GPU")
def test_the_interpreter_has_it_not():
    assert sdd._gluon is None


# ---------------------------------------------------------------- its barriers


def test_rings_under_random_schedules():
    fewest = sdd_gluon.LEAD.value
    for seed in range(60):
        run_schedule(seed, steps=fewest + seed % 4, tiles=1 + seed % 3, gathers=True)


@pytest.mark.parametrize("fault", ["copies waited for too late", "slots freed too early"])
def test_the_model_sees_a_fault(fault):
    with pytest.raises(AssertionError):
        for seed in range(60):
            run_schedule(seed, steps=8, tiles=3, gathers=True, fault=fault)


# ---------------------------------------------------------------- on a GPU


@pytest.fixture
def launched(monkeypatch):
    """One entry for each launch of the kernel."""
    seen, real = [], sdd_gluon.launch_sdd
    monkeypatch.setattr(sdd_gluon, "launch_sdd", lambda *args: seen.append(args) or real(*args))
    return seen


def compared(launched, monkeypatch, topology, compute) -> tuple[list[Tensor], list[Tensor]]:
    """Results of this kernel and of the one in whose place it runs; rows that do not exist are not written."""

    def run() -> list[Tensor]:
        results = [result.values for result in compute() if result is not None]
        kept = int(topology.num_rows)
        assert all(values[kept:].isnan().all() for values in results)
        return [values[:kept] for values in results]

    launched.clear()
    ours = run()
    assert len(launched) == 1
    with monkeypatch.context() as patch:
        patch.setattr(sdd, "_gluon", None)
        plain = run()
    assert len(launched) == 1
    return ours, plain


def both(launched, monkeypatch, x, w, topology, activation, save_pre) -> tuple[list[Tensor], list[Tensor]]:
    """With an activation."""
    chosen = get_activation(activation)
    return compared(
        launched,
        monkeypatch,
        topology,
        lambda: sdd.sdd_activation(x, w, topology, chosen, save_pre=save_pre, config=TILE),
    )


def both_plain(launched, monkeypatch, x, w, topology, order="tokens") -> tuple[list[Tensor], list[Tensor]]:
    """Without one."""
    return compared(launched, monkeypatch, topology, lambda: [sdd.sdd(x, w, topology, order=order, config=TILE)])


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("save_pre", [True, False])
def test_the_same_bits(routing, sizes, save_pre, launched, monkeypatch, fresh_memory):
    T, H, F, E, K = SIZES[sizes]
    topology = Topology.from_ids(ROUTINGS[routing](T, E, K), E)
    x, w = randn(T, H, dtype=torch.bfloat16), randn(E, 2 * F, H, dtype=torch.bfloat16, scale=H**-0.5)
    assert_same(*both(launched, monkeypatch, x, w, topology, "swiglu", save_pre))
    fresh_memory.check_guards()


WEIGHTS = {
    "down": lambda E, F, H, dtype=torch.bfloat16: randn(E, H, F, dtype=dtype, scale=H**-0.5).transpose(1, 2),
    "up": lambda E, F, H, dtype=torch.bfloat16: randn(E, 2 * F, H, dtype=dtype, scale=H**-0.5),
}


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("order", ["tokens", "rows"])
@pytest.mark.parametrize("form", WEIGHTS)
def test_the_same_bits_without_activation(form, order, routing, sizes, launched, monkeypatch, fresh_memory):
    T, H, F, E, K = SIZES[sizes]
    topology, w = Topology.from_ids(ROUTINGS[routing](T, E, K), E), WEIGHTS[form](E, F, H)
    x = randn(T if order == "tokens" else topology.num_slots, H, dtype=torch.bfloat16)
    if order == "rows":
        x[int(topology.num_rows) :] = torch.nan
    assert_same(*both_plain(launched, monkeypatch, x, w, topology, order))
    fresh_memory.check_guards()


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("form", WEIGHTS)
def test_layouts_and_fp16_without_activation(form, launched, monkeypatch, fresh_memory):
    """Weights and tokens that are views of larger ones, what lies between them NaN."""
    T, H, F, E, K = SIZES["of 16 bytes only"]
    topology = Topology.from_ids(ROUTINGS["uneven"](T, E, K), E)
    for dtype in (torch.bfloat16, torch.float16):
        x, w = randn(T, H, dtype=dtype), WEIGHTS[form](E, F, H, dtype)
        wide = inside(w) if form == "up" else inside(w.transpose(1, 2)).transpose(1, 2)
        expected, plain = both_plain(launched, monkeypatch, x, w, topology)
        assert_same(expected, plain)
        ours, plain = both_plain(launched, monkeypatch, inside(x), wide, topology)
        assert_same(ours, plain)
        assert_same(ours, expected)
    fresh_memory.check_guards()


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES)
def test_30_runs_without_activation(sizes, launched, fresh_memory):
    T, H, F, E, K = SIZES[sizes]
    topology, w = Topology.from_ids(ROUTINGS["uneven"](T, E, K), E), WEIGHTS["down"](E, F, H)
    x, kept, results = randn(T, H, dtype=torch.bfloat16), int(topology.num_rows), []
    for _ in range(30):
        results.append(sdd.sdd(x, w, topology, config=TILE).values[:kept])
        fresh_memory.buffers.clear()
        assert_same(results[-1:], results[:1])
    assert len(launched) == 30


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "geglu_tanh", "reglu", "relu2_glu", CLAMPED])
def test_activations(activation, dtype, launched, monkeypatch, fresh_memory):
    T, H, F, E, K = SIZES["of 16 bytes only"]
    topology = Topology.from_ids(ROUTINGS["uneven"](T, E, K), E)
    x, w = randn(T, H, dtype=dtype, scale=3), randn(E, 2 * F, H, dtype=dtype, scale=H**-0.5)
    for save_pre in (True, False):
        assert_same(*both(launched, monkeypatch, x, w, topology, activation, save_pre))
    fresh_memory.check_guards()


@needs_hopper
@pytest.mark.gpu
def test_layouts(launched, monkeypatch, fresh_memory):
    """Halves that lie apart, weights and tokens that are views of larger ones, what lies between them NaN."""
    T, H, F, E, K = SIZES["of 16 bytes only"]
    topology = Topology.from_ids(ROUTINGS["uneven"](T, E, K), E)

    x, w = randn(T, H, dtype=torch.bfloat16), randn(E, 2, F, H, dtype=torch.bfloat16, scale=H**-0.5)
    expected, _ = both(launched, monkeypatch, x, w, topology, "swiglu", True)
    for weight in (w.flatten(1, 2), w.transpose(1, 2).contiguous().transpose(1, 2), inside(w)):
        for tokens in (x, inside(x)):
            ours, plain = both(launched, monkeypatch, tokens, weight, topology, "swiglu", True)
            assert_same(ours, plain)
            assert_same(ours, expected)


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES)
def test_30_runs(sizes, launched, fresh_memory):
    T, H, F, E, K = SIZES[sizes]
    topology = Topology.from_ids(ROUTINGS["uneven"](T, E, K), E)
    x, w = randn(T, H, dtype=torch.bfloat16), randn(E, 2 * F, H, dtype=torch.bfloat16, scale=H**-0.5)
    kept, results = int(topology.num_rows), []
    for _ in range(30):
        pre, act = sdd.sdd_activation(x, w, topology, get_activation("swiglu"), config=TILE)
        results.append((pre.values[:kept], act.values[:kept]))
        fresh_memory.buffers.clear()
        assert_same(list(results[-1]), list(results[0]))
    assert len(launched) == 30


@needs_hopper
@pytest.mark.gpu
def test_replayed_and_in_a_graph(launched, monkeypatch):
    """The layer takes it by itself; later calls of the form launch it on their own tensors."""
    T, H, F, E, K = SIZES["multiples of all tiles"]
    up, down = randn(E, 2 * F, H, dtype=torch.bfloat16, scale=H**-0.5), randn(E, H, F, dtype=torch.bfloat16, scale=F**-0.5)
    topology = Topology.from_ids(ROUTINGS["uneven"](T, E, K), E)

    def layer(x: Tensor) -> Tensor:
        with torch.no_grad():
            return expert_mlp(x, topology, up, down)

    tokens = [randn(T, H, dtype=torch.bfloat16) for _ in range(3)]
    outputs = [layer(x) for x in tokens]
    assert len(launched) == 1
    graph, given = torch.cuda.CUDAGraph(), tokens[0].clone()
    with torch.cuda.graph(graph):
        captured = layer(given)
    replay._recordings.clear()
    monkeypatch.setattr(sdd, "_gluon", None)
    for x, y in zip(tokens, outputs, strict=True):
        given.copy_(x)
        graph.replay()
        replay._recordings.clear()
        assert torch.equal(y, layer(x)) and torch.equal(y, captured)
    assert len(launched) == 1
