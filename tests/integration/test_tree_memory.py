"""An update on a tree in memory that its flattened trajectories do not fit in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit")]

from backend_models import make_policy  # noqa: E402
from processes import HELPERS, ROOT  # noqa: E402

WORKER = Path(__file__).with_name("memory_worker.py")
OUT_OF_MEMORY = 3
PLENTY = 8000


def update(form: str, checkpoint: Path, megabytes: float) -> tuple[int, str]:
    """Exit status and what the worker printed last: rows, and MB used or why it ended."""
    done = subprocess.run(
        [sys.executable, str(WORKER), form, str(checkpoint), str(megabytes)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{HELPERS}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode in (0, OUT_OF_MEMORY), done.stderr[-4000:]
    return done.returncode, done.stdout.splitlines()[-1]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory use from /proc")
def test_trees_fit_where_flattened_trajectories_do_not(tmp_path: Path) -> None:
    make_policy(tmp_path, tied=False)
    status, printed = update("tree", tmp_path, PLENTY)
    assert status == 0
    rows, used = map(int, printed.split())
    limit = 2 * used
    assert update("tree", tmp_path, limit)[0] == 0
    status, printed = update("flattened", tmp_path, limit)
    assert status == OUT_OF_MEMORY, f"it fits into {limit} MB: {printed}"
    assert int(printed.split()[0]) > 3.5 * rows
