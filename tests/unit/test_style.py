"""Style and types, so that one command tells everything. Each message is the tool's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parents[2]
CHECKED = ["megatron_treeopsd", "tests", "tools", "setup.py"]


@pytest.mark.parametrize(
    "command",
    [["ruff", "check"], ["ruff", "format", "--check"]],
    ids=["ruff check", "ruff format"],
)
def test_style(command: list[str]) -> None:
    run(*command, "--quiet", *(name for name in CHECKED if (ROOT / name).exists()))


def test_types() -> None:
    run("mypy")


def run(tool: str, *arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", tool, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"\n{done.stdout}{done.stderr}"
