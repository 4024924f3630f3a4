"""expert_mlp and combine: values and every gradient against the fp64 oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocksparse_moe import combine, expert_mlp
from blocksparse_moe_kernels import ACTIVATIONS, Columns, Topology, get_activation, reference

from .support import (
    DEVICE,
    assert_within_budget,
    each_backend_and_dtype,
    each_backend_and_dtype_slowly,
    each_backend_slowly,
    layouts,
    leaf,
    randn,
    routings,
    sizes,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")


SMOOTH = ["swiglu(interleaved)", "swiglu(alpha=1.702, up_offset=1, interleaved)", "gelu(alpha=0.5)"]
CLAMPED = ["swiglu(alpha=1.702, gate_limit=0.7, up_limit=0.7, up_offset=1, interleaved)", "geglu(gate_limit=0.5, up_limit=0.3)"]
"""What rounds to the other side of a limit has another gradient, so that low precision has no budget for these."""


def draw_weights(data, routing, hidden, dtype, activation, bias):
    """Named fp64 weights of the layer, and the columns of unequal experts or None."""
    E, halves = routing.num_experts, get_activation(activation).halves
    equal = data.draw(st.booleans())
    widths = [data.draw(st.integers(1, 24))] * E if equal else data.draw(st.lists(st.integers(1, 24), min_size=E, max_size=E))
    columns, total = None if equal else Columns.of(widths), sum(widths)
    up_shape = (E, halves * widths[0], hidden) if equal else (halves * total, hidden)
    down_shape = (E, hidden, widths[0]) if equal else (total, hidden)
    weights = {
        "up_proj": randn(*up_shape, dtype=dtype, scale=hidden**-0.5),
        "down_proj": randn(*down_shape, dtype=dtype, scale=0.5),
    }
    if bias:
        weights["up_proj_bias"] = randn(*up_shape[:-1], dtype=dtype)
        weights["down_proj_bias"] = randn(E, hidden, dtype=dtype)
    return weights, columns


def weight_gradient_terms(routing, inputs, grad, activation, columns) -> float:
    """A routing weight's gradient is <dy, y of its slot>, whose terms are of any size: the largest root of summed squares."""
    slots = Topology.from_ids(routing.expert_ids.reshape(-1, 1), routing.num_experts)
    weights = {name: value.double() for name, value in inputs.items() if name not in ("x", "routing_weights")}
    x, grad = (tensor.double().repeat_interleave(routing.expert_ids.shape[1], 0) for tensor in (inputs["x"], grad))
    y = reference.expert_mlp(x, slots, **weights, activation=activation, columns=columns)
    return max([1.0, *(y * grad).norm(dim=1).tolist()])


