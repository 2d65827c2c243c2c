"""`kill -9` at every operation of a conversion, and at random moments: what is there is old, new, or nothing."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit")]

from checkpoints import make_checkpoint  # noqa: E402
from processes import run  # noqa: E402


def test_killed_conversions_leave_nothing_incomplete(tmp_path: Path) -> None:
    for name, tied in (("old", True), ("new", False)):
        make_checkpoint(tmp_path / name, "qwen3", tied=tied)
    printed = run(Path(__file__).with_name("convert_kill_worker.py"), 1, tmp_path)
    assert all(
        int(count) > 50 for count in printed.split()[-3:]
    )  # each file, folder, write, rename was a moment to die
