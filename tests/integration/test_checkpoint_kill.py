"""`kill -9` at every operation of a save, and at random moments: the last complete checkpoint always loads."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit")]

from backend_models import make_policy  # noqa: E402
from processes import run  # noqa: E402


def test_killed_saves_leave_a_complete_checkpoint(tmp_path: Path) -> None:
    make_policy(tmp_path / "hf")
    printed = run(Path(__file__).with_name("checkpoint_kill_worker.py"), 1, tmp_path)
    operations, completed = map(int, printed.split()[-2:])
    assert operations > 100  # each tensor, file, folder, rename and removal was a moment to die at
    assert completed > 0
