"""Conversions in forked processes that are killed; started by test_convert_kill.py.

convert_kill_worker.py ROOT     with ROOT/old and ROOT/new as Hugging Face folders
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_treeopsd.convert import side_by_side
from megatron_treeopsd.convert.processes import Processes
from megatron_treeopsd.convert.run import convert
from megatron_treeopsd.convert.to_hf import ToHuggingFace
from megatron_treeopsd.convert.to_megatron import ToMegatron
from megatron_treeopsd.weights.output import Output

WATCHED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
RANDOM_KILLS = 8
State = str | None
"""What stands under the destination's name: "old", "new" or nothing."""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def forked(action: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


class Case:
    """One conversion, of ROOT/new, which replaces that of ROOT/old if `overwrite`. What is beside it must vanish."""

    def __init__(self, folder: Path, make: Callable[[Path], Any], sources: dict[str, Path], *, overwrite: bool) -> None:
        self.folder, self.destination, self.overwrite = folder, folder / "out", overwrite
        self._make, self._source = make, sources["new"]
        self._old = folder.with_name(f"{folder.name}_old")
        folder.mkdir()
        self._convert(sources["old"], self._old)
        self._convert(sources["new"], self.destination)
        self._expected = {"old": contents(self._old), "new": contents(self.destination)}
        assert self._expected["old"] != self._expected["new"]

    def _convert(self, source: Path, destination: Path) -> None:
        convert(self._make(source), destination, Processes(), overwrite=True, verify=False, progress=False)

    def convert(self) -> None:
        self._convert(self._source, self.destination)

    def prepare(self) -> None:
        """What an earlier run has left at the destination, beside the leftovers of those that were killed."""
        shutil.rmtree(self.destination, ignore_errors=True)
        if self.overwrite:
            shutil.copytree(self._old, self.destination)

    def state(self) -> State:
        """Raises unless what is there is complete."""
        if not self.destination.exists():
            assert not self.overwrite, "the old folder is gone and the new one is not there"
            return None
        found = contents(self.destination)
        return next(name for name, expected in self._expected.items() if found == expected)

    def check_end(self) -> None:
        """After a conversion that was not disturbed."""
        assert self.state() == "new"
        assert [path.name for path in self.folder.iterdir()] == ["out"], "leftovers of killed runs stay"


def killed_at_operations(case: Case, every: int) -> int:
    """Die at each (or every n-th) operation on files until a conversion lives to its end. Returns their number."""

    def convert_and_die(at: int) -> None:
        operations = itertools.count(1)

        def step() -> None:
            if next(operations) == at:
                os.kill(os.getpid(), signal.SIGKILL)

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            if event in WATCHED and str(case.folder) in str(arguments[0]):
                step()

        write = Output.write_at

        def watched_write(self: Output, offset: int, data: Any) -> None:
            step()
            write(self, offset, data)

        Output.write_at = watched_write  # type: ignore[method-assign]
        sys.addaudithook(watch)
        case.convert()

    seen: set[State] = set()
    for at in itertools.count(1, every):
        case.prepare()
        _, status = os.waitpid(forked(lambda at=at: convert_and_die(at)), 0)  # type: ignore[misc]
        seen.add(case.state())
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            case.check_end()
            assert seen == {"old" if case.overwrite else None, "new"}
            return at
    raise AssertionError


def killed_at_random(case: Case) -> None:
    """Be killed at random moments; the next run then does its work and removes what was left."""
    rng = random.Random(0)
    started = time.monotonic()
    os.waitpid(forked(lambda: (case.prepare(), case.convert())), 0)
    longest = time.monotonic() - started
    for _ in range(RANDOM_KILLS):
        case.prepare()
        pid = forked(lambda: case.convert())
        time.sleep(rng.uniform(0, longest))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        case.state()
    case.prepare()
    case.convert()
    case.check_end()


def main(root: Path) -> None:
    side_by_side.FILE_BYTES = 50_000  # so that several threads write
    os.fsync = lambda _: None  # a killed process takes no written page with it; only a dead machine does
    hf = {name: root / name for name in ("old", "new")}
    megatron = {name: root / f"{name}_megatron" for name in hf}
    for name, folder in megatron.items():
        convert(ToMegatron(hf[name], dtype=None), folder, Processes(), overwrite=False, verify=False, progress=False)
    operations = []
    for number, (make, sources, overwrite, every) in enumerate(
        [
            (lambda folder: ToMegatron(folder, dtype=None, tp=2), hf, False, 5),
            (lambda folder: ToMegatron(folder, dtype=None, tp=2), hf, True, 1),
            (lambda folder: ToHuggingFace(folder, dtype=None, shard_bytes=60_000), megatron, True, 5),
        ]
    ):
        case = Case(root / f"case{number}", make, sources, overwrite=overwrite)
        operations.append(killed_at_operations(case, every))
        killed_at_random(case)
    print(*operations)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
