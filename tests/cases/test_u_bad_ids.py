"""Group U: expert ids that name no expert here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blocksparse_moe import combine
from tests.cases.helpers import Problem, distinct_ids
from tests.support import DEVICE, HAS_CUDA


@pytest.mark.case("U2")
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("backend", "outside"),
    [
        *[("torch", outside) for outside in (-1, -(2**31), 4, 1000)],
        *[
            pytest.param("triton", outside, marks=pytest.mark.slow)
            for outside in ((-1, -(2**31), 4, 1000) if HAS_CUDA else (-1, 4))
        ],
    ],
)
def test_ids_outside_add_nothing(backend, outside):
    """vLLM PR 46408 and 50845, TransformerEngine 2908: id -1 indexes the last expert, and its unwritten slot is summed."""
    T, H, ffn = (512, 256, 128) if HAS_CUDA else (6, 12, 8)
    problem = Problem.draw(H, ffn, 4, distinct_ids(T, 4, 3))
    dropped = torch.rand(T, 3, device=DEVICE) < 0.4
    dropped[0], dropped[1] = True, False
    given = replace(problem, expert_ids=torch.where(dropped, outside, problem.expert_ids))
    ours = given.check(backend)
    assert not ours.weights[dropped].any() and ours.weights[~dropped].all()
    assert not ours.y[0].any() and not ours.x[0].any()
    without = replace(given, weights=torch.where(dropped, torch.nan, given.weights)).ours(backend)
    assert torch.equal(without.y, ours.y) and torch.equal(without.x, ours.x)

    y = torch.randn(T * 3, H, device=DEVICE)
    y[int(given.topology.num_rows) :] = torch.nan
    assert combine(y, given.topology, backend=backend).isfinite().all()
