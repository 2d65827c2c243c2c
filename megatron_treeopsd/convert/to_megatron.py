"""Hugging Face folder -> Megatron's distributed checkpoint, a block of rows at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import torch

from megatron_treeopsd.convert.cut import Cut
from megatron_treeopsd.convert.processes import Processes
from megatron_treeopsd.convert.watch import Watch
from megatron_treeopsd.weights import durable
from megatron_treeopsd.weights.folder import copy_companions
from megatron_treeopsd.weights.rules import Weight, WeightsError, listing
from megatron_treeopsd.weights.source import TensorSource
from megatron_treeopsd.weights.torch_dist.grid import Region, Slot, fill, pieces, slots
from megatron_treeopsd.weights.torch_dist.source import TRACKER
from megatron_treeopsd.weights.torch_dist.writer import PieceWriter, Record, complete, length_of

BLOCK_BYTES = 64 * 2**20
"""Largest piece of a tensor, in memory and in the files (single rows may be larger)."""
VOCABULARY_MULTIPLE = 128
"""Megatron pads vocabularies to a multiple of this times the tensor parallel size, unless told otherwise."""
NAME = "release"


class MegatronPlan:
    """What is going to be written: every piece of every weight, and whose it is.

    Attributes:
        places: where each weight lies among the global tensors.
        dtypes: what each weight is stored as.
        cut: the layout.
    """

    def __init__(self, source: TensorSource, weights: Sequence[Weight], cut: Cut, dtype: torch.dtype | None) -> None:
        """dtype: of all tensors; None leaves each as it is.

        Raises `WeightsError` if tensors that become one are of different dtypes.
        """
        self.cut = cut
        self.places = slots(weights, vocabulary_multiple=VOCABULARY_MULTIPLE * cut.tp)
        stored = source.dtypes
        wanted = [{dtype or stored[name] for name in weight.hf} for weight in weights]
        by_key: dict[str, set[torch.dtype]] = {}
        for place, found in zip(self.places, wanted, strict=True):
            by_key.setdefault(place.keys[0], set()).update(found)
        if mixed := [f"{key}: {sorted(map(str, found))}" for key, found in by_key.items() if len(found) > 1]:
            raise WeightsError(
                f"{source.folder}: these become one tensor in Megatron, but their parts are of different dtypes; "
                f"choose one with --dtype:{listing(mixed)}"
            )
        self.dtypes = [next(iter(found)) for found in wanted]

    def pieces(self) -> Iterator[tuple[int, Slot, torch.dtype, Region]]:
        """(rank, weight, dtype, rectangle), in the order of a forward pass."""
        for place, dtype in zip(self.places, self.dtypes, strict=True):
            for part, region in pieces(place, self.cut.size(place.weight), dtype.itemsize, BLOCK_BYTES):
                yield self.cut.rank(place.weight, part), place, dtype, region

    @cached_property
    def bytes_by_rank(self) -> dict[int, int]:
        """Rank -> bytes of its file."""
        found: Counter[int] = Counter(dict.fromkeys(range(self.cut.ranks), 0))
        for rank, place, dtype, region in self.pieces():
            found[rank] += length_of(dtype, place, region)
        return dict(found)

    @property
    def nbytes(self) -> int:
        return sum(self.bytes_by_rank.values())


def write(plan: MegatronPlan, source: TensorSource, folder: Path, here: Processes, watch: Watch) -> None:
    """Fill an empty folder. Collective: each process writes the files of its share of the ranks.

    The bytes do not depend on the number of processes.
    """
    target = folder / NAME

    def read(name: str, start: int, stop: int) -> torch.Tensor:
        return source.read(name, 0, start, stop)

    def write_mine() -> list[Record]:
        with PieceWriter(target) as writer:
            for rank, place, dtype, region in plan.pieces():
                if here.mine(rank):
                    matrix = fill(place, region, read, dtype)
                    watch.inspect(" + ".join(place.weight.hf), matrix)
                    writer.write(rank, place, region, matrix)
                    watch.saw(length_of(dtype, place, region))
        return writer.records

    def finish() -> None:
        complete(target, plan.places, [record for part in records for record in part])
        (folder / TRACKER).write_text(f"{NAME}\n")
        copy_companions(source.folder, folder, plan.dtypes[0])
        durable.sync(folder)

    here.on_first(target.mkdir)
    records = here.together(write_mine)
    here.on_first(finish)
