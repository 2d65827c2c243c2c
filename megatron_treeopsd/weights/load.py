"""From a checkpoint folder into this rank's part of a Megatron model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron_treeopsd.weights.families import check_folder, weights_of
from megatron_treeopsd.weights.place import held
from megatron_treeopsd.weights.rules import Weight, WeightsError, listing, shard
from megatron_treeopsd.weights.source import INDEX, SINGLE, Source, TensorSource
from megatron_treeopsd.weights.torch_dist.source import TorchDistSource, find_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def load_pretrained(model: nn.Module, folder: Path, hf_config: PreTrainedConfig) -> None:
    """Fill `model`, this rank's part, in place, in its own dtype. Reads only the slices that the rank holds.

    `folder` is a Hugging Face folder, or one that `treeopsd convert to-megatron` made. Not collective: every rank
    reads for itself. Call it before the optimizer takes its copies of the parameters.

    Raises `WeightsError` if the folder holds another architecture, or listing every name that is missing, unused or of
    another shape; the model is then unchanged.
    """
    check_folder(folder, hf_config)
    weights = weights_of(hf_config)
    parts = held(model, weights)
    source = open_folder(folder, hf_config)
    if check_names(source, weights):
        for part in parts:
            if part.weight.vocabulary:
                rows, total = part.parameter.shape[0], part.weight.shapes[0][0]
                check_head(source, min(part.rank * rows, total), min((part.rank + 1) * rows, total))
    with torch.no_grad():
        for part in parts:
            shape = tuple(part.parameter.shape)
            part.parameter.copy_(shard(part.weight, source.read, rank=part.rank, size=part.size, shape=shape))


def open_folder(folder: Path, hf_config: PreTrainedConfig) -> TensorSource:
    """The tensors of a folder in either format. Raises `WeightsError` if it holds neither, or is damaged."""
    if not (folder / SINGLE).is_file() and not (folder / INDEX).is_file() and (found := find_checkpoint(folder)):
        return TorchDistSource(found, hf_config)
    return Source(folder)


def check_names(source: TensorSource, weights: Sequence[Weight]) -> bool:
    """Raise `WeightsError`, listing them, for names that are missing, that no rule uses, or of another shape.

    Returns whether there is a head that the model, whose embeddings are tied, has no use for: some published
    checkpoints carry a copy of the embedding. It must be one (`check_head`).
    """
    found = source.shapes
    expected = {name: shape for weight in weights for name, shape in zip(weight.hf, weight.shapes, strict=True)}
    redundant_head = HEAD in found and HEAD not in expected
    if redundant_head:
        del found[HEAD]
    both = expected.keys() & found.keys()
    misshaped = [f"{n}: {found[n]} in the file, {expected[n]} by config.json" for n in both if found[n] != expected[n]]
    problems = [
        ("weights that config.json asks for are missing", expected.keys() - found.keys()),
        ("weights that no rule of the name map uses", found.keys() - expected.keys()),
        ("shapes contradict config.json", misshaped),
    ]
    if text := "\n".join(f"{what}:{listing(names)}" for what, names in problems if names):
        raise WeightsError(f"{source.folder}: {text}")
    return redundant_head


def check_head(source: TensorSource, start: int, stop: int) -> None:
    """A head stored beside a tied embedding must be the same, in these rows; else it would be dropped silently."""
    if source.shapes[HEAD] != source.shapes[EMBEDDING] or not torch.equal(
        source.read(HEAD, 0, start, stop), source.read(EMBEDDING, 0, start, stop)
    ):
        raise WeightsError(
            f"{source.folder}: config.json ties the embeddings, but {HEAD} differs from {EMBEDDING}; "
            "set tie_word_embeddings to false there if the head is meant to be used"
        )