@each_backend_and_dtype_slowly
@given(data=st.data())
def test_expert_mlp(backend, dtype, data):
    routing = data.draw(routings())
    topology, hidden = routing.topology, data.draw(sizes)
    parametrised = SMOOTH + (CLAMPED if dtype == torch.float32 else [])
    activation = data.draw(st.sampled_from(sorted(ACTIVATIONS)) | st.sampled_from(parametrised))
    weights, columns = draw_weights(data, routing, hidden, dtype, activation, data.draw(st.booleans()))
    inputs = {"x": randn(topology.num_tokens, hidden, dtype=dtype)} | weights
    weights_dtype = data.draw(st.sampled_from([dtype, torch.promote_types(dtype, torch.float32)]))
    if data.draw(st.booleans()):
        inputs["routing_weights"] = randn(*routing.expert_ids.shape, dtype=weights_dtype)
    grad = randn(topology.num_tokens, hidden, dtype=dtype)
    chosen_layouts = {name: data.draw(layouts) for name in inputs}

    def run(function, precision, **options):
        leaves = {}
        for name, value in inputs.items():
            narrow = weights_dtype if name == "routing_weights" and precision != torch.float64 else precision
            leaves[name] = leaf(value, narrow, chosen_layouts[name])
        y = function(
            leaves["x"],
            topology,
            **{k: v for k, v in leaves.items() if k != "x"},
            activation=activation,
            columns=columns,
            **options,
        )
        grads = torch.autograd.grad(y, list(leaves.values()), grad.to(precision))
        for name, value in zip(leaves, grads, strict=True):
            assert value.dtype == leaves[name].dtype
        with torch.no_grad():
            x = leaves.pop("x")
            without_grad = function(x, topology, **leaves, activation=activation, columns=columns, **options)
        tolerance = 4 * torch.finfo(y.dtype).eps
        torch.testing.assert_close(
            without_grad, y, rtol=tolerance, atol=tolerance * float(y.detach().abs().max() if y.numel() else 0)
        )
        return y, *grads

    ours = run(expert_mlp, dtype, backend=backend)
    oracle = run(reference.expert_mlp, torch.float64)
    torchs = run(reference.expert_mlp, dtype)
    for name, *results in zip(("y", *inputs), ours, oracle, torchs, strict=True):
        terms = weight_gradient_terms(routing, inputs, grad, activation, columns) if name == "routing_weights" else 1
        assert_within_budget(name, *results, dtype, terms)
    here = (routing.expert_ids >= 0) & (routing.expert_ids < routing.num_experts)
    if "routing_weights" in inputs:
        assert not ours[-1][~here].any(), "a dropped slot has exactly zero gradient"
    if columns is None:
        unused = topology.counts == 0
        for name, value in zip(inputs, ours[1:], strict=True):
            if name in weights:
                assert not value[unused].any(), f"an expert without rows has exactly zero gradient of {name}"


@each_backend_and_dtype
@given(data=st.data())
def test_combine(backend, dtype, data):
    routing = data.draw(routings())
    topology, hidden = routing.topology, data.draw(sizes)
    y, weights = randn(topology.num_slots, hidden, dtype=dtype), randn(*routing.expert_ids.shape, dtype=dtype)
    grad = randn(topology.num_tokens, hidden, dtype=dtype)
    weighted, layout = data.draw(st.booleans()), data.draw(layouts)

    def run(function, precision, **options):
        leaves = [leaf(y, precision, layout), *([leaf(weights, precision)] if weighted else [])]
        out = function(leaves[0], topology, *leaves[1:], **options)
        return out, *torch.autograd.grad(out, leaves, grad.to(precision))

    names = ("out", "dy", "dweights") if weighted else ("out", "dy")
    ours, oracle = run(combine, dtype, backend=backend), run(reference.combine, torch.float64)
    for name, *results in zip(names, ours, oracle, run(reference.combine, dtype), strict=True):
        assert_within_budget(name, *results, dtype)


@each_backend_slowly
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_dropped_slot_has_no_gradient_whatever_its_weight(backend, value):
    ids = torch.tensor([[0, 1], [-1, 2], [5, -1]], device=DEVICE)
    topology = Topology.from_ids(ids, 3)
    y, weights = randn(6, 8).float().requires_grad_(), randn(3, 2).float().masked_fill((ids < 0) | (ids > 2), value)
    weights.requires_grad_()
    out = combine(y, topology, weights, backend=backend)
    grad_y, grad_weights = torch.autograd.grad(out.square().sum(), (y, weights), create_graph=True)
    assert not grad_y[3:].any() and grad_y[:3].all()
    assert not grad_weights[1, 0].any() and not grad_weights[2].any()
    for second in torch.autograd.grad(grad_y.sum() + grad_weights.sum(), (y, weights)):
        assert second.isfinite().all()


