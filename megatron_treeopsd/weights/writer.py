"""Writing one safetensors file tensor by tensor: its header needs only names, shapes and dtypes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from megatron_treeopsd.weights.extent import bytes_of
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


class SafetensorsWriter:
    """One file, written front to back and synced at the end; holds no tensor. Use as a context manager."""

    def __init__(self, path: Path, tensors: Sequence[TensorInfo], metadata: dict[str, str] | None = None) -> None:
        self._waiting = list(reversed(tensors))
        self._written = 0  # bytes of the tensor that is next to be completed
        header: dict[str, object] = {"__metadata__": metadata or {"format": "pt"}}
        offset = 0
        for tensor in tensors:
            header[tensor.name] = {
                "dtype": NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, offset + tensor.nbytes],
            }
            offset += tensor.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # data starts on a multiple of 8 bytes
        self.nbytes = 8 + len(text) + offset
        self._file = open(path, "wb")  # noqa: SIM115 (closed by __exit__)
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: Tensor) -> None:
        """Append the next tensor; it must be the one that the header promises."""
        self.write_rows(name, tensor)
        if self._written:
            raise ValueError(f"{self._file.name}: {name} {tuple(tensor.shape)} is not all of {self._waiting[-1]}")

    def write_rows(self, name: str, rows: Tensor) -> None:
        """Append the next rows of the next tensor. With its last row the one after it is next."""
        expected = self._waiting[-1]
        self._written += rows.nbytes
        given = (name, rows.dtype, tuple(rows.shape[1:]))
        if given != (expected.name, expected.dtype, expected.shape[1:]) or self._written > expected.nbytes:
            raise ValueError(f"{self._file.name}: {name} {tuple(rows.shape)} comes where {expected} was announced")
        self._file.write(bytes_of(rows.detach().cpu().contiguous()))
        if self._written == expected.nbytes:
            self._waiting.pop()
            self._written = 0

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        try:
            if kind is None:
                if self._waiting:
                    raise ValueError(f"{self._file.name}: {self._waiting[-1].name} was announced and never written")
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()
