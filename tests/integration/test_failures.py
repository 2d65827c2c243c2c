"""Bad input and broken machines: a clear error that says what to do, no hang, nothing half-written."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from runs import POLICY, ROOT, command, environment, metrics, treeopsd, words


def refused(*arguments: str, processes: int = 1) -> str:
    """Run something that must be refused in plain words; returns what it said."""
    done = treeopsd(*arguments, processes=processes)
    assert done.returncode != 0, done.stdout[-2000:]
    if processes == 1:
        assert done.returncode == 2, done.stderr[-3000:]
        assert "Traceback" not in done.stderr
    return done.stderr


def test_unknown_keys_and_values(tmp_path: Path) -> None:
    assert "did you mean radius?" in refused("train", "steps=1", "objective.radios=0.2")
    assert "allowed" in refused("train", "steps=1", "objective.name=magic")
    assert "did you mean method=treepo?" in refused("train", "steps=1", "method=trepo")


def test_a_missing_checkpoint_or_data_folder(factbook: Path, tmp_path: Path) -> None:
    said = refused("train", *words(tmp_path / "a", factbook, "steps=1", f"model.checkpoint={tmp_path / 'nowhere'}"))
    assert str(tmp_path / "nowhere") in said
    said = refused("train", *words(tmp_path / "b", tmp_path / "empty", "steps=1"))
    assert str(tmp_path / "empty" / "passages.jsonl") in said
    assert "prepare" in said


def test_a_model_of_another_architecture(factbook: Path, tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    folder.mkdir()
    for file in POLICY.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    (folder / "config.json").write_text(json.dumps(config))
    said = refused("train", *words(tmp_path / "run", factbook, "steps=1", f"model.checkpoint={folder}"))
    assert "gpt2" in said
    assert "qwen3_moe" in said


def test_a_layout_that_does_not_divide_the_world(factbook: Path, tmp_path: Path) -> None:
    said = refused("train", *words(tmp_path / "run", factbook, "steps=1", "layout.tp=4"))
    assert "tp=4" in said
    assert "world of 1" in said


@pytest.fixture
def data(factbook: Path, tmp_path: Path) -> Path:
    """A data folder whose files a test may replace."""
    folder = tmp_path / "data"
    folder.mkdir()
    for file in factbook.iterdir():
        if file.is_file():
            (folder / file.name).symlink_to(file)
    return folder


def test_an_empty_question_file(data: Path, tmp_path: Path) -> None:
    (data / "train.jsonl").unlink()
    (data / "train.jsonl").write_text("")
    said = refused("train", *words(tmp_path / "run", data, "steps=1"))
    assert "train.jsonl" in said
    assert "no questions" in said or "empty" in said


def test_a_broken_line_is_named(data: Path, tmp_path: Path) -> None:
    lines = (data / "train.jsonl").read_text().splitlines()[:5]
    lines[2] = lines[2][:40]
    (data / "train.jsonl").unlink()
    (data / "train.jsonl").write_text("\n".join(lines) + "\n")
    said = refused("train", *words(tmp_path / "run", data, "steps=1"))
    assert "train.jsonl" in said
    assert "3" in said.split("train.jsonl", 1)[1][:20]


def test_a_run_folder_in_use(factbook: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = subprocess.Popen(
        command("train", *words(run, factbook, "steps=500")), env=environment(), cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
        assert first.stdout is not None
        first.stdout.readline()  # the header: the folder is locked by now
        said = refused("train", *words(run, factbook, "steps=1", "resume=true"))
    finally:
        first.kill()
        first.wait()
    assert f"{run} is in use by process {first.pid}" in said


def test_a_folder_with_another_run_is_left_alone(factbook: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    said = refused("train", *words(tmp_path / "run", factbook, "steps=1"))
    assert "resume=true" in said
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_a_full_disk_ends_the_run_and_keeps_the_last_checkpoint(factbook: Path, tmp_path: Path) -> None:
    """The limit on file size stands in for a disk without space: metrics fit, a checkpoint does not."""
    run = tmp_path / "run"
    small = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))}
    done = subprocess.run(
        command("train", *words(run, factbook, "steps=2", "checkpoint.every_steps=1", "logging.report=false")),
        env=environment(), cwd=ROOT, text=True, capture_output=True, timeout=300, check=False, **small,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr[-3000:]
    assert str(run / "checkpoints") in done.stderr
    assert not any((run / "checkpoints").iterdir()) or not list((run / "checkpoints").glob("step_*/manifest.json"))
    finished = treeopsd("train", *words(run, factbook, "steps=2", "checkpoint.every_steps=1", "resume=true"))
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert [row["step"] for row in metrics(run)] == [0, 1]


def test_a_port_in_use_is_named(factbook: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        done = subprocess.run(
            command("train", *words(tmp_path / "run", factbook, "steps=1")),
            env=environment() | rank, cwd=ROOT, text=True, capture_output=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 2, done.stderr[-3000:]
    assert str(port) in done.stderr
    assert "MASTER_PORT" in done.stderr


FAILING = """
import sys, torch.distributed as dist
from megatron_treeopsd.backend.policy import Policy
from megatron_treeopsd.cli import main

update = Policy.update
def fail_on_one_rank(self, *arguments):
    if dist.get_rank() == 1:
        raise ArithmeticError("the disk of this rank caught fire")
    return update(self, *arguments)
Policy.update = fail_on_one_rank
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


def test_one_rank_that_fails_stops_all_with_its_text(factbook: Path, tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    launcher = command("train", processes=2)[:-3]
    assert launcher[-1] == "0"  # the launcher's own words, up to --max-restarts 0
    done = subprocess.run(
        [*launcher, str(script), "train", *words(tmp_path / "run", factbook, "steps=3", "layout.ep=2")],
        env=environment(), cwd=ROOT, text=True, capture_output=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "rank 1: ArithmeticError: the disk of this rank caught fire" in done.stderr
    assert "rank 0: error: stopped because rank 1 failed: ArithmeticError: the disk" in done.stderr


def test_a_killed_rank_ends_the_others(factbook: Path, tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        FAILING.replace('raise ArithmeticError("the disk of this rank caught fire")', "__import__('os')._exit(9)")
    )
    launcher = command("train", processes=2)[:-3]
    done = subprocess.run(
        [*launcher, str(script), "train", *words(tmp_path / "run", factbook, "steps=3", "layout.ep=2")],
        env=environment(), cwd=ROOT, text=True, capture_output=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode != 0


def test_python_and_repository_are_the_ones_under_test() -> None:
    found = subprocess.run(
        [sys.executable, "-c", "import megatron_treeopsd; print(megatron_treeopsd.__file__)"],
        env=environment(), cwd=os.sep, text=True, capture_output=True, check=True,
    )  # fmt: skip
    assert Path(found.stdout.strip()).is_relative_to(ROOT)
