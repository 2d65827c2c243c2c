"""Reading slices of a Hugging Face folder's safetensors under per-expert names, whichever way it is stored."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_treeopsd.weights.rules import Shape, WeightsError, listing

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# transformers 5 keeps the experts of a layer in two tensors: gate_up_proj [E, 2 * inner, hidden] (gate rows first) and
# down_proj [E, hidden, inner].
_FUSED = re.compile(r"(?P<prefix>.*\.mlp\.experts)\.(?P<which>gate_up_proj|down_proj)$")


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor, or the part of a fused one that belongs to one expert."""

    file: Path
    stored: str
    shape: Shape
    dtype: str
    expert: int | None = None
    first_row: int = 0


class Source:
    """The tensors of a folder with one `model.safetensors`, or with shards and an index.

    Files are mapped, not read: memory grows with the slices asked for. Raises `WeightsError` for missing or damaged
    files and for an index that disagrees with them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[Path, Any] = {}
        self._views: dict[str, _View] = {}
        for file, expected in _files_of(folder).items():
            handle = self._open(file)
            names = set(handle.keys())
            if expected is not None and names != expected:
                raise WeightsError(
                    f"{folder / INDEX} and {file.name} disagree about these tensors:{listing(names ^ expected)}"
                )
            for name in names:
                piece = handle.get_slice(name)
                self._add(file, name, tuple(piece.get_shape()), piece.get_dtype())

    @property
    def shapes(self) -> dict[str, Shape]:
        """Name -> shape of every tensor, experts under names of their own."""
        return {name: view.shape for name, view in self._views.items()}

    @property
    def dtypes(self) -> dict[str, str]:
        """Name -> dtype as safetensors writes it ("F32", "BF16", ...)."""
        return {name: view.dtype for name, view in self._views.items()}

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Rows (or columns, by `dim`) start:stop of a tensor, on the CPU, in the stored dtype."""
        view = self._views[name]
        index = [slice(0, length) for length in view.shape]
        index[dim] = slice(start, stop)
        index[0] = slice(view.first_row + index[0].start, view.first_row + index[0].stop)
        where = tuple(index) if view.expert is None else (view.expert, *index)
        try:
            return self._open(view.file).get_slice(view.stored)[where]
        except SafetensorError as error:
            raise WeightsError(f"{view.file}: cannot read {view.stored}{list(where)}: {error}") from None

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{file}: not a readable safetensors file: {error}") from None
        return self._files[file]

    def _add(self, file: Path, name: str, shape: Shape, dtype: str) -> None:
        fused = _FUSED.match(name)
        if fused is None or len(shape) != 3:
            self._views[name] = _View(file, name, shape, dtype)
            return
        rows = shape[1] // 2 if fused["which"] == "gate_up_proj" else shape[1]
        projections = ("gate_proj", "up_proj") if fused["which"] == "gate_up_proj" else ("down_proj",)
        for expert in range(shape[0]):
            for i, projection in enumerate(projections):
                self._views[f"{fused['prefix']}.{expert}.{projection}.weight"] = _View(
                    file, name, (rows, shape[2]), dtype, expert, i * rows
                )


def _files_of(folder: Path) -> dict[Path, set[str] | None]:
    """Safetensors file -> the names that the index promises for it; None without an index."""
    if (folder / INDEX).is_file():
        try:
            weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise WeightsError(f"{folder / INDEX}: not a safetensors index: {error!r}") from None
        promised: dict[Path, set[str]] = {}
        for name, file in weight_map.items():
            promised.setdefault(folder / file, set()).add(name)
        if absent := [file.name for file in promised if not file.is_file()]:
            raise WeightsError(f"{folder}: the index names files that are missing:{listing(absent)}")
        return dict(promised)
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    raise WeightsError(f"{folder}: neither {SINGLE} nor {INDEX}; only safetensors checkpoints are read")
