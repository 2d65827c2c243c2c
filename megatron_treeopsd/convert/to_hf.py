"""Megatron's distributed checkpoint, whatever layout wrote it -> Hugging Face folder, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_treeopsd.convert.processes import Processes
from megatron_treeopsd.convert.to_megatron import BLOCK_BYTES
from megatron_treeopsd.convert.watch import Watch
from megatron_treeopsd.weights.folder import complete, divide
from megatron_treeopsd.weights.rules import Weight
from megatron_treeopsd.weights.source import TensorSource
from megatron_treeopsd.weights.writer import SafetensorsWriter, TensorInfo


class HuggingFacePlan:
    """What is going to be written: file -> its tensors, in order."""

    def __init__(
        self, source: TensorSource, weights: Sequence[Weight], dtype: torch.dtype | None, shard_bytes: int
    ) -> None:
        """dtype: of all tensors; None leaves each as it is. shard_bytes: largest file, if no tensor is larger."""
        stored, shapes = source.dtypes, source.shapes
        names = [name for weight in weights for name in weight.hf]
        self.files = divide([TensorInfo(name, shapes[name], dtype or stored[name]) for name in names], shard_bytes)

    @property
    def tensors(self) -> list[TensorInfo]:
        return [tensor for members in self.files.values() for tensor in members]

    @property
    def bytes_by_file(self) -> dict[str, int]:
        """File -> bytes of its tensors."""
        return {file: sum(tensor.nbytes for tensor in members) for file, members in self.files.items()}

    @property
    def nbytes(self) -> int:
        return sum(self.bytes_by_file.values())


def write(
    plan: HuggingFacePlan, source: TensorSource, companions: Path, folder: Path, here: Processes, watch: Watch
) -> None:
    """Fill an empty folder. Collective: each process writes its share of the files.

    companions: the folder that config, tokenizer and chat template are taken from.
    """

    def write_mine() -> None:
        for number, (file, members) in enumerate(plan.files.items()):
            if here.mine(number):
                with SafetensorsWriter(folder / file, members) as writer:
                    for tensor in members:
                        _copy(source, tensor, writer, watch)

    here.together(write_mine)
    here.on_first(lambda: complete(folder, plan.files, companions))


def _copy(source: TensorSource, tensor: TensorInfo, writer: SafetensorsWriter, watch: Watch) -> None:
    for start, stop in row_blocks(tensor):
        rows = source.read(tensor.name, 0, start, stop).to(tensor.dtype)
        watch.inspect(tensor.name, rows)
        writer.write_rows(tensor.name, rows)
        watch.saw(rows.nbytes)


def row_blocks(tensor: TensorInfo) -> list[tuple[int, int]]:
    """Ranges of rows of at most `BLOCK_BYTES`, or of one row."""
    rows = tensor.shape[0]
    step = max(1, BLOCK_BYTES * rows // max(1, tensor.nbytes))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]
