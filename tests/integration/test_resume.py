"""A run that was stopped, killed or told to end goes on as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import torch
from runs import ROOT, command, environment, metrics, trained, weights, without_clocks, words

STEPS = ("steps=4", "checkpoint.every_steps=1")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, factbook: Path) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    trained(folder, factbook, *STEPS)
    return folder


def start(run: Path, data: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command("train", *words(run, data, *more)),
        env=environment(),
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def assert_same(run: Path, other: Path, tmp_path: Path) -> None:
    assert without_clocks(metrics(run)) == without_clocks(metrics(other))
    mine, theirs = weights(run, tmp_path / "mine"), weights(other, tmp_path / "theirs")
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


def test_stopping_and_resuming_changes_nothing(undisturbed: Path, factbook: Path, tmp_path: Path) -> None:
    trained(tmp_path / "run", factbook, "steps=2", "checkpoint.every_steps=1")
    summary = trained(tmp_path / "run", factbook, *STEPS, "resume=true")
    assert summary["steps"] == 4
    assert_same(tmp_path / "run", undisturbed, tmp_path)


def test_ten_kills_change_nothing(undisturbed: Path, factbook: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    rng = random.Random(0)
    kills = 0
    for _ in range(60):
        process = start(run, factbook, *STEPS, "resume=true")
        if kills < 10:
            try:
                process.wait(rng.uniform(1.0, 14.0))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                kills += 1
                continue
            if process.returncode == 0:  # done before the kill: it has to be right too, and ten kills are really ten
                assert_same(run, undisturbed, Path(tempfile.mkdtemp(dir=tmp_path)))
                run = tmp_path / f"run{kills}-{time.monotonic_ns()}"
                continue
        output, _ = process.communicate()
        assert process.returncode == 0, output[-3000:]
        break
    assert kills == 10
    assert_same(run, undisturbed, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_cleanly_with_a_checkpoint(
    undisturbed: Path, factbook: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    process = start(run, factbook, *STEPS)
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text():
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(process.pid, number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output[-3000:]
    assert "interrupted: the run ends behind this step" in output
    steps = len(metrics(run))
    assert 1 <= steps < 4
    trained(run, factbook, *STEPS, "resume=true")
    assert_same(run, undisturbed, tmp_path)


def test_another_recipe_cannot_be_resumed(undisturbed: Path, factbook: Path) -> None:
    process = start(undisturbed, factbook, *STEPS, "resume=true", "optimizer.lr=0.5")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "cannot be resumed" in output
    assert "optimizer.lr: 0.0002 -> 0.5" in " ".join(output.split())