@each_backend_slowly
def test_dropped_slots_under_anomaly_detection(backend):
    """Every gradient that a node returns is written in full: anomaly detection looks for NaN in all of it."""
    topology = Topology.from_ids(torch.tensor([[0, -1], [2, 7], [1, 0]], device=DEVICE), 3)
    for columns in (None, Columns.of([2, 4, 3])):
        up_shape, down_shape = ((3, 10, 8), (3, 8, 5)) if columns is None else ((18, 8), (9, 8))
        leaves = [randn(*shape).float().requires_grad_() for shape in ((3, 8), up_shape, down_shape, (3, 2))]
        with torch.autograd.set_detect_anomaly(True):
            expert_mlp(leaves[0], topology, *leaves[1:], columns=columns, backend=backend).sum().backward()
        assert all(leaf.grad.isfinite().all() for leaf in leaves)


@each_backend_slowly
def test_pairs_without_tokens(backend):
    pair = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    topology = Topology.from_pairs(pair, pair, num_tokens=0, num_experts=2)
    y, weights = randn(1, 4).requires_grad_(), randn(1).requires_grad_()
    out = combine(y.float(), topology, weights, backend=backend)
    assert out.shape == (0, 4)
    out.sum().backward()
    assert not y.grad.any() and not weights.grad.any()


