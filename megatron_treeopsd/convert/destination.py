"""A folder that appears under its name when it is complete, and never before."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_treeopsd.weights import durable
from megatron_treeopsd.weights.folder import CONFIG
from megatron_treeopsd.weights.rules import WeightsError


def check(destination: Path, source: Path, *, nbytes: int, overwrite: bool) -> None:
    """Raise `WeightsError` for a destination that cannot be used: all that can be known before writing."""
    inside, outside = destination.resolve(), source.resolve()
    if inside == outside or inside in outside.parents or outside in inside.parents:
        raise WeightsError(f"{destination}: source and destination lie in each other; choose another destination")
    if destination.exists() or destination.is_symlink():
        _check_existing(destination, overwrite)
    parent = inside.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise WeightsError(f"{destination}: {parent} is not a folder; choose another destination")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise WeightsError(f"{destination}: no permission to write in {parent}; choose another destination")
    free = shutil.disk_usage(parent).free
    if free < nbytes:
        raise WeightsError(
            f"{destination}: {nbytes / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free there; make room or "
            "choose another destination"
            + (" (what it replaces goes only when the new one is complete)" if destination.exists() else "")
        )


def _check_existing(destination: Path, overwrite: bool) -> None:
    if not destination.is_dir() or destination.is_symlink():
        raise WeightsError(f"{destination} is not a folder; choose another destination")
    if any(destination.iterdir()):
        if not overwrite:
            raise WeightsError(f"{destination} is not empty; choose another destination, or replace it by --overwrite")
        if not (destination / CONFIG).is_file():
            raise WeightsError(
                f"{destination} holds no {CONFIG}, so it is not a checkpoint and --overwrite leaves it alone"
            )


@contextmanager
def claimed(destination: Path) -> Iterator[None]:
    """Nobody else writes this destination meanwhile. Raises `WeightsError` if somebody does."""
    path = destination.with_name(f".{destination.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise WeightsError(f"{destination}: another process is writing it") from None
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            break
        os.close(handle)  # its owner removed the file between our opening and locking it
    try:
        yield
    finally:
        path.unlink()
        os.close(handle)


def abandon(destination: Path) -> None:
    """Remove what was written."""
    shutil.rmtree(durable.staging(destination), ignore_errors=True)
