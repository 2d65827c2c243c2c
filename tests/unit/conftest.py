"""Engines that take long to start serve all tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_treeopsd.engine.base import Engine


@pytest.fixture(scope="session")
def shared_engines() -> Iterator[dict[tuple[str, str], Engine]]:
    """Running engines by name and family of model."""
    running: dict[tuple[str, str], Engine] = {}
    yield running
    for engine in running.values():
        engine.close()
