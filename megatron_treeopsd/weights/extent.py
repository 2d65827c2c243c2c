"""Tensors as ranges of bytes in files: read by slices, into memory of the reader's own.

Files are read with `pread` rather than mapped: pages of a mapping count as memory of the process, and would add up to
the whole checkpoint.
"""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_treeopsd.weights.rules import Shape, WeightsError

COLUMN_BLOCK_BYTES = 2**20  # whole rows that are read to keep a range of their columns; small enough for the cache


@dataclass(frozen=True, slots=True)
class Extent:
    """A tensor whose elements lie in a file in row-major order, without gaps, from byte `offset` on."""

    file: Path
    offset: int
    shape: Shape
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one step in the first dimension."""
        return torch.Size(self.shape[1:]).numel() * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def rows(self, start: int, stop: int) -> Extent:
        """Consecutive rows of it."""
        return replace(self, offset=self.offset + start * self.row_bytes, shape=(stop - start, *self.shape[1:]))

    def row(self, index: int) -> Extent:
        """One row, without the first dimension."""
        return replace(self, offset=self.offset + index * self.row_bytes, shape=self.shape[1:])


class Files:
    """Open files of a source; several threads may use them.

    What was opened is read to the end even if another file takes its name meanwhile; `check_unchanged` tells.
    """

    def __init__(self) -> None:
        self._opening = threading.Lock()
        self._handles: dict[Path, int] = {}
        self._states: dict[Path, tuple[int, ...]] = {}

    def handle(self, file: Path) -> int:
        """The descriptor of a file, opened when first asked for. Raises `WeightsError` if it cannot be opened."""
        if (found := self._handles.get(file)) is not None:
            return found
        with self._opening:
            if file not in self._handles:
                try:
                    handle = os.open(file, os.O_RDONLY)
                except OSError as error:
                    raise WeightsError(f"{file}: cannot be opened: {reason(error)}") from None
                self._states[file] = _state(os.fstat(handle))
                self._handles[file] = handle
            return self._handles[file]

    def check_unchanged(self) -> None:
        """Raise `WeightsError` if a file was written to, replaced or removed since it was opened."""
        for file, state in self._states.items():
            try:
                unchanged = _state(file.stat()) == state
            except OSError:
                unchanged = False
            if not unchanged:
                raise WeightsError(f"{file}: changed while it was read; try again when nothing writes it")

    def read(self, extent: Extent, into: Tensor) -> None:
        """Fill `into`, contiguous and of the extent's dtype and number of elements."""
        self.read_bytes(extent.file, extent.offset, bytes_of(into))

    def read_columns(self, extent: Extent, start: int, stop: int, into: Tensor) -> None:
        """Fill `into` with columns start:stop of a two-dimensional extent."""
        rows, columns = extent.shape
        if (start, stop) == (0, columns) and into.is_contiguous():
            self.read(extent, into)
            return
        step = max(1, COLUMN_BLOCK_BYTES // max(1, extent.row_bytes))
        block = torch.empty((min(step, rows), columns), dtype=extent.dtype)
        for first in range(0, rows, step):
            last = min(first + step, rows)
            self.read(extent.rows(first, last), block[: last - first])
            into[first:last] = block[: last - first, start:stop]

    def read_bytes(self, file: Path, offset: int, into: memoryview) -> None:
        """Fill `into` from byte `offset` on. Raises `WeightsError` if the file ends before."""
        handle, done = self.handle(file), 0
        while done < len(into):
            try:
                count = os.preadv(handle, [into[done:]], offset + done)
            except OSError as error:
                raise WeightsError(f"{file}: cannot be read: {error.strerror}") from None
            if count == 0:
                raise WeightsError(f"{file}: ends at byte {offset + done}, where more was expected; it is truncated")
            done += count

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()
        self._states.clear()

    def __del__(self) -> None:
        self.close()


def reason(error: OSError) -> str:
    """The system's words for why a file cannot be used, and what to do where they do not say it."""
    return f"{error.strerror}; raise the limit (ulimit -n)" if error.errno == errno.EMFILE else str(error.strerror)


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor. (NumPy, which hands it out, does not know bfloat16.)"""
    assert tensor.is_contiguous()
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy()) if tensor.numel() else memoryview(b"")
