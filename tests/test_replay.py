"""A call made once more gives what the same call made in full gives, or is made in full."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blocksparse_moe import Columns, Topology, expert_mlp
from blocksparse_moe.products import implementation
from blocksparse_moe_kernels import Schedule, reference
from tests.support import DEVICE

replay = pytest.importorskip("blocksparse_moe_kernels.triton.replay")

T, K, E, H, F = 7, 2, 3, 16, 24


@pytest.fixture
def replays(monkeypatch):
    """The forms of calls that were replayed; none are known before the test."""
    monkeypatch.setattr(replay, "_recordings", {})
    seen, real = [], replay._Recording.replay
    monkeypatch.setattr(replay._Recording, "replay", lambda self, args: seen.append(args) or real(self, args))
    return seen


def operands(dtype=torch.float32) -> dict[str, torch.Tensor]:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, dtype=dtype)

    return {
        "x": randn(T, H),
        "up_proj": randn(E, 2 * F, H) / 4,
        "down_proj": randn(E, H, F) / 4,
        "routing_weights": torch.rand(T, K, device=DEVICE),
    }


def ids() -> torch.Tensor:
    return torch.randint(-1, E, (T, K), device=DEVICE)


def sorted_by_kernel(expert_ids: torch.Tensor) -> Topology:
    """As `Topology.from_ids` does on a GPU."""
    from blocksparse_moe_kernels.triton.topology import sort_ids

    *tables, by_size, tiles, num_tiles = sort_ids(expert_ids, E, 16)
    return Topology(*tables, T, schedules=(Schedule(16, tiles, num_tiles),), by_size=by_size)


def check(topology: Topology, **given: object) -> None:
    """Inference against the oracle."""
    with torch.no_grad():
        y = expert_mlp(topology=topology, backend="triton", **given)
        expected = reference.expert_mlp(topology=topology, **given)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


def test_other_values_of_the_same_form(replays):
    for count in range(3):
        check(Topology.from_ids(ids(), E, block_ms=(16,)), **operands())
        assert len([args for args in replays if isinstance(args[0], torch.Tensor) and args[0].is_floating_point()]) == count


GRADIENTS = {"_expert_up_grads_run", "_expert_down_grads_run"}


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_training(recompute, replays):
    """Other values each time, and other tensors that want a gradient in between."""
    biases = {"up_proj_bias": torch.zeros(E, 2 * F, device=DEVICE), "down_proj_bias": torch.zeros(E, H, device=DEVICE)}
    for frozen in (None, "x", None, "x", "up_proj"):
        topology, given = sorted_by_kernel(ids()), operands() | biases
        leaves = {name: one.clone().requires_grad_(name != frozen) for name, one in given.items()}
        wanted = [one for one in leaves.values() if one.requires_grad]
        y = expert_mlp(topology=topology, backend="triton", recompute=recompute, **leaves)
        expected = reference.expert_mlp(topology=topology, **leaves)
        grad = torch.randn_like(y)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        for ours, oracle in zip(*(torch.autograd.grad(out, wanted, grad) for out in (y, expected)), strict=True):
            torch.testing.assert_close(ours, oracle, rtol=1e-4, atol=1e-4)
    kept = {form[0].__name__ for form, recording in replay._recordings.items() if recording is not None}
    assert kept == {"_expert_mlp_run" if recompute else "_expert_down_run", "_expert_up_run", *GRADIENTS, "_sort_ids"}


OTHERWISE = {
    "activation": {"activation": "geglu"},
    "no routing weights": {"routing_weights": None},
    "biases": {"up_proj_bias": torch.ones(E, 2 * F), "down_proj_bias": torch.ones(E, H)},
    "by slot": {"routing_weights": torch.ones(T * K)},
    "other strides": {"up_proj": torch.ones(E, H, 2 * F).transpose(1, 2) / 8},
    "other address": {"x": torch.ones(T * H + 1)[1:].view(T, H)},
    "routing weights that a copy makes dense": {"routing_weights": torch.ones(K, T).T},
}


@pytest.mark.slow
@pytest.mark.parametrize("change", OTHERWISE.values(), ids=OTHERWISE)
def test_other_forms_in_turn(change, replays):
    change = {name: one.to(DEVICE) if isinstance(one, torch.Tensor) else one for name, one in change.items()}
    for _ in range(2):
        check(Topology.from_ids(ids(), E, block_ms=(16,)), **operands())
        check(Topology.from_ids(ids(), E, block_ms=(16,)), **operands() | change)


@pytest.mark.slow
def test_tensors_that_share_memory(replays):
    """Rows that are sorted have one tensor for tokens and for slots; ids of one choice have two of the same form."""
    x, single = operands() | {"routing_weights": None}, torch.randint(0, E, (T, 1), device=DEVICE)
    counts = torch.tensor([3, 1, 3], device=DEVICE)
    for _ in range(2):
        check(Topology.from_counts(counts, T, block_ms=(16,)), **x)
        check(Topology.from_ids(single, E, block_ms=(16,)), **x)
    assert replays


@pytest.mark.slow
def test_weights_that_begin_at_one_address(replays):
    for apart in (False, True, False, True):
        given = operands()
        if not apart:
            given["down_proj"] = given["up_proj"].flatten()[: E * H * F].view(E, H, F)
        check(Topology.from_ids(ids(), E, block_ms=(16,)), **given)


def test_an_address_that_16_does_not_divide_is_another_form(replays):
    topology, given = Topology.from_ids(ids(), E, block_ms=(16,)), operands()
    check(topology, **given)
    check(topology, **given | {"x": torch.ones(T * H + 1, device=DEVICE)[1:].view(T, H)})
    assert not replays


def test_a_call_within_a_call(replays):
    """The outer one sees the launches of the inner one, whether that is known or not."""
    rows, offsets = torch.randperm(6, device=DEVICE).int(), torch.tensor([0, 6], dtype=torch.int32, device=DEVICE)

    def twice(y, rows, offsets):
        return combined(replay.replay(combined, y, rows, offsets), rows, offsets)

    for function in (twice, combined, twice, twice):
        y = torch.randn(6, 16, device=DEVICE)
        assert torch.equal(replay.replay(function, y, rows, offsets), function(y, rows, offsets))
    assert len(replays) > 1


def test_a_launch_that_cannot_be_made_again(replays, monkeypatch):
    """As a hook of Triton's cache makes it, or what records launches instead of making them."""
    from blocksparse_moe_kernels.triton import combine as module

    def without_run(*args, **constants):
        launcher.launch(*args, **constants)
        if launcher.are_recorded():
            launcher._launches.get()[0] = None

    def twice(y, rows, offsets):
        return combined(combined(y, rows, offsets), rows, offsets)

    launcher = importlib.import_module("blocksparse_moe_kernels.triton.launcher")
    rows, offsets = torch.randperm(6, device=DEVICE).int(), torch.tensor([0, 6], dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(module, "launch", without_run)
    for _ in range(2):
        y = torch.randn(6, 16, device=DEVICE)
        assert torch.equal(replay.replay(twice, y, rows, offsets), y[rows.long()][rows.long()])
    assert not replays


@pytest.mark.slow
def test_pairs_and_unequal_experts(replays):
    columns = Columns.of([4, 8, 12])
    for _ in range(2):
        flat = {
            "up_proj": torch.randn(48, H, device=DEVICE),
            "down_proj": torch.randn(24, H, device=DEVICE),
            "columns": columns,
        }
        check(Topology.from_ids(ids(), E, block_ms=(16,)), **operands() | flat)
        tokens, experts = torch.randint(-1, T, (9,), device=DEVICE), torch.randint(-1, E, (9,), device=DEVICE)
        pairs = Topology.from_pairs(tokens, experts, num_tokens=T, num_experts=E, block_ms=(16,))
        check(pairs, **operands() | {"routing_weights": torch.rand(9, device=DEVICE)})


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8)
@given(sizes=st.lists(st.integers(0, 20), min_size=1, max_size=5))
def test_numbers_of_tokens_in_turn(sizes, replays):
    weights, seen = operands(), [size for size in sizes if size]
    replays.clear()
    replay._recordings.clear()
    for size in sizes:
        x, chosen = torch.randn(size, H, device=DEVICE), torch.randint(-1, E, (size, K), device=DEVICE)
        p = torch.rand(size, K, device=DEVICE)
        check(Topology.from_ids(chosen, E), **weights | {"x": x, "routing_weights": p})
    assert bool(replays) == (len(set(seen)) < len(seen))


