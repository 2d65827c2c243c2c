"""A new file that reaches the disk while it is being written."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock

WRITE_BYTES = 256 * 2**10
"""At most this much is handed to the system at once: for more, Linux looks for large pieces of free memory to keep it
in, which takes several times longer than the copying where memory is fragmented."""
FLUSH_BYTES = 64 * 2**20
"""Whenever this much has come, a thread starts to get it onto the disk, so that the end need not wait for all."""
PAGE_BYTES = 4096
"""Whole pages are copied fastest."""


class Output:
    """A new file, written by one thread or several.

    A disk that is full or fails shows as `OSError`, with the file's name, in some call.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._thread = ThreadPoolExecutor(1, "flush")
        self._flushing: Future[None] | None = None
        self._unflushed = 0
        self._lock = Lock()

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes from byte `offset` on."""
        view, size, done = memoryview(data), len(data), 0
        try:
            while done < size:
                done += os.pwrite(self._handle, view[done : done + WRITE_BYTES], offset + done)
        except OSError as error:
            raise self._named(error) from None
        with self._lock:
            self._unflushed += size
            if self._unflushed >= FLUSH_BYTES and (self._flushing is None or self._flushing.done()):
                self._settle()
                self._flushing = self._thread.submit(os.fdatasync, self._handle)
                self._unflushed = 0

    def finish(self) -> None:
        """Return when all of it is on the disk."""
        try:
            self._settle()
            os.fsync(self._handle)
        except OSError as error:
            raise self._named(error) from None

    def close(self) -> None:
        """Let go of the file, finished or not."""
        self._thread.shutdown()
        os.close(self._handle)

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, str(self.path))

    def _settle(self) -> None:
        flushing, self._flushing = self._flushing, None
        if flushing is not None:
            flushing.result()
