"""What every test runs under: one thread, no network, the same random examples each time."""

from __future__ import annotations

import os

# Read when the libraries are first imported, hence before anything else here. Several threads are many times slower
# on a machine that is shared, and change the order of float additions.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# No deadline: time on a shared machine says nothing. Same examples in each run: a failure seen once can be seen again.
settings.register_profile("project", deadline=None, derandomize=True, database=None, print_blob=True)
settings.load_profile("project")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Tests that draw random tensors draw the same ones in any order and selection of tests."""
    torch.manual_seed(0)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make the engine's environment if a selected test needs it; nothing happens where it is there already."""
    if session.config.option.collectonly or not any(item.get_closest_marker("sglang") for item in session.items):
        return
    script = Path(__file__).resolve().parents[1] / "launch" / "sglang_env.sh"
    with session.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        done = subprocess.run([script], stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        pytest.exit(f"{script} failed, and tests marked sglang cannot run without it", returncode=1)
