"""Writing one safetensors file tensor by tensor: its header needs only names, shapes and dtypes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from megatron_treeopsd.weights.extent import bytes_of
from megatron_treeopsd.weights.output import PAGE_BYTES, Output
from megatron_treeopsd.weights.rules import Shape
from megatron_treeopsd.weights.safetensors_file import NAMES


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, shape and dtype of a tensor that is to come."""

    name: str
    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def row_blocks(tensor: TensorInfo, max_bytes: int) -> list[tuple[int, int]]:
    """Ranges of rows that take at most `max_bytes`, or of one row; all rows once."""
    rows = tensor.shape[0]
    step = max(1, max_bytes * rows // max(1, tensor.nbytes))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


class SafetensorsWriter:
    """One file of announced tensors, synced at the end; holds no tensor. Use as a context manager.

    Tensors, or parts of them, may come in any order. Leaving raises `ValueError` if something never came.
    """

    def __init__(self, path: Path, tensors: Sequence[TensorInfo], metadata: dict[str, str] | None = None) -> None:
        header: dict[str, object] = {"__metadata__": metadata or {"format": "pt"}}
        starts: dict[str, int] = {}
        end = 0
        for tensor in tensors:
            starts[tensor.name], end = end, end + tensor.nbytes
            header[tensor.name] = {
                "dtype": NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [starts[tensor.name], end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % PAGE_BYTES)
        self.nbytes = 8 + len(text) + end
        self._starts = {name: 8 + len(text) + start for name, start in starts.items()}
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._missing = {tensor.name: tensor.nbytes for tensor in tensors}
        self._file = Output(path, self.nbytes)
        try:
            self._file.write_at(0, len(text).to_bytes(8, "little") + text)
        except OSError:
            self._file.close()
            raise

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor; it must be as the header promises."""
        given = TensorInfo(name, tuple(tensor.shape), tensor.dtype)
        if given != self._tensors.get(name):
            raise ValueError(f"{self._file.path}: {given} comes where {self._tensors.get(name)} was announced")
        self.write_bytes(name, 0, bytes_of(tensor.detach().cpu().contiguous()))

    def write_bytes(self, name: str, start: int, data: memoryview) -> None:
        """Write bytes `start` .. of a tensor; each must come once."""
        self._missing[name] -= len(data)
        if self._missing[name] < 0 or start + len(data) > self._tensors[name].nbytes:
            raise ValueError(f"{self._file.path}: more bytes of {name} come than it has")
        self._file.write_at(self._starts[name] + start, data)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        try:
            if kind is None:
                if missing := [name for name, nbytes in self._missing.items() if nbytes]:
                    raise ValueError(f"{self._file.path}: {missing[0]} was announced and never (completely) written")
                self._file.finish()
        finally:
            self._file.close()
