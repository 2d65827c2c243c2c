"""What many tests need running: engines that take long to start, and the process group of a single process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_treeopsd.backend import parallel
from megatron_treeopsd.config import Layout
from megatron_treeopsd.engine.base import Engine


@pytest.fixture(scope="session")
def shared_engines() -> Iterator[dict[tuple[str, str], Engine]]:
    """Running engines by name and family of model."""
    running: dict[tuple[str, str], Engine] = {}
    yield running
    for engine in running.values():
        engine.close()


@pytest.fixture(scope="module")
def state() -> Iterator[parallel.ParallelState]:
    """This process as the only one of a layout."""
    yield parallel.initialize(Layout(), seed=1)
    parallel.shutdown()
