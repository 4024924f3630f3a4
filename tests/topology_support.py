"""What the tests of the topology share: routings, and what a topology must say of one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from blocksparse_moe_kernels import Topology

from .support import DEVICE, routings

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


def large_ids(T: int, K: int, E: int, *, outside: bool = True) -> Tensor:
    """Uneven routing; some ids lie outside [0, E)."""
    ids = (torch.rand(T, K, device=DEVICE) ** 3 * E).long()
    return torch.where(torch.rand(T, K, device=DEVICE) < 0.05, torch.where(ids % 2 == 0, -1, E + ids), ids) if outside else ids
