"""Fixtures of the tests of public fault reports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cases.helpers import free_memory
from tests.support import HAS_CUDA


@pytest.fixture(autouse=True)
def _free_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Real sizes take tens of gigabytes: give them back before the next test."""
    yield
    if HAS_CUDA and request.node.get_closest_marker("gpu"):
        free_memory()
