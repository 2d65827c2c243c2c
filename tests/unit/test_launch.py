"""The launch scripts, against a stand-in for Python that writes down what it is asked to install."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import setuptools

pytestmark = pytest.mark.fast

REPOSITORY = Path(__file__).resolve().parents[2]

STAND_IN = """\
#!/usr/bin/env bash
# A Python that can tell its version, make an environment with itself in it, and log "pip install".
here="$(dirname -- "$0")"
case "$*" in
    *sys.version_info*) echo "Python ${STAND_IN_VERSION:-3.11}" ;;
    "-m venv "*)
        [[ -z "${STAND_IN_NO_VENV:-}" ]] || { echo "No module named venv" >&2; exit 1; }
        mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/pyvenv.cfg"
        echo "venv" >>"$LOG" ;;
    *"pip install"*)
        sleep "${STAND_IN_SLEEP:-0}"
        echo "pip ${*: -1}" >>"$LOG"
        [[ -z "${STAND_IN_NO_NETWORK:-}" ]] || { echo "connection refused" >&2; exit 1; } ;;
esac
"""


TOOLS = ("bash", "cat", "cp", "dirname", "env", "find", "flock", "grep", "head", "mkdir", "rm", "sha256sum", "sleep",
         "tail", "touch")  # fmt: skip
"""All that env.sh may use, and no Python of the machine's own."""


class Clone:
    """A copy of the files that launch/env.sh needs, in a folder with spaces in its path, and its surroundings."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a clone" / "of it"
        (self.root / "launch" / "sglang_cpu").mkdir(parents=True)
        for name in ("launch/env.sh", "setup.py", "constraints.txt", "launch/sglang_cpu/requirements.txt"):
            shutil.copy(REPOSITORY / name, self.root / name)
        self.bin = folder / "bin"
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or tool)
        self.add_python("python3.11")
        self.log = folder / "log"
        self.venv = self.root / ".venv"

    def add_python(self, name: str) -> Path:
        path = self.bin / name
        path.write_text(STAND_IN)
        path.chmod(0o755)
        return path

    def start(self, *extras: str, **variables: str) -> subprocess.Popen[str]:
        environment = {"PATH": str(self.bin), "LOG": str(self.log), **variables}
        command = [str(self.bin / "bash"), str(self.root / "launch" / "env.sh"), *extras]
        return subprocess.Popen(
            command, cwd="/", env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip

    def run(self, *extras: str, **variables: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*extras, **variables)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess([], process.returncode, out, err)

    def installed(self) -> list[str]:
        """What was made and installed since the last call, without the folder's name."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [line.replace(str(self.root), "ROOT") for line in lines]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def everything(extra: str) -> list[str]:
    return ["venv", *packages(extra)]


def packages(extra: str) -> list[str]:
    pins = dict(line.split("==") for line in constraints())
    return [f"pip torch=={pins['torch']}", f"pip megatron-core=={pins['megatron-core']}", f"pip ROOT[{extra}]"]


def constraints() -> list[str]:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


# ------------------------------------------------------------------------------------------------------------- env.sh
def test_first_start_installs_and_prints_the_path(clone: Clone) -> None:
    done = clone.run("cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{clone.venv}/bin:")
    assert clone.installed() == everything("cpu"), "torch first and alone, then megatron-core, then the rest"


def test_second_start_does_nothing(clone: Clone) -> None:
    first = clone.run("cpu", "dev")
    assert clone.installed() == everything("cpu,dev")
    for extras in [("cpu", "dev"), ("cpu",), ()]:
        again = clone.run(*extras)
        assert (again.returncode, again.stdout, again.stderr) == (0, first.stdout, "")
    assert clone.installed() == []


def test_another_extra_is_added_to_what_is_there(clone: Clone) -> None:
    clone.run("cpu")
    clone.installed()
    clone.run("cpu", "dev")
    assert clone.installed() == packages("cpu,dev")


@pytest.mark.parametrize("name", ["setup.py", "constraints.txt", "launch/env.sh"])
def test_changed_requirements_are_installed_again(clone: Clone, name: str) -> None:
    clone.run("cpu")
    clone.installed()
    with (clone.root / name).open("a") as file:
        file.write("# changed\n")
    clone.run("cpu")
    assert clone.installed() == packages("cpu")
    clone.run("cpu")
    assert clone.installed() == []


def test_the_engine_has_an_environment_of_its_own(clone: Clone) -> None:
    clone.run("cpu")
    clone.installed()
    done = clone.run("sglang")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{clone.root}/.venv-sglang/bin:")
    listed = "ROOT/launch/sglang_cpu/requirements.txt"
    [torch] = re.findall(r"^torch==.*", (REPOSITORY / "launch/sglang_cpu/requirements.txt").read_text(), re.MULTILINE)
    assert clone.installed() == ["venv", f"pip {torch}", f"pip {listed}"]
    for extra in ("sglang", "cpu"):
        assert clone.run(extra).returncode == 0
    assert clone.installed() == [], "neither is installed again because of the other"
    assert clone.run("cpu", "sglang").returncode == 1


def test_two_starts_at_once_install_once(clone: Clone) -> None:
    starts = [clone.start("cpu", STAND_IN_SLEEP="0.2") for _ in range(3)]
    messages = [process.communicate(timeout=60) for process in starts]
    assert [process.returncode for process in starts] == [0, 0, 0], messages
    assert clone.installed() == everything("cpu")
    assert sum("another start is installing" in err for _, err in messages) == 2


