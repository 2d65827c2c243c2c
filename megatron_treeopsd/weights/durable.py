"""Folders that appear complete or not at all.

    .NAME.partial     what is being written; after a commit that replaced something, what it replaced, until removed
    .NAME.replaced    what it replaced, where a file system cannot exchange two folders in one step
    .NAME.removed     what is being removed

What a killed process left of these is removed, or put back, when the next one begins.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h


def staging(destination: Path) -> Path:
    """Where `destination` is written before it is complete: beside it, hidden, so that a rename is atomic."""
    return _beside(destination, "partial")


def begin(destination: Path) -> Path:
    """An empty staging folder. What a killed process left is removed; what it was about to replace comes back."""
    folder, replaced = staging(destination), _beside(destination, "replaced")
    if replaced.exists() and not destination.exists():
        replaced.rename(destination)
    for leftover in (replaced, folder):
        discard(leftover)
        _remove(_beside(leftover, "removed"))
    folder.mkdir(parents=True)
    return folder


def commit(destination: Path) -> None:
    """Give the staged folder its name, in place of an older folder of that name if there is one.

    Its files must have been synced; the names are made durable here.
    """
    folder = staging(destination)
    old: Path | None = None
    sync(folder)
    if not destination.exists():
        folder.rename(destination)
    elif _exchange(folder, destination):
        old = folder
    else:
        old = destination.rename(_beside(destination, "replaced"))
        folder.rename(destination)
    sync(destination.parent)
    if old is not None:
        _remove(old)


def discard(folder: Path) -> None:
    """Remove a folder if it is there. It loses its name first, so that it is never seen half removed."""
    if folder.exists():
        doomed = _beside(folder, "removed")
        _remove(doomed)  # of a killed process
        folder.rename(doomed)
        _remove(doomed)


def _beside(folder: Path, what: str) -> Path:
    return folder.with_name(f".{folder.name.lstrip('.')}.{what}")


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _exchange(left: Path, right: Path) -> bool:
    """Swap the names of two folders in one step; False where the system or its file system cannot."""
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None:
        return False
    if swap(_AT_FDCWD, os.fsencode(left), _AT_FDCWD, os.fsencode(right), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(right))


def sync(path: Path) -> None:
    """Flush a file's contents, or a folder's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
