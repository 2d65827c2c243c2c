"""Whole runs whose engine fails for good, with a stand-in for SGLang's process that fails on demand."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from runs import ROOT, command, environment, metrics, words


def test_an_engine_that_dies_twice_in_a_row_ends_the_run_and_the_checkpoint_is_safe(
    factbook: Path, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT}/tests/unit/stub_worker.py" "$3" "$4"\n')
    python.chmod(0o755)

    def train(mode: str, *more: str) -> subprocess.CompletedProcess[str]:
        engine = ("engine=sglang", f"engine.python={python}", "engine.verify_every=0", "checkpoint.every_steps=1")
        return subprocess.run(
            command("train", *words(tmp_path / "run", factbook, *engine, "logging.report=false", *more)),
            env={**environment(), "STUB": mode, "STUB_FLAG": str(tmp_path / "flag")},
            cwd=ROOT, text=True, capture_output=True, timeout=180, check=False,
        )  # fmt: skip

    assert train("fine", "steps=1").returncode == 0
    started = time.monotonic()
    failed = train("dies", "steps=3", "resume=true")
    assert failed.returncode == 2, failed.stderr[-3000:]
    assert "starting it again with version 1" in failed.stdout + failed.stderr
    assert "it was started again 1 times since the last publish (engine.restarts)" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert time.monotonic() - started < 120
    went_on = train("fine", "steps=3", "resume=true")
    assert went_on.returncode == 0, went_on.stderr[-3000:]
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2]
