"""The benchmark of publishing, with a real engine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from runs import ROOT, environment

pytestmark = pytest.mark.sglang


def test_a_real_engine_is_asked_once_a_bucket() -> None:
    bench = ROOT / "tools" / "bench" / "publish_sglang.py"
    command = [sys.executable, str(bench), "1", "10", "shared_memory", "disk"]
    done = subprocess.run(
        command, env=environment(), cwd=ROOT, text=True, capture_output=True, timeout=300, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tensors"] == 10 * 393 + 3
    assert found["shared_memory"]["requests"] == found["buckets"] > 1
    assert found["disk"]["requests"] == 1
    assert min(found["disk"][f"{who}_seconds"] for who in ("trainer", "engine", "wall")) > 0
