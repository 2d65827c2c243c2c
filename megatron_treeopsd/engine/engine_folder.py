"""The files of one engine, which are removed even if both it and its trainer are killed: then by the next run's start.

treeopsd-sglang-PID-xxxxxxxx/       in the folder for temporary files; PID is the trainer's
    lock                            locked as long as the trainer lives
    log.txt                         what the engine's process prints
    shared_memory.txt               files in shared memory that SGLang leaves behind when it is killed
    model/                          the config that is served
    ...                             whatever SGLang and the transports of weights put here
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

PREFIX = "treeopsd-sglang-"
SHARED_MEMORY = Path("/dev/shm")
_SGLANG = re.compile(r"(sglang_loads|sgl_shm)_[\w.]+")
_SOCKET_PATH = 107  # bytes, the most that the operating system takes
_SOCKET_NAME = 40  # bytes that SGLang and PyTorch put behind the folder


class EngineFolder:
    """A new folder of this process. Making it removes those of processes that are dead.

    Attributes:
        path: of the folder.
        shared_memory: file that the engine's process lists its shared memory in.
    """

    def __init__(self) -> None:
        remove_orphans()
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self.shared_memory = self.path / "shared_memory.txt"
        self._lock = (self.path / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def variables(self) -> dict[str, str]:
        """Environment variables that keep the temporary files of a process in here, if the names of sockets allow."""
        fits = len(str(self.path)) + _SOCKET_NAME <= _SOCKET_PATH
        return {"TMPDIR": str(self.path)} if fits else {}

    def forget_shared_memory(self) -> None:
        """Remove what the engine's process, which must have ended, has listed."""
        _remove_shared_memory(self.shared_memory)

    def remove(self) -> None:
        """The engine is closed."""
        self.forget_shared_memory()
        shutil.rmtree(self.path)
        self._lock.close()


def remove_orphans() -> None:
    """Remove the folders of dead processes of this user, and the shared memory that they list."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and _free(folder / "lock"):
            logger.info("%s is left behind by a process that was killed; it is removed", folder)
            _remove_shared_memory(folder / "shared_memory.txt")
            shutil.rmtree(folder, ignore_errors=True)  # another start may be removing it too


def _free(lock: Path) -> bool:
    """Whether the owner, who may live in another container, where process ids are others, is dead and of this user."""
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return os.fstat(file.fileno()).st_uid == os.getuid()
    except (BlockingIOError, FileNotFoundError, PermissionError):  # no lock: not whole yet, or removed right now
        return False


def _remove_shared_memory(listed: Path) -> None:
    names = listed.read_text().split() if listed.is_file() else []
    for name in filter(_SGLANG.fullmatch, names):
        (SHARED_MEMORY / name).unlink(missing_ok=True)
    listed.unlink(missing_ok=True)