def test_a_killed_install_is_done_again_from_the_start(clone: Clone) -> None:
    process = clone.start("cpu", STAND_IN_SLEEP="30")
    while not (clone.venv / "bin" / "python").exists():
        time.sleep(0.01)
    leftover = clone.venv / "half-written"
    leftover.touch()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    clone.installed()
    assert clone.run("cpu").returncode == 0
    assert clone.installed() == everything("cpu")
    assert not leftover.exists()


def test_without_network_it_says_so_and_goes_on_where_it_stopped(clone: Clone) -> None:
    done = clone.run("cpu", STAND_IN_NO_NETWORK="1")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "connection refused" in done.stderr
    assert "pip could not install torch==" in done.stderr
    assert "TREEOPSD_PIP_ARGS" in done.stderr
    clone.installed()
    assert clone.run("cpu").returncode == 0
    assert clone.installed() == packages("cpu")


def test_a_clone_that_was_moved_is_installed_again(clone: Clone) -> None:
    clone.run("cpu")
    clone.installed()
    moved = clone.root.with_name("moved")
    clone.root.rename(moved)
    clone.root, clone.venv = moved, moved / ".venv"
    assert clone.run("cpu").returncode == 0
    assert clone.installed() == everything("cpu"), "its scripts name the folder that they were installed into"


def test_an_environment_of_somebody_else_is_left_alone(clone: Clone) -> None:
    clone.venv.mkdir()
    (clone.venv / "pyvenv.cfg").write_text("mine")
    done = clone.run("cpu")
    assert done.returncode == 1
    assert "did not make it" in done.stderr
    assert (clone.venv / "pyvenv.cfg").read_text() == "mine"
    assert clone.installed() == []


def test_without_flock_two_starts_could_meet(clone: Clone) -> None:
    (clone.bin / "flock").unlink()
    done = clone.run("cpu")
    assert done.returncode == 1
    assert "needs the command flock" in done.stderr
    assert clone.installed() == []


def test_no_suitable_python(clone: Clone) -> None:
    done = clone.run("cpu", STAND_IN_VERSION="3.10")
    assert done.returncode == 1
    assert "needs Python 3.11 or 3.12" in done.stderr


def test_a_python_without_venv_is_named(clone: Clone) -> None:
    done = clone.run("cpu", STAND_IN_NO_VENV="1")
    assert done.returncode == 1
    assert "No module named venv" in done.stderr
    assert "python3-venv" in done.stderr
    clone.run("cpu")
    assert clone.installed() == everything("cpu")


def test_python_can_be_chosen(clone: Clone) -> None:
    mine = clone.add_python("my-python")
    assert clone.run("cpu", PYTHON=str(mine), STAND_IN_VERSION="3.12").returncode == 0
    assert (clone.venv / ".made").read_text() == f"{clone.venv}\nPython 3.12\n"
    done = clone.run("cpu", PYTHON=str(clone.bin / "nothing"))
    assert done.returncode == 1
    assert f"PYTHON={clone.bin / 'nothing'}" in done.stderr
    assert clone.venv.is_dir(), "a mistake in PYTHON must not cost the environment"


def test_words_for_pip_are_passed_on(clone: Clone) -> None:
    (clone.bin / "python3.11").write_text(STAND_IN.replace('"pip ${*: -1}"', '"$*"'))
    clone.run("cpu", TREEOPSD_PIP_ARGS="--no-index --find-links wheels")
    lines = clone.installed()[1:]
    assert len(lines) == 3
    assert all("--constraint ROOT/constraints.txt --no-index --find-links wheels" in line for line in lines)


def test_unknown_extras_are_refused(clone: Clone) -> None:
    done = clone.run("cpu", "typo")
    assert done.returncode == 1
    assert "unknown extra typo; known: cpu, gpu, dev, bench" in done.stderr


def test_nothing_is_installed_where_that_is_asked_for(clone: Clone) -> None:
    done = clone.run("cpu", TREEOPSD_INSTALL="0")
    assert (done.returncode, clone.venv.exists()) == (0, False)
    assert done.stdout == f"{clone.bin}\n"


# ----------------------------------------------------------------------------------------------------- other scripts
@pytest.mark.parametrize("arguments", [[], ["2"], ["0", "train"], ["train"], ["two", "train"]])
def test_local_asks_for_a_number_and_a_command(arguments: list[str]) -> None:
    done = subprocess.run(
        ["bash", str(REPOSITORY / "launch" / "local.sh"), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("usage: launch/local.sh PROCESSES COMMAND")


# ----------------------------------------------------------------------------------------------------------- packages
def _setup_arguments(monkeypatch: pytest.MonkeyPatch) -> dict:
    given: dict = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: given.update(arguments))
    monkeypatch.chdir(REPOSITORY)
    runpy.run_path("setup.py")
    return given


def test_every_requirement_is_pinned_and_the_constraints_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    given = _setup_arguments(monkeypatch)
    assert set(given["extras_require"]) == {"cpu", "gpu", "sglang", "dev", "bench"}
    pinned = {re.sub("[-_]", "-", name).lower(): v for name, v in (line.split("==") for line in constraints())}
    here = [*given["install_requires"], *(r for e in ("cpu", "dev", "bench") for r in given["extras_require"][e])]
    for requirement in here:
        name, version = re.fullmatch(r"([\w-]+)==([\w.]+)(?:; python_version >= '3.12')?", requirement).groups()
        assert pinned[name.lower()] == version, requirement


def test_python_versions_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _setup_arguments(monkeypatch)["python_requires"] == ">=3.11,<3.13"


def test_the_engines_environment_holds_the_release_that_setup_names(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (REPOSITORY / "launch" / "sglang_cpu" / "requirements.txt").read_text().splitlines()[1:]
    assert set(_setup_arguments(monkeypatch)["extras_require"]["sglang"]) <= set(lines)
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "all pinned"
