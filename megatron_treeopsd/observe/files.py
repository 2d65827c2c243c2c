"""Writing files so that a reader never sees half of one, and reading lines that a killed process may have torn."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class RunFolderError(RuntimeError):
    """A run folder that cannot be used as asked; the message says which file, why, and what to do."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file in errors of the operating system: "no space left on device" alone helps nobody."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunFolderError(
            f"{path}: cannot be written: {reason}; free space or choose another folder with run="
        ) from error


def write_atomically(path: Path, text: str) -> None:
    """Write UTF-8 text under a temporary name beside `path` and rename it. Raises `RunFolderError`."""
    temporary = path.with_name(path.name + ".tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def append_json_line(path: Path, row: Mapping[str, Any]) -> None:
    """Append one line with one write, so that a kill tears at most the last line. Raises `RunFolderError`."""
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, allow_nan=False) + "\n")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a JSON lines file, each an object; [] without the file.

    A last line without its newline is one that was being written when its process was killed (or is being written
    now) and is left out. Any other line that is not a JSON object raises `RunFolderError` naming file and line.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rows = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise RunFolderError(f"{path}:{number}: not a JSON line: {error}; mend or remove that line") from None
        if not isinstance(row, dict):
            raise RunFolderError(f"{path}:{number}: expected a JSON object, found {line[:40]!r}; remove that line")
        rows.append(row)
    return rows
