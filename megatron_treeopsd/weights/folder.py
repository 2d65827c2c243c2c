"""What a Hugging Face folder consists of, besides the tensors' contents."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from megatron_treeopsd.weights import durable
from megatron_treeopsd.weights.source import INDEX, SINGLE
from megatron_treeopsd.weights.writer import TensorInfo

CONFIG = "config.json"
SHARD_BYTES = 5 * 10**9
COMPANIONS = (
    "generation_config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "additional_chat_templates",
)  # fmt: skip
"""What is carried over from the source folder byte for byte, where it exists; config.json comes besides."""


def divide(tensors: Sequence[TensorInfo], shard_bytes: int) -> dict[str, list[TensorInfo]]:
    """File name -> its tensors, in order; a file exceeds `shard_bytes` only if a single tensor does."""
    shards: list[list[TensorInfo]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return named(shards)


def named(shards: Sequence[list[TensorInfo]]) -> dict[str, list[TensorInfo]]:
    """The files that hold some tensors each, under the names that loaders expect."""
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def complete(folder: Path, files: Mapping[str, Sequence[TensorInfo]], source: Path) -> None:
    """Add the index, if there are several files, and what comes from the source folder; last of all the config."""
    tensors = [tensor for members in files.values() for tensor in members]
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)},
            "weight_map": {tensor.name: file for file, members in files.items() for tensor in members},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    copy_companions(source, folder, tensors[0].dtype)


def copy_companions(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Configuration, tokenizer and chat template, byte for byte unless the config states another dtype than `dtype`."""
    for path in sorted({path for pattern in COMPANIONS for path in source.glob(pattern)}):
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, folder / path.name)
    text = (source / CONFIG).read_bytes()
    values, named = json.loads(text), str(dtype).removeprefix("torch.")
    stated = {key: named for key in ("dtype", "torch_dtype") if values.get(key, named) != named}
    if stated:
        text = (json.dumps(values | stated, indent=2) + "\n").encode()
    (folder / CONFIG).write_bytes(text)
    for path in folder.rglob("*"):
        if path.suffix not in (".safetensors", ".distcp"):  # synced by who wrote them
            durable.sync(path)
