"""Reading a `torch_dist` checkpoint, whatever layout wrote it, as Hugging Face tensors."""

from __future__ import annotations

import itertools
import math
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_treeopsd.weights.extent import Extent, Files
from megatron_treeopsd.weights.families import weights_of
from megatron_treeopsd.weights.rules import Shape, WeightsError, listing
from megatron_treeopsd.weights.torch_dist import blob, metadata
from megatron_treeopsd.weights.torch_dist.grid import Region, Slot, alternatives, runs

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TRACKER = "latest_checkpointed_iteration.txt"
_OTHERS = re.compile(
    r"(chained_\d+\.)?(optimizer|rng_state|rerun_state_machine_state|opt_param_scheduler|common_state)\b"
)
"""What training checkpoints hold besides the model. With expert parallelism there are two optimizers, chained."""


def find_checkpoint(folder: Path) -> Path | None:
    """The `torch_dist` folder that `folder` is, or that its tracker file names; None if it is neither.

    Raises `WeightsError` if the tracker file names a folder that is not complete.
    """
    if (folder / metadata.FILE).is_file():
        return folder
    if not (folder / TRACKER).is_file():
        return None
    name = (folder / TRACKER).read_text().strip()
    named = folder / (f"iter_{int(name):07d}" if name.isdecimal() else "release")
    if not (named / metadata.FILE).is_file():
        raise WeightsError(f"{folder / TRACKER} says {name!r}, but there is no complete checkpoint in {named}")
    return named


@dataclass(frozen=True, slots=True)
class _Part:
    """A rectangle of a weight: `skip` elements into the tensor of shape `shape` that a blob holds."""

    region: Region
    blob: metadata.Blob
    shape: Shape
    skip: int


@dataclass(frozen=True, slots=True)
class _Found:
    """Where a Hugging Face tensor is: the `hf`-th of a slot, in the global tensor `key`."""

    slot: Slot
    hf: int
    key: str


