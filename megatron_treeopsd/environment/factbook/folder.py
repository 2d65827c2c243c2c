"""Folders that are written whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(folder: Path, *, replaces: str | None = None) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its place when the block ends without an error.

    `replaces` names a file by which an older folder is known that may be replaced. Raises `FileExistsError` if `folder`
    holds anything else, before anything is written.
    """
    folder = folder.absolute()
    if folder.exists() and not (folder.is_dir() and _replaceable(folder, replaces)):
        hint = f"it holds no {replaces}, so it was not made here; " if replaces else ""
        raise FileExistsError(f"{folder} exists already: {hint}remove it or choose another folder")
    temporary, old = (folder.with_name(f".{folder.name}.{state}") for state in ("new", "old"))
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _replaceable(folder: Path, replaces: str | None) -> bool:
    empty = next(folder.iterdir(), None) is None
    return empty or (replaces is not None and (folder / replaces).is_file())
