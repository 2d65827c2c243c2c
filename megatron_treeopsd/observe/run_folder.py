"""The folder of a run: what lies where, and the lock that keeps two processes from writing to it at once.

runs/factbook-treeopsd/
  recipe.yaml                        the resolved recipe
  metrics.jsonl                      one JSON line a step
  tensorboard/                       the same numbers for TensorBoard
  trees/step_000010.safetensors      rollout trees of a sampled step, and beside them
  trees/step_000010.json             credits, targets and ratios of their turns
  checkpoints/
  summary.json  report.html          written when the run ends
  lock                               held while a process writes
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from megatron_treeopsd.observe.files import RunFolderError, read_json_lines, write_atomically, writing

__all__ = ["RunFolder", "RunFolderError", "RunPaths", "contents"]


@dataclass
class RunPaths:
    """Names of the files in a run folder. For readers: opens nothing, creates nothing, needs no lock."""

    root: Path

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        return self.root / "evaluations.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def trees(self) -> Path:
        return self.root / "trees"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    def tree_file(self, step: int) -> Path:
        """Where the trees of a step are saved (`tree.save_trees`)."""
        return self.trees / f"step_{step:06d}.safetensors"

    def notes_file(self, step: int) -> Path:
        """Where the notes on their turns are saved (`TurnNotes.write`)."""
        return self.trees / f"step_{step:06d}.json"

    def saved_tree_steps(self) -> list[int]:
        """Steps whose trees are saved, in order."""
        return sorted(step for path in self.trees.glob("step_*.safetensors") if (step := _step_of(path)) is not None)

    def require(self) -> None:
        """Raise `RunFolderError` unless this is the folder of a run."""
        if not self.recipe.exists() and not self.metrics.exists():
            what = "is not a run folder: no recipe.yaml in it" if self.root.is_dir() else "does not exist"
            raise RunFolderError(f"{self.root} {what}; give the folder that a `treeopsd train` wrote to (its run=)")


def contents(root: Path) -> list[str]:
    """Names of what a run has left in a folder; a run that failed before its first step leaves nothing that counts."""
    return sorted(
        path.name for path in root.glob("*") if path.name != "lock" and not (path.is_dir() and not any(path.iterdir()))
    )


class RunFolder(RunPaths):
    """A run folder that this process may write to, until `close()` (or the end of the `with` block, or its death).

    Args:
        root: the folder; made if missing.
        resume: continue what is there. Without it the folder must be empty.

    Raises `RunFolderError` if a living process holds the folder, or if it is not empty and `resume` is off. The lock
    is the kernel's (`flock`): it goes with the process however that ends, so a killed run leaves nothing to clean up.
    """

    def __init__(self, root: Path | str, *, resume: bool = False) -> None:
        super().__init__(Path(root))
        with writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
        self._descriptor: int | None = self._lock()
        try:
            found = contents(self.root)
            if found and not resume:
                raise RunFolderError(
                    f"{self.root} already holds a run ({', '.join(found[:4])}{', …' if len(found) > 4 else ''}): "
                    "continue it with resume=true, or choose another folder with run=FOLDER"
                )
            with writing(self.root):
                for folder in (self.tensorboard, self.trees, self.checkpoints):
                    folder.mkdir(exist_ok=True)
        except BaseException:
            self.close()
            raise

    def _lock(self) -> int:
        path = self.root / "lock"
        with writing(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise RunFolderError(
                f"{self.root} is in use by {holder}: wait until it ends, or choose another folder with run=FOLDER"
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise RunFolderError(
                f"{path}: this file system cannot lock files ({error.strerror}); choose a folder on another with run="
            ) from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        return descriptor

    def rewind(self, step: int | None) -> None:
        """Forget everything after `step`, the last one that a resumed run has in its weights; None: there is none.

        Drops metric lines and trees of later steps, evaluations of later weights, a line torn by a kill, and what a
        finished run wrote at its end: each step is there once, whatever happened before.
        """
        last = -1 if step is None else step
        trained = -1 if step is None else step + 1  # step s turns weights s into weights s + 1
        for path, limit in ((self.metrics, last), (self.evaluations, trained)):
            rows = [row for row in read_json_lines(path) if row.get("step", 0) <= limit]
            write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
        for path in self.trees.iterdir():
            saved = _step_of(path)
            if saved is not None and saved > last:
                path.unlink()
        self.summary.unlink(missing_ok=True)
        self.report.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the lock. Calling it twice is fine."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _step_of(path: Path) -> int | None:
    found = re.fullmatch(r"step_(\d+)\.(safetensors|json)(\.tmp)?", path.name)
    return int(found[1]) if found else None
