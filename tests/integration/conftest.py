"""The task data, made once for all tests of a session."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import ROOT, treeopsd


@pytest.fixture(scope="session")
def factbook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder of task=factbook; the one that the quick start made, if it is there."""
    existing = ROOT / "data" / "factbook"
    if (existing / "dataset.json").is_file():
        return existing
    folder = tmp_path_factory.mktemp("data") / "factbook"
    done = treeopsd("prepare", "task=factbook", f"task.data={folder}")
    assert done.returncode == 0, done.stderr
    return folder
