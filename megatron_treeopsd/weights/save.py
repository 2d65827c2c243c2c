"""From a Megatron model, whatever its layout, into a Hugging Face folder that any engine serves."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from megatron_treeopsd.weights import durable
from megatron_treeopsd.weights.folder import CONFIG, SHARD_BYTES, complete, divide
from megatron_treeopsd.weights.rules import WeightsError
from megatron_treeopsd.weights.streaming import Stream, TensorInfo
from megatron_treeopsd.weights.writer import SafetensorsWriter

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def save_pretrained(
    model: nn.Module,
    hf_config: PreTrainedConfig,
    source: Path,
    destination: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Write `model` as the Hugging Face folder `destination`; collective, rank 0 writes.

    Configuration, tokenizer and chat template are copied from `source`. Tensors are written as they stream by, into
    one `model.safetensors`, or into shards of at most `shard_bytes` with an index. The folder appears under its name
    when it is complete; with `overwrite` it then takes the place of an older one.

    Raises `WeightsError` on every rank if the destination exists (without `overwrite`) or cannot be written (no space,
    no rights); nothing is left behind then.
    """
    stream = Stream(model, hf_config)
    contents = iter(stream)
    outcome: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            _check_destination(source, destination, overwrite)
            _write(durable.begin(destination), source, stream.tensors, contents, shard_bytes)
            durable.commit(destination)
        except OSError as error:
            shutil.rmtree(durable.staging(destination), ignore_errors=True)
            outcome = [f"{destination}: the model cannot be written: {error}"]
    for _ in contents:  # the other ranks' part of the exchange; and rank 0's, if it could not write
        pass
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise WeightsError(outcome[0])


def _check_destination(source: Path, destination: Path, overwrite: bool) -> None:
    if not (source / CONFIG).is_file():
        raise FileNotFoundError(f"{source} has no config.json to copy")
    if destination.exists() and any(destination.iterdir()) and not overwrite:
        raise FileExistsError("the folder exists and is not empty; remove it or choose another")


def _write(
    folder: Path,
    source: Path,
    tensors: Sequence[TensorInfo],
    contents: Iterable[tuple[str, Tensor]],
    shard_bytes: int,
) -> None:
    stream = iter(contents)
    files = divide(tensors, shard_bytes)
    for file, members in files.items():
        with SafetensorsWriter(folder / file, members) as writer:
            for _, (name, tensor) in zip(members, stream, strict=False):
                writer.write(name, tensor)
    complete(folder, files, source)
