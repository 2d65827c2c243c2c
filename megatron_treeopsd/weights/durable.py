"""Folders that appear complete or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def staging(destination: Path) -> Path:
    """Where `destination` is written before it is complete: beside it, hidden, so that a rename is atomic."""
    return destination.with_name(f".{destination.name}.partial")


def begin(destination: Path) -> Path:
    """An empty staging folder. What a killed process left in it is removed."""
    folder = staging(destination)
    discard(folder)
    folder.mkdir(parents=True)
    return folder


def commit(destination: Path) -> None:
    """Give the staged folder its name, in place of an older folder of that name if there is one.

    Its files must have been synced; the names are made durable here.
    """
    folder = staging(destination)
    sync(folder)
    if destination.exists():
        old = _set_aside(destination)
        folder.rename(destination)
        shutil.rmtree(old)
    else:
        folder.rename(destination)
    sync(destination.parent)


def discard(folder: Path) -> None:
    """Remove a folder if it is there. It loses its name first, so that it is never seen half removed."""
    if folder.exists():
        shutil.rmtree(_set_aside(folder))


def _set_aside(folder: Path) -> Path:
    doomed = folder.with_name(f".{folder.name.lstrip('.')}.removed")
    if doomed.exists():  # of a killed process
        shutil.rmtree(doomed)
    return folder.rename(doomed)


def sync(path: Path) -> None:
    """Flush a file's contents, or a folder's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
