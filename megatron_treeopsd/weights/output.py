"""A new file of known size that reaches the disk while it is being written."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from megatron_treeopsd.weights.extent import reason

WRITE_BYTES = 512 * 2**10
"""At most this much is handed to the system at once. Linux keeps it in contiguous memory if it finds some: fewer and
larger pieces cost less each, but beyond this size looking for them has cost several times as much as copying."""
FLUSH_BYTES = 32 * 2**20
"""Whenever this much has come, the system is told to begin getting it onto the disk, so that the end need not wait for
all of it."""
PAGE_BYTES = 4096
"""Whole pages are copied fastest."""

_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = _libc.fallocate  # os.posix_fallocate writes to each page where it must emulate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_sync_file_range = _libc.sync_file_range
_sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_BEGIN = 2  # SYNC_FILE_RANGE_WRITE of linux/fs.h


class Output:
    """A new file of `nbytes`. A disk that is full or fails shows as `OSError`, which names the file, in some call; lack
    of room in the first, where the file system can tell.

    Room for all of it is reserved at once: the file system then need not look for some page by page, which is a fifth
    of the cost of writing.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        try:
            self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        except OSError as error:
            raise _named(error, path) from None
        self._unflushed = 0
        try:
            _reserve(self._handle, nbytes, path)
        except OSError:
            self.close()
            raise

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes from byte `offset` on."""
        view, size, done = memoryview(data), len(data), 0
        try:
            while done < size:
                done += os.pwrite(self._handle, view[done : done + WRITE_BYTES], offset + done)
        except OSError as error:
            raise _named(error, self.path) from None
        self._unflushed += size
        if self._unflushed >= FLUSH_BYTES:
            _sync_file_range(self._handle, 0, 0, _BEGIN)  # a hint, of which nothing depends; `finish` tells of failures
            self._unflushed = 0

    def finish(self) -> None:
        """Return when all of it is on the disk."""
        try:
            os.fsync(self._handle)
        except OSError as error:
            raise _named(error, self.path) from None

    def close(self) -> None:
        """Let go of the file, finished or not."""
        os.close(self._handle)


def _named(error: OSError, path: Path) -> OSError:
    return OSError(error.errno, reason(error), str(path))


def _reserve(handle: int, nbytes: int, path: Path) -> None:
    """Make a file `nbytes` long, with room for all of them where the file system can promise it."""
    if nbytes and _fallocate(handle, 0, 0, nbytes):
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(number, os.strerror(number), str(path))
        os.ftruncate(handle, nbytes)
