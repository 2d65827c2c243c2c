"""Checkpoints continue bit for bit in new processes at every layout, and move between layouts with all their state."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit")]

from backend_models import make_policy  # noqa: E402
from processes import run  # noqa: E402

WORKER = Path(__file__).with_name("checkpoint_worker.py")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What undisturbed runs of one and of two processes reached, and checkpoints from their middle."""
    root = tmp_path_factory.mktemp("run")
    make_policy(root / "hf")
    for processes in (1, 2):
        assert run(WORKER, processes, "write", root).strip().endswith("done")
    return root


@pytest.mark.parametrize("processes", [1, 2])
def test_new_processes_continue_bit_for_bit(written: Path, processes: int) -> None:
    assert run(WORKER, processes, "continue", written).strip().endswith("done")


@pytest.mark.parametrize("processes", [1, 2])
def test_other_layouts_continue_with_all_state(written: Path, processes: int) -> None:
    assert run(WORKER, processes, "move", written).strip().endswith("done")
