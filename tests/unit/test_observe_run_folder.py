from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_treeopsd.observe.files import append_json_line, read_json_lines, write_atomically
from megatron_treeopsd.observe.run_folder import RunFolder, RunFolderError, RunPaths, contents

pytestmark = pytest.mark.fast


def test_a_new_folder_has_its_parts(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "deep" / "run") as run:
        assert all(folder.is_dir() for folder in (run.tensorboard, run.trees, run.checkpoints))
        assert run.tree_file(10) == run.root / "trees" / "step_000010.safetensors"
        assert run.notes_file(10) == run.root / "trees" / "step_000010.json"
        assert run.saved_tree_steps() == []


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        run.recipe.write_text("method: x\n")
    with pytest.raises(RunFolderError, match=r"resume=true, or choose another folder with run="):
        RunFolder(tmp_path)
    with RunFolder(tmp_path, resume=True):
        pass


def test_resume_starts_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "new", resume=True) as run:
        assert run.checkpoints.is_dir()


_HOLD = """
import sys, time
from megatron_treeopsd.observe.run_folder import RunFolder
run = RunFolder(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


def test_the_lock_lives_and_dies_with_its_process(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunFolderError, match=f"in use by process {holder.pid} on"):
            RunFolder(tmp_path, resume=True)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    with RunFolder(tmp_path, resume=True):
        pass


def test_two_folders_of_one_process_lock_each_other_out(tmp_path: Path) -> None:
    with RunFolder(tmp_path), pytest.raises(RunFolderError, match="in use"):
        RunFolder(tmp_path, resume=True)
    RunFolder(tmp_path, resume=True).close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"file/run: cannot be written: .*run="):
        RunFolder(tmp_path / "file" / "run")


def test_rewind_keeps_what_the_resumed_weights_have_seen(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        for step in range(6):
            append_json_line(run.metrics, {"step": step})
            append_json_line(run.evaluations, {"step": step})
            run.tree_file(step).write_text("trees")
            run.notes_file(step).write_text("notes")
        with run.metrics.open("a") as file:
            file.write('{"step": 6, "trai')  # torn by a kill
        run.summary.write_text("{}")
        run.report.write_text("")
        run.rewind(3)
        assert [row["step"] for row in read_json_lines(run.metrics)] == [0, 1, 2, 3]
        assert run.metrics.read_text().endswith("}\n")
        # the update of step 3 made weights 4
        assert [row["step"] for row in read_json_lines(run.evaluations)] == [0, 1, 2, 3, 4]
        assert run.saved_tree_steps() == [0, 1, 2, 3]
        assert not run.notes_file(4).exists()
        assert not run.summary.exists()
        assert not run.report.exists()
        run.rewind(None)
        assert run.metrics.read_text() == run.evaluations.read_text() == ""
        assert run.saved_tree_steps() == []


def test_rewind_keeps_every_digit(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        append_json_line(run.metrics, {"step": 0, "train/loss": 0.1 + 0.2, "train/other": None})
        before = run.metrics.read_text()
        run.rewind(0)
        assert run.metrics.read_text() == before


@pytest.mark.parametrize(
    ("line", "says"), [("{broken", r"metrics\.jsonl:2: not a JSON line"), ("[1]", r"metrics\.jsonl:2: expected a JSON")]
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n' + line + '\n{"step": 1}\n')
    with pytest.raises(RunFolderError, match=says):
        read_json_lines(path)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl: cannot be written: No space left on device; free space"):
        append_json_line(path, {"step": 0})
    (tmp_path / "summary.json.tmp").symlink_to("/dev/full")
    with pytest.raises(RunFolderError, match=r"summary\.json: cannot be written: No space left"):
        write_atomically(tmp_path / "summary.json", "{}")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_atomic_writing_leaves_nothing_beside_the_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "deep" / "a.json", json.dumps({"é": 1}, ensure_ascii=False))
    assert [item.name for item in (tmp_path / "deep").iterdir()] == ["a.json"]
    assert json.loads((tmp_path / "deep" / "a.json").read_text(encoding="utf-8")) == {"é": 1}


def test_a_folder_without_a_run_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is not a run folder: no recipe"):
        RunPaths(tmp_path).require()
    with pytest.raises(RunFolderError, match="does not exist"):
        RunPaths(tmp_path / "no").require()


def test_a_run_that_never_began_leaves_the_folder_free(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run"):
        assert contents(tmp_path / "run") == []
    with RunFolder(tmp_path / "run") as folder:
        (folder.trees / "step_000010.json").write_text("{}")
        folder.metrics.write_text("")
    assert contents(tmp_path / "run") == ["metrics.jsonl", "trees"]
    with pytest.raises(RunFolderError, match="already holds a run"):
        RunFolder(tmp_path / "run")
    assert contents(tmp_path / "not there") == []
