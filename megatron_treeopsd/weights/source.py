"""Tensors of a Hugging Face folder, by name and slice, however it is stored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron_treeopsd.weights.extent import Extent, Files
from megatron_treeopsd.weights.rules import Shape, WeightsError, listing
from megatron_treeopsd.weights.safetensors_file import read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# transformers 5 keeps the experts of a layer in two tensors: gate_up_proj [E, 2 * inner, hidden] (gate rows first) and
# down_proj [E, hidden, inner].
_FUSED = re.compile(r"(?P<prefix>.*\.mlp\.experts)\.(?P<which>gate_up_proj|down_proj)$")


class TensorSource(Protocol):
    """Tensors under Hugging Face names (one expert per name), read slice by slice.

    Attributes:
        folder: where they are, for messages.
        files: which are read.
        shapes, dtypes: of every tensor there is.
    """

    folder: Path
    files: Files

    @property
    def shapes(self) -> dict[str, Shape]: ...

    @property
    def dtypes(self) -> dict[str, torch.dtype]: ...

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Rows (or columns, by `dim`) start:stop of a tensor, in new memory on the CPU, in the stored dtype."""
        ...

    def extents(self, name: str, start: int, stop: int) -> list[Extent] | None:
        """Where rows start:stop lie, one after the other; None if they do not lie in files in that form."""
        ...


class Source:
    """The tensors of a folder with one `model.safetensors`, or with shards and an index.

    Memory grows with the slices asked for, not with the files. Raises `WeightsError` for missing or damaged files and
    for an index that disagrees with them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = Files()
        self._extents: dict[str, Extent] = {}
        for file, expected in _files_of(folder).items():
            self.files.handle(file)
            found = read_header(file)
            if expected is not None and found.keys() != expected:
                raise WeightsError(
                    f"{folder / INDEX} and {file.name} disagree about these tensors:{listing(found.keys() ^ expected)}"
                )
            for name, extent in found.items():
                self._extents |= _experts(name, extent)

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: extent.shape for name, extent in self._extents.items()}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: extent.dtype for name, extent in self._extents.items()}

    def extents(self, name: str, start: int, stop: int) -> list[Extent]:
        return [self._extents[name].rows(start, stop)]

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        extent = self._extents[name]
        if dim == 0:
            extent = extent.rows(start, stop)
            part = torch.empty(extent.shape, dtype=extent.dtype)
            self.files.read(extent, part)
        else:
            part = torch.empty((extent.shape[0], stop - start), dtype=extent.dtype)
            self.files.read_columns(extent, start, stop, part)
        return part


def _experts(name: str, extent: Extent) -> dict[str, Extent]:
    """The tensor under its own name; of a fused one, each expert's part under the name that it has when alone."""
    fused = _FUSED.match(name)
    if fused is None or len(extent.shape) != 3:
        return {name: extent}
    projections = ("gate_proj", "up_proj") if fused["which"] == "gate_up_proj" else ("down_proj",)
    rows = extent.shape[1] // len(projections)
    return {
        f"{fused['prefix']}.{expert}.{projection}.weight": extent.row(expert).rows(i * rows, (i + 1) * rows)
        for expert in range(extent.shape[0])
        for i, projection in enumerate(projections)
    }


def _files_of(folder: Path) -> dict[Path, set[str] | None]:
    """Safetensors file -> the names that the index promises for it; None without an index."""
    if (folder / INDEX).is_file():
        try:
            weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
            promised: dict[Path, set[str]] = {}
            for name, file in weight_map.items():
                promised.setdefault(folder / file, set()).add(name)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{folder / INDEX}: not a safetensors index: {error!r}") from None
        if absent := [file.name for file in promised if not file.is_file()]:
            raise WeightsError(f"{folder}: the index names files that are missing:{listing(absent)}")
        return dict(promised)
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    raise WeightsError(f"{folder}: neither {SINGLE} nor {INDEX}; only safetensors checkpoints are read")
