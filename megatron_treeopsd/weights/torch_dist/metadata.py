"""`.metadata` of a `torch_dist` folder: which part of which tensor is where in which file.

The format is a pickle of torch's own classes. It is written by torch; it is read here without running anything that it
names: every class and function in it becomes an inert record.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from megatron_treeopsd.weights.rules import Shape, WeightsError

FILE = ".metadata"


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes `offset` .. `offset + length` of a file of the folder."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a global tensor, and where it is stored."""

    offsets: Shape
    sizes: Shape
    blob: Blob


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A global tensor."""

    dtype: torch.dtype
    shape: Shape
    chunks: list[Chunk]


# ------------------------------------------------------------------------------------------------------------ writing
class _Writer(FileSystemWriter):
    """torch's writer without what differs from run to run: the path and a random id."""

    def storage_meta(self) -> None:
        return None


def write(folder: Path, tensors: Mapping[str, StoredTensor], objects: Mapping[str, Blob]) -> None:
    """Write the folder's `.metadata`, synced. `objects` are pickled Python objects by key."""
    described: dict[str, Any] = {key: BytesStorageMetadata() for key in objects}
    places = [_result(MetadataIndex(key), blob) for key, blob in objects.items()]
    for key, tensor in tensors.items():
        described[key] = TensorStorageMetadata(
            properties=TensorProperties(dtype=tensor.dtype),
            size=torch.Size(tensor.shape),
            chunks=[ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks],
        )
        places += [_result(MetadataIndex(key, torch.Size(c.offsets)), c.blob) for c in tensor.chunks]
    _Writer(folder).finish(Metadata(described), [places])


def _result(index: MetadataIndex, blob: Blob) -> WriteResult:
    return WriteResult(index, blob.length, _StorageInfo(blob.file, blob.offset, blob.length))


# ------------------------------------------------------------------------------------------------------------ reading
def read(folder: Path) -> tuple[dict[str, StoredTensor], set[str]]:
    """Global tensors by key, and the keys of objects. Raises `WeightsError` if the file is missing or damaged."""
    path = folder / FILE
    try:
        with open(path, "rb") as handle:
            found = _Inert(handle).load().state
        described, places = found["state_dict_metadata"], _places(found["storage_data"])
        tensors = {
            key: _tensor(key, item, places) for key, item in described.items() if item.name == "TensorStorageMetadata"
        }
        return tensors, described.keys() - tensors.keys()
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read, so this is no complete torch_dist folder: {error}") from None
    except MALFORMED as error:
        raise WeightsError(f"{path}: damaged, or of another format: {error!r}") from None


MALFORMED = (
    pickle.UnpicklingError, EOFError, AttributeError, TypeError, LookupError, ValueError, OverflowError, MemoryError,
    ImportError, RuntimeError,
)  # fmt: skip
"""What reading a stream of other objects, or of garbage, runs into."""


class _Record:
    """Stands in for an object of any class: what it was built from, and nothing else."""

    name = ""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Inert(pickle.Unpickler):
    """Reads any pickle as records: no name in it is ever looked up, so nothing in it can be called."""

    def find_class(self, module: str, name: str) -> Any:
        return type("Record", (_Record,), {"name": name, "module": module})

    def persistent_load(self, _: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside of it")


def _places(storage: Mapping[Any, Any]) -> dict[tuple[str, Shape | None], Blob]:
    found = {}
    for index, info in storage.items():
        offset = index.state.get("offset")
        state = info.state
        if state.get("transform_descriptors"):
            raise ValueError("it holds transformed (compressed or encrypted) data")
        file = str(state["relative_path"])
        if Path(file).name != file:
            raise ValueError(f"it refers to {file}, outside of the folder")
        blob = Blob(file, int(state["offset"]), int(state["length"]))
        found[index.state["fqn"], None if offset is None else _size(offset)] = blob
    return found


def _tensor(key: str, item: Any, places: Mapping[tuple[str, Shape | None], Blob]) -> StoredTensor:
    properties = item.state["properties"].state
    dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    chunks = [(_size(c.state["offsets"]), _size(c.state["sizes"])) for c in item.state["chunks"]]
    return StoredTensor(
        _dtype(dtype.name),
        _size(item.state["size"]),
        [Chunk(offsets, sizes, places[key, offsets]) for offsets, sizes in chunks],
    )


def _size(record: Any) -> Shape:
    return tuple(int(length) for length in record.arguments[0])


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return found
