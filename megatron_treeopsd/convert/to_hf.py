"""Megatron's distributed checkpoint, whatever layout wrote it -> Hugging Face folder, a little at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from megatron_treeopsd.convert.processes import Processes
from megatron_treeopsd.convert.rows import RowCopier
from megatron_treeopsd.convert.side_by_side import balanced, files_for, side_by_side
from megatron_treeopsd.convert.watch import Watch, gigabytes
from megatron_treeopsd.weights.families import read_config, weights_of
from megatron_treeopsd.weights.folder import CONFIG, SHARD_BYTES, complete, divide, named
from megatron_treeopsd.weights.load import check_names
from megatron_treeopsd.weights.rules import WeightsError
from megatron_treeopsd.weights.source import Source
from megatron_treeopsd.weights.torch_dist.source import TorchDistSource, find_checkpoint
from megatron_treeopsd.weights.writer import SafetensorsWriter, TensorInfo


class ToHuggingFace:
    """One conversion, checked as far as it can be without reading tensors.

    Attributes:
        source: what is read.
        tensors: all of it, with the dtypes that are written.
        files: which tensors go into which file, in order.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype | None,
        shard_bytes: int | None = None,
        companions: Path | None = None,
    ) -> None:
        """dtype: of all tensors; None leaves each as it is. shard_bytes: of a file, if no single tensor is larger;
        None: 5 GB, or less so that there are a few files to be written side by side.
        companions: folder of config, tokenizer and chat template, if they do not lie in `folder`.

        Raises `WeightsError` for a folder that is no whole checkpoint of a known architecture.
        """
        self.folder = folder
        found = find_checkpoint(folder)
        if found is None:
            raise WeightsError(
                f"{folder}: no torch_dist checkpoint there (no .metadata, no tracker file). For the policy of a run "
                "there is treeopsd export"
            )
        places = [companions] if companions else [place for place in (folder, found) if (place / CONFIG).is_file()]
        if not places:
            raise WeightsError(
                f"{folder}: there is no {CONFIG}; name a Hugging Face folder of the same model with --hf-config"
            )
        self.companions = places[0]
        self.hf_config = read_config(self.companions)
        weights = weights_of(self.hf_config)
        self.source = TorchDistSource(found, self.hf_config)
        check_names(self.source, weights)
        stored = self.source.dtypes
        self.tensors = [
            TensorInfo(name, shape, dtype or stored[name])
            for weight in weights
            for name, shape in zip(weight.hf, weight.shapes, strict=True)
        ]
        self.files = divide(self.tensors, shard_bytes or SHARD_BYTES)
        if shard_bytes is None and len(self.files) < (count := files_for(self.nbytes)):
            self.files = named(list(_parts(self.tensors, count)))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def describe(self) -> Iterator[tuple[str, str]]:
        """(what, which) for people."""
        yield "family", f"{self.hf_config.model_type} ({', '.join(self.hf_config.architectures or [])})"
        yield "layout", "read whatever layout wrote it"
        yield "tensors", f"{len(self.tensors)} in {len(self.files)} file{'s' * (len(self.files) > 1)}"
        dtypes = sorted({str(tensor.dtype)[6:] for tensor in self.tensors})
        yield "bytes", f"{gigabytes(self.nbytes)}, {', '.join(dtypes)}"

    def check_contents(self, here: Processes) -> None:
        """What has to be read to be checked: nothing. Collective."""

    def share_bytes(self, here: Processes) -> int:
        """Bytes that this process writes."""
        return sum(tensor.nbytes for members in self._mine(here).values() for tensor in members)

    def _mine(self, here: Processes) -> dict[str, list[TensorInfo]]:
        return {file: members for number, (file, members) in enumerate(self.files.items()) if here.mine(number)}

    def write(self, folder: Path, here: Processes, watch: Watch) -> None:
        """Fill an empty folder. Collective: each process writes its share of the files."""

        def write_file(file: str, members: Sequence[TensorInfo]) -> None:
            copier = RowCopier(self.source, watch)
            with SafetensorsWriter(folder / file, members) as writer:
                for tensor in members:
                    write = partial(writer.write_bytes, tensor.name)
                    copier.copy(tensor.name, (0, tensor.shape[0]), tensor.dtype, write)

        mine = [partial(write_file, *file) for file in self._mine(here).items()]
        here.together(lambda: side_by_side(mine, watch))
        here.on_first(lambda: complete(folder, self.files, self.companions))

    def read_back(self, folder: Path) -> Source:
        return Source(folder)

    def sides(self, folder: Path) -> tuple[Path, Path]:
        """The Hugging Face folder and the Megatron folder."""
        return folder, self.folder


def _parts(tensors: Sequence[TensorInfo], count: int) -> Iterator[list[TensorInfo]]:
    """The tensors in up to `count` consecutive parts of about equal size."""
    numbers = iter(balanced([tensor.nbytes for tensor in tensors], count))
    for _, members in itertools.groupby(tensors, key=lambda _: next(numbers)):
        yield list(members)
