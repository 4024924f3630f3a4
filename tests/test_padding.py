"""Rows that are padded, and back: the plan against its definition, the kernels against torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocksparse_moe.products import implementation
from blocksparse_moe_kernels import ACTIVATIONS, Topology, get_activation, reference
from blocksparse_moe_kernels.padding import pad_rows

from .support import DEVICE, assert_within_budget, each_backend, each_backend_slowly, layouts, leaf, randn, routings

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@given(data=st.data())
def test_the_plan(data):
    routing = data.draw(routings())
    alignment = data.draw(st.sampled_from([1, 2, 5, 16]))
    topology = routing.topology
    padded = pad_rows(topology, alignment)
    counts = [-(-count // alignment) * alignment for count in topology.counts.tolist()]
    if not any(counts):
        counts[0] = alignment
    assert padded.counts == tuple(counts) and padded.num_rows == sum(counts)
    assert padded.padded.counts.tolist() == counts
    offsets, first, slots, tokens = topology.offsets.tolist(), 0, [], []
    rows = [-1] * topology.num_slots
    for expert, count in enumerate(counts):
        of_expert = range(offsets[expert], offsets[expert + 1])
        for place, row in enumerate(of_expert):
            rows[int(topology.slots[row])] = first + place
        padding = [-1] * (count - len(of_expert))
        slots += [*topology.slots[of_expert.start : of_expert.stop].tolist(), *padding]
        tokens += [*topology.tokens[of_expert.start : of_expert.stop].tolist(), *padding]
        first += count
    assert padded.slots.tolist() == slots
    assert padded.tokens.tolist() == tokens
    assert padded.rows.tolist() == rows


def test_an_alignment_below_one_is_refused():
    with pytest.raises(ValueError, match="alignment must be at least 1; got 0"):
        pad_rows(Topology.from_ids(torch.zeros(2, 1, dtype=torch.long, device=DEVICE), 1), 0)


@each_backend_slowly
@given(data=st.data())
def test_there_and_back(backend, data):
    """Tokens spread over padded rows are what the definition says, and the two ways are each other's adjoint."""
    kernels = implementation(backend)
    routing = data.draw(routings())
    topology, hidden = routing.topology, data.draw(st.integers(1, 40))
    padded = pad_rows(topology, data.draw(st.sampled_from([1, 4])))
    x = leaf(randn(topology.num_tokens, hidden, dtype=torch.float32), torch.float32, data.draw(layouts)).detach()
    rows = kernels.gather_rows(x, padded.tokens)
    expected = torch.stack([x[token] if token >= 0 else torch.zeros_like(rows[0]) for token in padded.tokens.tolist()])
    assert torch.equal(rows, expected)
    y = randn(padded.num_rows, hidden, dtype=torch.float32).float()
    back = kernels.sum_slots(y, padded.rows, topology)
    assert back.shape == (topology.num_tokens, hidden)
    torch.testing.assert_close((rows.double() * y.double()).sum(), (x.double() * back.double()).sum(), rtol=1e-5, atol=1e-5)


@each_backend
@pytest.mark.parametrize(
    "activation", ["swiglu", "gelu", "swiglu(alpha=1.702, gate_limit=7, up_limit=7, up_offset=1, interleaved)"]
)
@pytest.mark.parametrize("shape", [(5, 24), (1, 1), (3, 33), (0, 8)])
def test_scaled_activation(backend, activation, shape):
    rows, columns = shape
    chosen = get_activation(activation)
    pre = randn(rows, chosen.halves * columns, dtype=torch.float32)
    weights = randn(rows, dtype=torch.float32)
    oracle = chosen(pre) * weights[:, None]
    ours = implementation(backend).scaled_activation(pre.float(), chosen, weights.float())
    assert_within_budget("a", ours, oracle, (chosen(pre.float()) * weights[:, None].float()), torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_every_activation_in_triton(activation):
    chosen = get_activation(activation)
    pre, weights = randn(4, chosen.halves * 17, dtype=torch.float32), randn(4, dtype=torch.float32)
    ours = implementation("triton").scaled_activation(pre.float(), chosen, weights.float())
    theirs = implementation("torch").scaled_activation(pre.float(), chosen, weights.float())
    assert_within_budget("a", ours, chosen(pre) * weights[:, None], theirs, torch.float32)


@each_backend_slowly
def test_combine_is_the_sum_of_rows_that_lie_where_the_topology_says(backend):
    topology = Topology.from_ids(torch.tensor([[0, 2], [2, 9], [1, 1]], device=DEVICE), 3)
    y = randn(6, 7, dtype=torch.float32).float()
    kernels = implementation(backend)
    assert torch.equal(kernels.combine(y, topology), kernels.sum_slots(y, topology.rows, topology))
    torch.testing.assert_close(kernels.combine(y, topology), reference.combine(y, topology))
