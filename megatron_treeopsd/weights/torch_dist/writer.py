"""Writing a `torch_dist` folder piece by piece, by one process or by several side by side."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from torch import Tensor

from megatron_treeopsd.weights import durable
from megatron_treeopsd.weights.extent import bytes_of
from megatron_treeopsd.weights.rules import Shape
from megatron_treeopsd.weights.torch_dist import metadata
from megatron_treeopsd.weights.torch_dist.blob import envelope
from megatron_treeopsd.weights.torch_dist.grid import Region, Slot
from megatron_treeopsd.weights.torch_dist.metadata import Blob, Chunk, StoredTensor

COMMON = {"iteration": 0, "checkpoint_version": 3.0, "content_metadata": {"singleton_local_shards": False}}
"""What Megatron asks of a checkpoint besides tensors: no training has been done, rows of query, key and value are
interleaved by group, and which form the keys have."""


@dataclass(frozen=True, slots=True)
class Record:
    """A piece that was written: part of these global tensors."""

    keys: tuple[str, ...]
    dtype: torch.dtype
    shape: Shape
    chunk: Chunk


def length_of(dtype: torch.dtype, place: Slot, region: Region) -> int:
    """Bytes that a piece takes in a file."""
    return envelope(dtype, place.box(region)[1]).length


class PieceWriter:
    """The files of some ranks of a layout, each written front to back and synced at the end. Use as a context manager.

    What it wrote is in `records`, to be handed to `complete`.
    """

    def __init__(self, folder: Path) -> None:
        self.records: list[Record] = []
        self._folder = folder
        self._files: dict[int, BinaryIO] = {}

    def write(self, rank: int, place: Slot, region: Region, matrix: Tensor) -> None:
        """Append a contiguous piece to the file of `rank`."""
        name = f"__{rank}_0.distcp"
        if rank not in self._files:
            self._files[rank] = open(self._folder / name, "wb")  # noqa: SIM115 (closed by __exit__)
        file = self._files[rank]
        offsets, sizes = place.box(region)
        around = envelope(matrix.dtype, sizes)
        blob = Blob(name, file.tell(), around.length)
        file.write(around.head)
        file.write(bytes_of(matrix))
        file.write(around.tail)
        self.records.append(Record(place.keys, matrix.dtype, place.shape, Chunk(offsets, sizes, blob)))

    def __enter__(self) -> PieceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        try:
            if kind is None:
                for file in self._files.values():
                    file.flush()
                    os.fsync(file.fileno())
        finally:
            for file in self._files.values():
                file.close()


def complete(folder: Path, places: Sequence[Slot], records: Iterable[Record]) -> None:
    """Make the pieces of all processes a checkpoint; `.metadata`, without which nothing loads it, comes last."""
    tensors: dict[str, StoredTensor] = {}
    for record in sorted(records, key=lambda record: (record.keys, record.chunk.offsets)):
        for key in record.keys:
            stored = tensors.setdefault(key, StoredTensor(record.dtype, record.shape, []))
            stored.chunks.append(record.chunk)
    objects = _write_objects(folder, places)
    torch.save(COMMON, folder / "common.pt")  # where Megatron before 0.19 looks for it
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    for name in ("common.pt", "metadata.json"):
        durable.sync(folder / name)
    metadata.write(folder, tensors, objects)
    durable.sync(folder)


def _write_objects(folder: Path, places: Sequence[Slot]) -> dict[str, Blob]:
    """The objects that Megatron asks for, by key; equal ones share their bytes."""
    name = "__0_1.distcp"
    objects: dict[str, Blob] = {}
    contents: list[tuple[list[str], object]] = [(["common_state/shard_0_1"], COMMON), (list(extra_states(places)), None)]
    with open(folder / name, "wb") as file:
        for keys, value in contents:
            pickled = io.BytesIO()
            torch.save([value], pickled)
            objects |= dict.fromkeys(keys, Blob(name, file.tell(), pickled.tell()))
            file.write(pickled.getvalue())
        file.flush()
        os.fsync(file.fileno())
    return objects


def extra_states(places: Sequence[Slot]) -> Iterator[str]:
    """Keys of the state that modules of either layer spec ask for besides weights; it is empty without 8-bit floats."""
    for place in places:
        where = ".".join(map(str, place.lead)) or "0"
        of = ".".join(map(str, place.lead_shape)) or "1"
        for key in place.keys:
            module = key.removesuffix(".weight").removesuffix(".layer_norm_weight")
            if not place.weight.vocabulary and not module.endswith(".router"):
                yield f"{module}._extra_state/shard_{where}_{of}"
            if module.endswith(".self_attention.linear_proj"):
                yield f"{module.removesuffix('linear_proj')}core_attention._extra_state/shard_{where}_{of}"
