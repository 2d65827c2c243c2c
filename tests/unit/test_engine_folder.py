"""What a killed run leaves behind, and who removes it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_treeopsd.engine import engine_folder
from megatron_treeopsd.engine.engine_folder import EngineFolder

pytestmark = pytest.mark.fast

OWNER = """
import sys, time
from megatron_treeopsd.engine.engine_folder import EngineFolder
folder = EngineFolder()
folder.shared_memory.write_text("sglang_loads_of_a_test.shm\\nsomebody_elses\\n../shm/sglang_loads_x")
print(folder.path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files, and one for shared memory in it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(engine_folder, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    for name in ("sglang_loads_of_a_test.shm", "somebody_elses", "sglang_loads_x"):
        (tmp_path / "shm" / name).touch()
    return tmp_path


@pytest.fixture
def owner(folders: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process with an engine's folder, as its `args[-1]`."""
    environment = {**os.environ, "TMPDIR": str(folders)}
    process = subprocess.Popen([sys.executable, "-c", OWNER], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.args = [process.stdout.readline().strip()]
    yield process
    process.kill()
    process.communicate()


def test_what_a_killed_process_left_goes_with_the_next_start(folders: Path, owner: subprocess.Popen[str]) -> None:
    left = Path(owner.args[-1])  # type: ignore[index, arg-type]
    owner.kill()
    owner.wait()
    assert (left / "lock").exists()
    ours = EngineFolder()
    assert not left.exists()
    assert sorted(os.listdir(folders / "shm")) == ["sglang_loads_x", "somebody_elses"], "only what is SGLang's own"
    assert ours.path.exists()
    ours.remove()
    assert sorted(os.listdir(folders)) == ["shm"]


def test_a_living_process_keeps_its_folder(folders: Path, owner: subprocess.Popen[str]) -> None:
    theirs = Path(owner.args[-1])  # type: ignore[index, arg-type]
    EngineFolder().remove()
    assert (theirs / "shared_memory.txt").exists()
    assert (folders / "shm" / "sglang_loads_of_a_test.shm").exists()


def test_a_process_id_of_another_container_is_not_taken_for_a_dead_process(folders: Path) -> None:
    theirs = folders / "treeopsd-sglang-99999999-abcdefgh"
    theirs.mkdir()
    with (theirs / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        EngineFolder().remove()
        assert theirs.exists()
    EngineFolder().remove()
    assert not theirs.exists()


def test_folders_of_other_names_stay(folders: Path) -> None:
    for name in ("treeopsd-sglang-notes-1", "treeopsd-sglang-", "treeopsd-sglang-99999999-nolock"):
        (folders / name).mkdir()
    EngineFolder().remove()
    assert len(os.listdir(folders)) == 4


def test_temporary_files_go_into_the_folder_where_names_of_sockets_allow(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = folders / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = EngineFolder()
    assert folder.variables() == {}
    folder.path = Path("short")
    assert folder.variables() == {"TMPDIR": "short"}
