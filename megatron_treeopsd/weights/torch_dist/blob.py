"""One tensor as `torch.save` stores it, written and found without holding it.

A `.distcp` file is a row of such blobs. Each is an uncompressed zip archive, so the tensor's bytes stand in it as they
are: between a head and a tail that depend on dtype and shape alone. torch itself makes these (`envelope`), with a gap
where the bytes belong.
"""

from __future__ import annotations

import functools
import io
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from megatron_treeopsd.weights.extent import Extent, Files
from megatron_treeopsd.weights.rules import Shape, WeightsError
from megatron_treeopsd.weights.torch_dist.metadata import MALFORMED

_DESCRIPTION, _DATA = "data.pkl", "data/0"
_SETTINGS = Lock()  # torch's are the process's
_HEADER, _DIRECTORY, _DESCRIPTOR = b"PK\x03\x04", b"PK\x01\x02", b"PK\x07\x08"  # what records of an archive begin with
_HAS_DESCRIPTOR = 8
ReadAt = Callable[[int, memoryview], None]
"""(byte, buffer) -> fills the buffer from that byte on."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """What surrounds a tensor's bytes, and how many there are."""

    head: bytes
    nbytes: int
    tail: bytes

    @property
    def length(self) -> int:
        return len(self.head) + self.nbytes + len(self.tail)


@functools.lru_cache(maxsize=4096)
def envelope(dtype: torch.dtype, shape: Shape) -> Envelope:
    """Head and tail of a tensor's blob. Checksums are left out, as torch does not look at them when it loads."""
    recorder = _Recorder()
    with _SETTINGS:
        checksums = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            with torch.serialization.skip_data():
                torch.save(torch.empty(shape, dtype=dtype), recorder)  # memory that is never touched
        finally:
            torch.serialization.set_crc32_options(checksums)
    head, tail = bytes(recorder.parts[0]), b"".join(recorder.parts[1:])  # without elements there is no gap
    assert recorder.skipped == torch.Size(shape).numel() * dtype.itemsize
    return Envelope(head, recorder.skipped, tail)


def locate(files: Files, file: Path, offset: int, length: int, dtype: torch.dtype, shape: Shape) -> Extent | None:
    """Where the bytes of a blob's tensor are; None if it was stored in another way than `envelope` knows.

    Raises `WeightsError` if there is no whole archive at that place.
    """

    def read_at(position: int, into: memoryview) -> None:
        files.read_bytes(file, offset + position, into)

    with _naming(file, offset, length):
        whole = Extent(file, offset, shape, dtype)
        if whole.nbytes <= length and _is_envelope(read_at, length, around := envelope(dtype, shape)):
            return replace(whole, offset=offset + len(around.head))
        members = _members(read_at, length)
        description, data = members.get(_DESCRIPTION), members.get(_DATA)
        if description is None or data is None or data.compress_type != zipfile.ZIP_STORED:
            return None
        extent = Extent(file, offset + _start(read_at, data), shape, dtype)
        same = _contents(read_at, description) == _description(dtype, shape)
        return extent if same and data.file_size == extent.nbytes else None


def _is_envelope(read_at: ReadAt, length: int, around: Envelope) -> bool:
    """Whether a blob is byte for byte what this torch writes without checksums: then there is nothing to look for."""
    if length != around.length:
        return False
    head, tail = bytearray(len(around.head)), bytearray(len(around.tail))
    read_at(0, memoryview(head))
    read_at(length - len(tail), memoryview(tail))
    return (head, tail) == (around.head, around.tail)


def load_whole(files: Files, file: Path, offset: int, length: int, dtype: torch.dtype, shape: Shape) -> Tensor:
    """The tensor of a blob, however it is stored, in memory; nothing that is in it is executed.

    Raises `WeightsError` if there is none, or one of another dtype or shape.
    """
    window = _Window(lambda position, into: files.read_bytes(file, offset + position, into), length)
    with _naming(file, offset, length):
        tensor = torch.load(window, map_location="cpu", weights_only=True)
        if not isinstance(tensor, Tensor) or (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
            raise TypeError(f"that is {dtype} {shape}")
        return tensor


@contextmanager
def _naming(file: Path, offset: int, length: int) -> Iterator[None]:
    """Say where it was that there are other bytes than there should be."""
    try:
        yield
    except WeightsError:
        raise
    except (zipfile.BadZipFile, OSError, *MALFORMED) as error:
        reason = str(error).partition("\n")[0]
        raise WeightsError(f"{file}: bytes {offset} to {offset + length} hold no tensor: {reason}") from None


@functools.lru_cache(maxsize=4096)
def _description(dtype: torch.dtype, shape: Shape) -> bytes:
    """What a blob says of a contiguous tensor, in the words of this torch."""
    parts = envelope(dtype, shape)
    behind = len(parts.head) + parts.nbytes

    def read_at(position: int, into: memoryview) -> None:
        source = parts.head if position < len(parts.head) else parts.tail
        start = position if position < len(parts.head) else position - behind
        into[:] = source[start : start + len(into)]

    return _contents(read_at, _members(read_at, parts.length)[_DESCRIPTION])


# ------------------------------------------------------------------------------------------------------- zip archives
def _members(read_at: ReadAt, length: int) -> dict[str, zipfile.ZipInfo]:
    """Contents of an archive by name, without the folder that all of them are in."""
    with zipfile.ZipFile(_Window(read_at, length)) as archive:
        return {item.filename.partition("/")[2]: item for item in archive.infolist()}


def _start(read_at: ReadAt, member: zipfile.ZipInfo) -> int:
    """Where a member's bytes start: behind 30 bytes of header, a name, and an extra field.

    Raises `ValueError` unless they lie between two records of the kinds that belong there.
    """
    header, behind = bytearray(30), bytearray(4)
    read_at(member.header_offset, memoryview(header))
    start = member.header_offset + 30 + sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    read_at(start + member.compress_size, memoryview(behind))
    followers = (_DESCRIPTOR,) if member.flag_bits & _HAS_DESCRIPTOR else (_HEADER, _DIRECTORY)
    if header[:4] != _HEADER or behind not in followers:
        raise ValueError(f"{member.filename} is not where it should be")
    return start


def _contents(read_at: ReadAt, member: zipfile.ZipInfo) -> bytes:
    found = bytearray(member.file_size)
    read_at(_start(read_at, member), memoryview(found))
    return bytes(found)


class _Window(io.RawIOBase):
    """A range of bytes as a file."""

    def __init__(self, read_at: ReadAt, length: int) -> None:
        self._read_at, self._length, self._position = read_at, length, 0

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = max(0, min(len(buffer), self._length - self._position))
        self._read_at(self._position, memoryview(buffer)[:count])
        self._position += count
        return count

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError(f"seek to {base + offset}")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


class _Recorder(io.RawIOBase):
    """Keeps what is written in front of a gap and behind it."""

    def __init__(self) -> None:
        self.parts = [bytearray()]
        self.skipped = 0

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.parts[-1] += data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_CUR, "torch is expected to skip forward over a tensor's bytes"
        self.parts.append(bytearray())
        self.skipped += offset
        return self.tell()

    def tell(self) -> int:
        return sum(map(len, self.parts)) + self.skipped

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True
