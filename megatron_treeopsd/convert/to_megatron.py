"""Hugging Face folder -> Megatron's distributed checkpoint, a little at a time."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path

import torch

from megatron_treeopsd.convert.cut import Cut
from megatron_treeopsd.convert.processes import Processes
from megatron_treeopsd.convert.rows import BLOCK_BYTES, RowCopier
from megatron_treeopsd.convert.side_by_side import balanced, files_for, side_by_side
from megatron_treeopsd.convert.watch import Watch, gigabytes
from megatron_treeopsd.weights import durable
from megatron_treeopsd.weights.extent import bytes_of
from megatron_treeopsd.weights.families import read_config, weights_of
from megatron_treeopsd.weights.folder import copy_companions
from megatron_treeopsd.weights.load import HEAD, check_head, check_names
from megatron_treeopsd.weights.output import Output
from megatron_treeopsd.weights.rules import WeightsError, listing
from megatron_treeopsd.weights.source import Source
from megatron_treeopsd.weights.torch_dist.blob import envelope
from megatron_treeopsd.weights.torch_dist.grid import Region, Slot, pieces, segments, slots
from megatron_treeopsd.weights.torch_dist.source import TRACKER, TorchDistSource
from megatron_treeopsd.weights.torch_dist.writer import PieceWriter, Record, complete, start_of
from megatron_treeopsd.weights.writer import TensorInfo, row_blocks

PIECE_BYTES = 64 * 2**20
"""Largest piece of a tensor in the files, which Megatron reads as a whole to get any part of it."""
VOCABULARY_MULTIPLE = 128
"""Megatron pads vocabularies to a multiple of this times the tensor parallel size, unless told otherwise."""
NAME = "release"
Target = tuple[Region, Output, int]
"""A piece, the file that it goes to, and where its bytes start there."""


class ToMegatron:
    """One conversion, checked as far as it can be without reading tensors.

    Attributes:
        source: what is read.
        tensors: all of it, with the dtypes that are written.
        places, dtypes: where each weight lies among the global tensors, and what it is stored as.
        parts: of `places`, of about equal size, each the work of one thread; which one a place belongs to.
        cut: the layout.
    """

    def __init__(
        self, folder: Path, *, dtype: torch.dtype | None, tp: int = 1, ep: int = 1, etp: int = 1, pp: int = 1
    ) -> None:
        """dtype: of all tensors; None leaves each as it is.

        Raises `WeightsError` for a folder that is no whole checkpoint of a known architecture, a layout that does not
        divide the model, and tensors of different dtypes that become one.
        """
        self.folder = folder
        self.hf_config = read_config(folder)
        weights = weights_of(self.hf_config)
        self.source = Source(folder)
        self._redundant_head = check_names(self.source, weights)
        self.cut = Cut.of(weights, tp=tp, ep=ep, etp=etp, pp=pp)
        self.places = slots(weights, vocabulary_multiple=VOCABULARY_MULTIPLE * tp)
        stored = self.source.dtypes
        self.tensors = [
            TensorInfo(name, shape, dtype or stored[name])
            for weight in weights
            for name, shape in zip(weight.hf, weight.shapes, strict=True)
        ]
        self.dtypes = self._dtypes(dtype)
        self.parts = self._parts()

    def _dtypes(self, dtype: torch.dtype | None) -> list[torch.dtype]:
        stored = self.source.dtypes
        wanted = [{dtype or stored[name] for name in place.weight.hf} for place in self.places]
        by_key: dict[str, set[torch.dtype]] = {}
        for place, found in zip(self.places, wanted, strict=True):
            by_key.setdefault(place.keys[0], set()).update(found)
        if mixed := [f"{key}: {sorted(map(str, found))}" for key, found in by_key.items() if len(found) > 1]:
            raise WeightsError(
                f"{self.folder}: these become one tensor in Megatron, but their parts are of different dtypes; "
                f"choose one with --dtype:{listing(mixed)}"
            )
        return [next(iter(found)) for found in wanted]

    def _pieces(self, place: Slot, dtype: torch.dtype) -> Iterator[tuple[int, Region]]:
        """(rank, rectangle) of everything that is written of a weight."""
        for part, region in pieces(place, self.cut.size(place.weight), dtype.itemsize, PIECE_BYTES):
            yield self.cut.rank(place.weight, part), region

    def _parts(self) -> list[int]:
        sizes = [math.prod(place.shape[len(place.lead) :]) * dtype.itemsize for place, dtype in self._typed_places]
        return balanced(sizes, files_for(sum(sizes)))

    @property
    def _typed_places(self) -> Iterator[tuple[Slot, torch.dtype]]:
        return zip(self.places, self.dtypes, strict=True)

    @cached_property
    def bytes_by_file(self) -> dict[tuple[int, int], int]:
        """(rank, part) -> bytes of its file."""
        found: Counter[tuple[int, int]] = Counter()
        for (place, dtype), part in zip(self._typed_places, self.parts, strict=True):
            for rank, region in self._pieces(place, dtype):
                around = envelope(dtype, place.box(region)[1])
                found[rank, part] = start_of(found[rank, part], around) + around.length
        return dict(found)

    @property
    def bytes_by_rank(self) -> dict[int, int]:
        """Rank -> bytes of its files."""
        found: Counter[int] = Counter()
        for (rank, _), nbytes in self.bytes_by_file.items():
            found[rank] += nbytes
        return dict(found)

    @property
    def nbytes(self) -> int:
        return sum(self.bytes_by_file.values())

    def describe(self) -> Iterator[tuple[str, str]]:
        """(what, which) for people."""
        padded = next(place for place in self.places if place.weight.vocabulary)
        yield "family", f"{self.hf_config.model_type} ({', '.join(self.hf_config.architectures or [])})"
        yield "layout", str(self.cut)
        yield "vocabulary", f"{padded.weight.shapes[0][0]} rows, padded with zeros to {padded.rows}"
        names = {key for place in self.places for key in place.keys[:1]}
        yield "tensors", f"{len(self.tensors)} -> {len(self.places)} weights of Megatron in {len(names)} global tensors"
        yield "bytes", f"{gigabytes(self.nbytes)}, {', '.join(sorted({str(dtype)[6:] for dtype in self.dtypes}))}"
        ranks = sorted(self.bytes_by_rank.items())
        shown = [f"{rank}: {gigabytes(count)}" for rank, count in ranks[:16]]
        yield "by rank", ", ".join(shown) + (f", ... ({len(ranks)} ranks)" if len(ranks) > 16 else "")

    def share_bytes(self, here: Processes) -> int:
        """Bytes that this process writes."""
        return sum(self.bytes_by_file[file] for file in self._mine(here))

    def _mine(self, here: Processes) -> list[tuple[int, int]]:
        """The files, (rank, part), that this process writes."""
        return [file for number, file in enumerate(sorted(self.bytes_by_file)) if here.mine(number)]

    def check_contents(self, here: Processes) -> None:
        """What has to be read to be checked. Collective."""

        def check() -> None:
            head = TensorInfo(HEAD, self.source.shapes[HEAD], self.source.dtypes[HEAD])
            for start, stop in row_blocks(head, BLOCK_BYTES):
                check_head(self.source, start, stop)

        if self._redundant_head:
            here.on_first(check)

    def write(self, folder: Path, here: Processes, watch: Watch) -> None:
        """Fill an empty folder. Collective: each process writes its share of the files.

        The bytes do not depend on the number of processes.
        """
        target = folder / NAME
        parts = 1 + max(self.parts)
        mine = self._mine(here)

        def write_part(part: int) -> list[Record]:
            sizes = {rank: self.bytes_by_file[rank, of] for rank, of in mine if of == part}
            with PieceWriter(target, part, sizes) as writer:
                self._write_pieces(part, writer, RowCopier(self.source, watch))
            return writer.records

        def write_mine() -> list[Record]:
            written = side_by_side([partial(write_part, part) for part in sorted({part for _, part in mine})], watch)
            return [record for found in written for record in found]

        def finish() -> None:
            complete(target, self.places, [record for found in records for record in found], parts=parts)
            (folder / TRACKER).write_text(f"{NAME}\n")
            copy_companions(self.folder, folder, self.dtypes[0])
            durable.sync(folder)

        here.on_first(target.mkdir)
        records = here.together(write_mine)
        here.on_first(finish)

    def _write_pieces(self, part: int, writer: PieceWriter, copier: RowCopier) -> None:
        for (place, dtype), of in zip(self._typed_places, self.parts, strict=True):
            if of != part:
                continue
            mine = [(rank, piece) for rank, piece in self._pieces(place, dtype) if rank in writer.ranks]
            by_columns = place.weight.split == 1 and self.cut.size(place.weight) > 1
            for _, group in itertools.groupby(mine, key=lambda part: part[1].rows if by_columns else part):
                targets = [(piece, *writer.place(rank, place, piece, dtype)) for rank, piece in group]
                (_copy_columns if by_columns else _copy_rows)(place, dtype, targets, copier)

    def read_back(self, folder: Path) -> TorchDistSource:
        return TorchDistSource(folder / NAME, self.hf_config)

    def sides(self, folder: Path) -> tuple[Path, Path]:
        """The Hugging Face folder and the Megatron folder."""
        return self.folder, folder


def _copy_rows(place: Slot, dtype: torch.dtype, targets: Sequence[Target], copier: RowCopier) -> None:
    """A piece that has all columns: whole rows of Hugging Face tensors, one after the other, then padding."""
    ((piece, file, data),) = targets
    row_bytes = place.whole.columns[1] * dtype.itemsize
    end = data + (piece.rows[1] - piece.rows[0]) * row_bytes
    for name, start, stop in segments(place, piece.rows):
        copier.copy(name, (start, stop), dtype, partial(_write, file, data))
        data += (stop - start) * row_bytes
    file.write_at(data, bytes(end - data))


def _write(file: Output, base: int, at: int, data: memoryview) -> None:
    file.write_at(base + at, data)


def _copy_columns(place: Slot, dtype: torch.dtype, targets: Sequence[Target], copier: RowCopier) -> None:
    """Pieces of some columns each, of the same rows, which are read a block at a time for all of them."""
    row_bytes = place.whole.columns[1] * dtype.itemsize
    step = max(1, BLOCK_BYTES // row_bytes)
    first, last = targets[0][0].rows
    for start in range(first, last, step):
        for piece, file, data in targets:
            rows = Region((start, min(start + step, last)), piece.columns)
            width = piece.columns[1] - piece.columns[0]
            file.write_at(data + (start - first) * width * dtype.itemsize, bytes_of(copier.fill(place, rows, dtype)))