@each_backend_slowly
@given(data=st.data())
def test_pairs_of_any_number_per_token(backend, data):
    """A topology of (token, expert) pairs computes what the same choices as ids with dropped slots compute."""
    num_tokens, num_experts, hidden = 5, 3, 12
    chosen = data.draw(st.lists(st.tuples(st.integers(0, num_tokens - 1), st.integers(0, num_experts - 1)), max_size=12))
    tokens = torch.tensor([token for token, _ in chosen], dtype=torch.int64, device=DEVICE)
    experts = torch.tensor([expert for _, expert in chosen], dtype=torch.int64, device=DEVICE)
    topology = Topology.from_pairs(tokens, experts, num_tokens=num_tokens, num_experts=num_experts)
    x, weights = randn(num_tokens, hidden).float(), randn(len(chosen)).float()
    up, down = randn(num_experts, 10, hidden).float(), randn(num_experts, hidden, 5).float()
    leaves = [tensor.requires_grad_() for tensor in (x, up, down, weights)]
    y = expert_mlp(x, topology, up, down, weights, backend=backend)
    expected = torch.zeros_like(x, dtype=torch.float64)
    for pair, (token, expert) in enumerate(chosen):
        gate, value = (up[expert].double() @ x[token].double()).chunk(2)
        row = weights[pair].double() * (down[expert].double() @ (torch.nn.functional.silu(gate) * value))
        expected = expected.index_add(0, torch.tensor([token], device=DEVICE), row[None])
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
    if chosen:
        for ours, oracle in zip(torch.autograd.grad(y.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True):
            torch.testing.assert_close(ours, oracle, rtol=1e-3, atol=1e-3)


@each_backend_slowly
@given(data=st.data())
def test_permuting_tokens_permutes_the_result(backend, data):
    routing = data.draw(routings())
    T, E = routing.expert_ids.shape[0], routing.num_experts
    x, up, down = randn(T, 16).float(), randn(E, 12, 16).float(), randn(E, 16, 6).float()
    order = torch.randperm(T).to(DEVICE)
    y = expert_mlp(x, routing.topology, up, down, backend=backend)
    permuted = Topology.from_ids(routing.expert_ids[order], E)
    moved = expert_mlp(x[order], permuted, up, down, backend=backend)
    torch.testing.assert_close(moved, y[order], rtol=1e-5, atol=1e-5 * float(y.abs().max()) if y.numel() else 0)


@each_backend_slowly
def test_two_runs_are_bitwise_equal(backend):
    ids = torch.randint(0, 4, (16, 2), device=DEVICE)
    leaves = [t.float().requires_grad_() for t in (randn(16, 24), randn(4, 20, 24), randn(4, 24, 10), randn(16, 2))]

    def run():
        y = expert_mlp(leaves[0], Topology.from_ids(ids, 4), *leaves[1:], backend=backend)
        return y, *torch.autograd.grad(y.square().sum(), leaves)

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(up_proj=(3, 9, 8)), r"up_proj must be \[3, 2F, H\] \(gate rows, then up rows\) .* got up_proj \[3, 9, 8\]"),
        (dict(up_proj=(2, 10, 8)), r"the topology covers 3 experts, so up_proj must be \[3, 2F, H\]"),
        (dict(up_proj=(3, 10, 4)), r"got up_proj \[3, 10, 4\] and down_proj \[3, 8, 5\]"),
        (dict(down_proj=(3, 8, 4)), r"and down_proj \[3, H, F\]; got up_proj \[3, 10, 8\] and down_proj \[3, 8, 4\]"),
        (dict(down_proj=(15, 8)), r"Flat weights of unequal experts need columns"),
        (dict(x=(5, 8)), r"expert_mlp: x must be \[2, 8\]; got \[5, 8\]"),
        (dict(routing_weights=(3, 1)), "one entry for each of the 2 slots"),
    ],
)
@each_backend_slowly
def test_errors_say_what_to_do(backend, change, message):
    topology = Topology.from_ids(torch.tensor([[0], [2]], device=DEVICE), 3)
    shapes = {"x": (2, 8), "up_proj": (3, 10, 8), "down_proj": (3, 8, 5), "routing_weights": (2, 1)} | change
    tensors = {name: torch.randn(shape, device=DEVICE) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        expert_mlp(tensors.pop("x"), topology, **tensors, backend=backend)


def test_unknown_names_are_refused():
    topology = Topology.from_ids(torch.tensor([[0]], device=DEVICE), 1)
    x, up, down = torch.randn(1, 4, device=DEVICE), torch.randn(1, 6, 4, device=DEVICE), torch.randn(1, 4, 3, device=DEVICE)
    with pytest.raises(ValueError, match="'swish' is not known; choose one of swiglu"):
        expert_mlp(x, topology, up, down, activation="swish")
    with pytest.raises(ValueError, match="choose"):
        expert_mlp(x, topology, up, down, backend="cuda")


@each_backend_slowly
@pytest.mark.parametrize("unequal", [False, True])
@pytest.mark.parametrize("frozen", [(), ("up_proj", "x"), ("down_proj", "routing_weights", "down_proj_bias")], ids=str)
def test_recomputation_changes_nothing_but_memory(backend, unequal, frozen):
    topology = Topology.from_ids(torch.tensor([[0, 2], [2, -1], [0, 0], [3, 2], [2, 0]], device=DEVICE), 4)
    widths, H = ([5, 3, 8, 2] if unequal else [6, 6, 6, 6]), 7
    shapes = {
        "x": (5, H),
        "up_proj": (2 * sum(widths), H) if unequal else (4, 12, H),
        "down_proj": (sum(widths), H) if unequal else (4, H, 6),
        "routing_weights": (5, 2),
        "up_proj_bias": (2 * sum(widths),) if unequal else (4, 12),
        "down_proj_bias": (4, H),
    }
    leaves = {name: leaf(randn(*shape), torch.float32).requires_grad_(name not in frozen) for name, shape in shapes.items()}
    wanted = [tensor for tensor in leaves.values() if tensor.requires_grad]
    columns, grad = Columns.of(widths) if unequal else None, randn(5, H).float()
    kept: dict[bool, set[int]] = {False: set(), True: set()}

    def run(recompute):
        def pack(tensor):
            kept[recompute].add(tensor.untyped_storage().data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = expert_mlp(topology=topology, columns=columns, recompute=recompute, backend=backend, **leaves)
        return y, *torch.autograd.grad(y, wanted, grad)

    for found, expected in zip(run(recompute=True), run(recompute=False), strict=True):
        assert torch.equal(found, expected)
    assert len(kept[True]) == len(kept[False]) - 1, "the pre-activation is not kept"