class TorchDistSource:
    """A `TensorSource` over a `torch_dist` folder of a model of shape `hf_config`.

    Raises `WeightsError` listing names without a place in the model, shapes that contradict the configuration, tensors
    of which parts are missing, and files that are too short. (What is missing altogether is missing in `shapes`.)
    """

    def __init__(self, folder: Path, hf_config: PreTrainedConfig) -> None:
        self.folder = folder
        self._stored, objects = metadata.read(folder)
        self.files = Files()
        self._extents: dict[metadata.Blob, Extent | None] = {}
        self._last = threading.local()  # each thread reads slices of another tensor
        self._parts: dict[str, dict[Shape, list[_Part]]] = {}
        self._found = self._find(hf_config)
        self._check(objects)

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: found.slot.weight.shapes[found.hf] for name, found in self._found.items()}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: self._stored[found.key].dtype for name, found in self._found.items()}

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        found = self._found[name]
        shape = list(found.slot.weight.shapes[found.hf])
        columns = found.slot.whole.columns
        if dim == 1:
            first, last, columns = 0, shape[0], (start, stop)
        else:
            first, last = start, stop
        shape[dim] = stop - start
        matrix = torch.empty((last - first, columns[1] - columns[0]), dtype=self._stored[found.key].dtype)
        for run in runs(found.slot.weight):
            low, high = max(run.start, first), min(run.start + run.rows, last)
            if run.hf == found.hf and low < high:
                at = run.at - run.start
                self._fill(found, Region((low + at, high + at), columns), matrix[low - first : high - first])
        return matrix.view(shape)

    def extents(self, name: str, start: int, stop: int) -> list[Extent] | None:
        found = self._found[name]
        columns = found.slot.whole.columns
        located: list[Extent] = []
        for run in runs(found.slot.weight):
            low, high = max(run.start, start), min(run.start + run.rows, stop)
            if run.hf != found.hf or low >= high:
                continue
            at, end = low + run.at - run.start, high + run.at - run.start
            for part in sorted(self._parts_of(found), key=lambda part: part.region.rows):
                common = part.region.meet(Region((at, end), columns))
                if common.empty:
                    continue
                extent = self._locate(part, self._stored[found.key].dtype)
                if extent is None or common.columns != columns or common.rows[0] != at:
                    return None
                rows = common.within(part.region)[0]
                located.append(extent.rows(rows.start, rows.stop))
                at = common.rows[1]
            if at != end:
                return None
        return located

    def padding(self, name: str) -> Tensor:
        """The rows behind the vocabulary that pad a tensor, [0, columns] if there are none."""
        found = self._found[name]
        first, last = found.slot.rows, self._stored[found.key].shape[len(found.slot.lead)]
        if first == last:
            return torch.empty((0, found.slot.whole.columns[1]))
        matrix = torch.empty((last - first, found.slot.whole.columns[1]), dtype=self._stored[found.key].dtype)
        self._fill(found, Region((first, last), found.slot.whole.columns), matrix)
        return matrix

    # ---------------------------------------------------------------------------------------------------- what there is
    def _find(self, hf_config: PreTrainedConfig) -> dict[str, _Found]:
        weights = weights_of(hf_config)
        layers = 1 + max((weight.layer for weight in weights if isinstance(weight.layer, int)), default=-1)
        experts = 1 + max((weight.expert for weight in weights if weight.expert is not None), default=-1)
        found: dict[str, _Found] = {}
        for weight in weights:
            for slots in alternatives(weight, layers=layers, experts=experts):
                keys = [next((key for key in slot.keys if key in self._stored), None) for slot in slots]
                if None not in keys:
                    for slot, key in zip(slots, keys, strict=True):
                        assert key is not None
                        found |= {name: _Found(slot, i, key) for i, name in enumerate(slot.weight.hf)}
                    break
        return found

    def _check(self, objects: set[str]) -> None:
        known = {key for found in self._found.values() for key in found.slot.keys}
        used = {found.key: found.slot for found in self._found.values()}
        unknown = [key for key in self._stored if key not in known and not _OTHERS.match(key)]
        unknown += [key for key in objects if "_extra_state" not in key and not _OTHERS.match(key)]
        misshaped: list[str] = []
        incomplete: list[str] = []
        ends: dict[str, int] = {}
        for key, slot in used.items():
            stored = self._stored[key]
            rows = len(slot.lead)
            fits = stored.shape[rows] >= slot.rows if slot.weight.vocabulary else stored.shape == slot.shape
            if len(stored.shape) != len(slot.shape) or not fits:
                misshaped.append(f"{key}: {stored.shape} in the checkpoint, {slot.shape} by config.json")
            elif sum(math.prod(chunk.sizes) for chunk in stored.chunks) != math.prod(stored.shape):
                incomplete.append(key)
            for chunk in stored.chunks:
                end = chunk.blob.offset + chunk.blob.length
                ends[chunk.blob.file] = max(end, ends.get(chunk.blob.file, 0))
        files = {file: self.folder / file for file in ends}
        short = [file for file, path in files.items() if not path.is_file() or path.stat().st_size < ends[file]]
        problems = [
            ("weights that no rule of the name map uses", unknown),
            ("shapes contradict config.json", misshaped),
            ("parts of these tensors are missing", incomplete),
            ("these files are missing or too short", short),
        ]
        if text := "\n".join(f"{what}:{listing(names)}" for what, names in problems if names):
            raise WeightsError(f"{self.folder}: {text}")
        for path in files.values():
            self.files.handle(path)

    # ----------------------------------------------------------------------------------------------------- where it is
    def _fill(self, found: _Found, region: Region, into: Tensor) -> None:
        """Copy a region of a weight into a matrix of its size."""
        for part in self._parts_of(found):
            common = part.region.meet(region)
            if not common.empty:
                self._copy(part, common, into[common.within(region)], self._stored[found.key].dtype)

    def _parts_of(self, found: _Found) -> list[_Part]:
        if found.key not in self._parts:
            self._parts[found.key] = self._index(found.key, len(found.slot.lead))
        return self._parts[found.key].get(found.slot.lead, [])

    def _index(self, key: str, lead: int) -> dict[Shape, list[_Part]]:
        """(layer, expert) -> the parts of that weight."""
        parts: dict[Shape, list[_Part]] = {}
        for chunk in self._stored[key].chunks:
            row, height = chunk.offsets[lead], chunk.sizes[lead]
            column, width = (*chunk.offsets, 0)[lead + 1], (*chunk.sizes, 1)[lead + 1]
            region = Region((row, row + height), (column, column + width))
            boxes = itertools.product(*(range(size) for size in chunk.sizes[:lead]))
            for number, box in enumerate(boxes):
                where = tuple(start + i for start, i in zip(chunk.offsets, box, strict=False))
                parts.setdefault(where, []).append(_Part(region, chunk.blob, chunk.sizes, number * height * width))
        return parts

    def _copy(self, part: _Part, region: Region, into: Tensor, dtype: torch.dtype) -> None:
        rows, columns = region.within(part.region)
        extent = self._locate(part, dtype)
        if extent is not None:
            rows_only = extent.rows(rows.start, rows.stop)
            self.files.read_columns(rows_only, columns.start, columns.stop, into)
            return
        held: tuple[metadata.Blob, Tensor] | None = getattr(self._last, "held", None)  # for the slices that come next
        if held is None or held[0] != part.blob:
            path = self.folder / part.blob.file
            held = self._last.held = (
                part.blob,
                blob.load_whole(self.files, path, part.blob.offset, part.blob.length, dtype, part.shape),
            )
        size = _size(part.region)
        whole = held[1].reshape(-1)[part.skip : part.skip + math.prod(size)].view(size)
        into.copy_(whole[rows, columns])

    def _locate(self, part: _Part, dtype: torch.dtype) -> Extent | None:
        """The part's matrix in its file; None if it is stored in a form that only torch knows."""
        path = self.folder / part.blob.file
        if part.blob not in self._extents:
            self._extents[part.blob] = blob.locate(
                self.files, path, part.blob.offset, part.blob.length, dtype, part.shape
            )
        extent = self._extents[part.blob]
        if extent is None:
            return None
        return Extent(path, extent.offset + part.skip * dtype.itemsize, _size(part.region), dtype)


def _size(region: Region) -> tuple[int, int]:
    return region.rows[1] - region.rows[0], region.columns[1] - region.columns[0]
