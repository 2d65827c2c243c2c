"""The launch scripts for real, on the smallest runs there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment that the tests run in, with `treeopsd` in it, so that nothing has to be installed."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "treeopsd"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m megatron_treeopsd.cli "$@"\n')
    program.chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY), "TREEOPSD_INSTALL": "0"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, surroundings: dict[str, str]) -> Path:
    """The data folder of the Factbook task."""
    folder = tmp_path_factory.mktemp("data") / "factbook"
    subprocess.run(["treeopsd", "prepare", f"task.data={folder}"], check=True, env=surroundings)
    return folder


def launch(script: str, *arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(REPOSITORY / "launch" / script), *arguments],
        cwd=cwd, env=variables, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


def test_quickstart_ends_with_its_summary(data: Path, tmp_path: Path, surroundings: dict[str, str]) -> None:
    run = tmp_path / "run"
    words = (f"task.data={data}", f"run={run}", "steps=2", "evaluation.questions=4", "update.questions_per_step=4")
    done = launch("quickstart.sh", *words, cwd=tmp_path, **surroundings)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"summary: {run}/summary.json"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["method"], summary["steps"], summary["questions_evaluated"]) == ("treeopsd", 2, 4)
    assert (run / "report.html").is_file()


def test_quickstart_says_what_is_wrong_with_a_word(data: Path, tmp_path: Path, surroundings: dict[str, str]) -> None:
    done = launch("quickstart.sh", f"task.data={data}", "metod=grpo", cwd=tmp_path, **surroundings)
    assert done.returncode == 2
    assert "metod: unknown key, did you mean method?" in done.stderr


def test_the_checkpoint_can_be_made_again(data: Path, tmp_path: Path, surroundings: dict[str, str]) -> None:
    destination = tmp_path / "tiny"
    words = (f"task.data={data}", "steps=2", "optimizer.warmup_steps=0", "evaluation.questions=0")
    done = launch("make_checkpoint.sh", *words, cwd=tmp_path, **{**surroundings, "DESTINATION": str(destination)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"policy: {destination}"
    shipped = REPOSITORY / "launch" / "checkpoints" / "tiny-factbook"
    assert shapes(destination) == shapes(shipped)
    assert (destination / "tokenizer.json").read_bytes() == (shipped / "tokenizer.json").read_bytes()


def shapes(folder: Path) -> dict[str, list[int]]:
    with safe_open(str(folder / "model.safetensors"), framework="numpy") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (no mapping)


def test_local_runs_over_two_processes(data: Path, tmp_path: Path, surroundings: dict[str, str]) -> None:
    run = tmp_path / "run"
    words = (f"task.data={data}", f"run={run}", "steps=1", "layout.tp=2", "evaluation.questions=0")
    done = launch("local.sh", "2", "train", *words, "update.questions_per_step=2", cwd=tmp_path, **surroundings)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"summary: {run}/summary.json"
    assert done.stdout.count("summary: ") == 1, "one rank reports"


def test_local_ends_with_the_error_of_a_rank(tmp_path: Path, surroundings: dict[str, str]) -> None:
    done = launch("local.sh", "2", "train", "task.data=nowhere", "steps=1", cwd=tmp_path, **surroundings)
    assert done.returncode != 0
    assert "rank 0: error:" in done.stderr
    assert "nowhere" in done.stderr
    assert "treeopsd prepare" in done.stderr
