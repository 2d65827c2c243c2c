"""Rows of tensors as bytes for a file, a little at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_treeopsd.convert.watch import Watch
from megatron_treeopsd.weights.extent import Extent, bytes_of
from megatron_treeopsd.weights.source import TensorSource
from megatron_treeopsd.weights.torch_dist.grid import Region, Slot, fill
from megatron_treeopsd.weights.writer import TensorInfo, row_blocks

Write = Callable[[int, memoryview], None]
COPY_BYTES = 512 * 2**10
"""Copied at a time where nothing is converted: what was read is still in the processor's cache when it is written."""
BLOCK_BYTES = 2**20
"""Read, converted and written at a time elsewhere (single rows may be larger)."""


class RowCopier:
    """Copies rows of a source, and lets a watch look at all of them."""

    def __init__(self, source: TensorSource, watch: Watch) -> None:
        self._source, self._watch = source, watch
        self._dtypes, self._shapes = source.dtypes, source.shapes
        self._files = source.files
        self._buffer = torch.empty(COPY_BYTES, dtype=torch.uint8)

    def copy(self, name: str, rows: tuple[int, int], dtype: torch.dtype, write: Write) -> None:
        """Hand the bytes of a range of rows, in `dtype`, to `write`: (first byte among them, bytes)."""
        done = 0
        if self._dtypes[name] == dtype and (extents := self._source.extents(name, *rows)) is not None:
            for extent in extents:
                self._copy_bytes(name, extent, lambda start, data, done=done: write(done + start, data))  # type: ignore[misc]
                done += extent.nbytes
            return
        info = TensorInfo(name, (rows[1] - rows[0], *self._shapes[name][1:]), dtype)
        for first, last in row_blocks(info, BLOCK_BYTES):
            block = self._source.read(name, 0, rows[0] + first, rows[0] + last).to(dtype)
            self._watch.saw((name,), block)
            write(done, bytes_of(block))
            done += block.nbytes

    def _copy_bytes(self, name: str, extent: Extent, write: Write) -> None:
        values, data = self._buffer.view(extent.dtype), bytes_of(self._buffer)
        for at in range(0, extent.nbytes, COPY_BYTES):
            count = min(COPY_BYTES, extent.nbytes - at)
            self._files.read_bytes(extent.file, extent.offset + at, data[:count])
            self._watch.saw((name,), values[: count // extent.dtype.itemsize])
            write(at, data[:count])

    def fill(self, place: Slot, region: Region, dtype: torch.dtype) -> Tensor:
        """A region of a weight that has some of the columns."""

        def read(name: str, start: int, stop: int) -> Tensor:
            return self._source.read(name, 0, start, stop)

        matrix = fill(place, region, read, dtype)
        self._watch.saw(place.weight.hf, matrix)
        return matrix