@pytest.mark.slow
def test_results_are_new_memory(replays):
    topology, given = Topology.from_ids(ids(), E, block_ms=(16,)), operands()
    with torch.no_grad():
        outputs = [expert_mlp(topology=topology, backend="triton", **given) for _ in range(4)]
    assert len(replays) == 3 and len({y.data_ptr() for y in outputs}) == 4
    assert all(torch.equal(y, outputs[0]) for y in outputs)


def test_a_changed_precision_is_another_form(replays, monkeypatch):
    topology, given = Topology.from_ids(ids(), E, block_ms=(16,)), operands()
    check(topology, **given)
    monkeypatch.setattr(replay, "fp32_precision", lambda: "tf32")
    check(topology, **given)
    assert not replays


@pytest.mark.slow
def test_forms_are_forgotten_before_they_are_too_many(replays, monkeypatch):
    monkeypatch.setattr(replay, "_MOST", 3)
    for size in range(1, 9):
        check(
            Topology.from_ids(torch.randint(0, E, (size, K), device=DEVICE), E),
            **operands() | {"x": torch.randn(size, H, device=DEVICE), "routing_weights": None},
        )
        assert len(replay._recordings) <= 3


def test_descriptors_are_made_anew():
    """Of the tensor of a later call, of the same class, in the same form."""
    from blocksparse_moe_kernels.triton.descriptors import describe
    from blocksparse_moe_kernels.triton.gluon_rings import SwizzledDescriptor

    old, new, seen = torch.zeros(4, 64), torch.ones(4, 64), []
    described = describe(old, 4, 32)
    arguments = (described, 7, SwizzledDescriptor.of(described), None)
    launch = replay.Launch(lambda *given: seen.extend(given), arguments)
    step = replay._Step.of(launch, {old.data_ptr(): 5})
    assert step.used == {5}
    step.launch({5: new})
    assert [type(one) for one in seen] == [type(one) for one in arguments]
    for before, after in ((arguments[0], seen[0]), (arguments[2], seen[2])):
        assert after.base is new and after.form == before.form and after.layout == before.layout


