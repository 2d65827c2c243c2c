"""Writing a `torch_dist` folder piece by piece, by one process or by several side by side."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from megatron_treeopsd.weights import durable
from megatron_treeopsd.weights.output import PAGE_BYTES, Output
from megatron_treeopsd.weights.rules import Shape
from megatron_treeopsd.weights.torch_dist import metadata
from megatron_treeopsd.weights.torch_dist.blob import Envelope, envelope
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


def start_of(end: int, around: Envelope) -> int:
    """Where a piece starts in a file that goes up to `end`: where its tensor's bytes then start with a page."""
    return end + -(end + len(around.head)) % PAGE_BYTES


class PieceWriter:
    """The `part`-th files of some ranks of a layout, synced at the end. Use as a context manager.

    Room for a piece is made by `place`, in the order of the file; its bytes may come at any time.

    Attributes:
        ranks: whose files they are.
        records: what has a place, to be handed to `complete`.
    """

    def __init__(self, folder: Path, part: int, sizes: Mapping[int, int]) -> None:
        """sizes: rank -> bytes of its file, when each piece is where `start_of` puts it."""
        self.records: list[Record] = []
        self.ranks = sizes.keys()
        self._folder, self._part = folder, part
        self._sizes = sizes
        self._files: dict[int, Output] = {}
        self._ends: dict[int, int] = {}

    def place(self, rank: int, slot: Slot, piece: Region, dtype: torch.dtype) -> tuple[Output, int]:
        """Room for a piece in the file of `rank`: the file, and where the piece's bytes go."""
        name = _name(rank, self._part)
        if rank not in self._files:
            self._files[rank] = Output(self._folder / name, self._sizes[rank])
        file, end = self._files[rank], self._ends.get(rank, 0)
        offsets, sizes = slot.box(piece)
        around = envelope(dtype, sizes)
        start = start_of(end, around)
        data = start + len(around.head)
        file.write_at(start, around.head)
        file.write_at(data + around.nbytes, around.tail)
        self._ends[rank] = start + around.length
        chunk = Chunk(offsets, sizes, Blob(name, start, around.length))
        self.records.append(Record(slot.keys, dtype, slot.shape, chunk))
        return file, data

    def __enter__(self) -> PieceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        with ExitStack() as stack:
            for file in self._files.values():
                stack.callback(file.close)
            if kind is None:
                assert self._sizes == self._ends, (self._sizes, self._ends)
                for file in self._files.values():
                    file.finish()


def _name(rank: int, part: int) -> str:
    return f"__{rank}_{part}.distcp"


def complete(folder: Path, places: Sequence[Slot], records: Iterable[Record], *, parts: int) -> None:
    """Make the pieces of all processes, in `parts` files of a rank, a checkpoint.

    `.metadata`, without which nothing loads it, comes last.
    """
    tensors: dict[str, StoredTensor] = {}
    for record in sorted(records, key=lambda record: (record.keys, record.chunk.offsets)):
        for key in record.keys:
            stored = tensors.setdefault(key, StoredTensor(record.dtype, record.shape, []))
            stored.chunks.append(record.chunk)
    objects = _write_objects(folder, places, _name(0, parts))
    (folder / "common.pt").write_bytes(_pickled(COMMON))  # where Megatron before 0.19 looks for it
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    for name in ("common.pt", "metadata.json"):
        durable.sync(folder / name)
    metadata.write(folder, tensors, objects)
    durable.sync(folder)


def _write_objects(folder: Path, places: Sequence[Slot], name: str) -> dict[str, Blob]:
    """The objects that Megatron asks for, by key; equal ones share their bytes."""
    objects: dict[str, Blob] = {}
    contents: list[tuple[list[str], object]] = [
        (["common_state/shard_0_1"], COMMON),
        (list(extra_states(places)), None),
    ]
    with open(folder / name, "wb") as file:
        for keys, value in contents:
            pickled = _pickled([value])
            objects |= dict.fromkeys(keys, Blob(name, file.tell(), len(pickled)))
            file.write(pickled)
        file.flush()
        os.fsync(file.fileno())
    return objects


def _pickled(value: object) -> bytes:
    """As `torch.save` stores it. Into memory: a full disk is no `OSError` where torch writes a file by itself."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


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