def sum_of(y: torch.Tensor) -> torch.Tensor:
    return implementation("triton").combine(y, Topology.from_counts(torch.tensor([y.shape[0]], device=DEVICE), y.shape[0]))


def combined(y: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return implementation("triton").combine(y, Topology(rows, rows, rows, offsets, y.shape[0]))


NOT_KEPT = {
    "a view from the middle": lambda y, *topology: combined(y[:, 4:], *topology),
    "arithmetic": lambda y, *topology: combined(y + 1, *topology),
    "a value read": lambda y, *topology: combined(y, *topology) if topology[1].sum().item() else y,
    "a result that was given": lambda y, *topology: (combined(y, *topology), y)[1],
    "written to": lambda y, *topology: combined(y, *topology).mul_(2),
    "no launch": lambda y, *topology: torch.empty_like(y).zero_(),
}


def transposed(y: torch.Tensor, *topology: torch.Tensor) -> torch.Tensor:
    return combined(y, *topology).T


@pytest.mark.parametrize("function", [combined, transposed, *NOT_KEPT.values()], ids=["kept", "a view", *NOT_KEPT])
def test_only_launches_are_kept(function, replays):
    for _ in range(3):
        y = torch.randn(6, 16, device=DEVICE)
        rows = torch.randperm(6, device=DEVICE).int()
        offsets = torch.tensor([0, 6], dtype=torch.int32, device=DEVICE)
        assert torch.equal(replay.replay(function, y, rows, offsets), function(y, rows, offsets))
    assert len(replays) == (2 if function in (combined, transposed) else 0)


@pytest.mark.gpu
def test_captured_graph_of_a_replayed_call(replays):
    given, chosen = operands(torch.bfloat16), ids()

    def layer():
        return expert_mlp(topology=Topology.from_ids(chosen, E), **given)

    with torch.no_grad():
        for _ in range(2):
            layer()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer()
        for _ in range(3):
            chosen.copy_(ids())
            given["x"].normal_()
            graph.replay()
            assert torch.equal(y, layer())
