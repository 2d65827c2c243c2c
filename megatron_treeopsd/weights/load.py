"""From a Hugging Face folder into this rank's part of a Megatron model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron_treeopsd.weights.families import check_folder, weights_of
from megatron_treeopsd.weights.place import Held, held
from megatron_treeopsd.weights.rules import Shape, Weight, WeightsError, listing, shard
from megatron_treeopsd.weights.source import Source

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def load_pretrained(model: nn.Module, folder: Path, hf_config: PreTrainedConfig) -> None:
    """Fill `model`, this rank's part, in place, in its own dtype. Reads only the slices that the rank holds.

    Not collective: every rank reads for itself. Call it before the optimizer takes its copies of the parameters.
    Raises `WeightsError` if the folder holds another architecture, or listing every name that is missing, unused or of
    another shape; the model is then unchanged.
    """
    check_folder(folder, hf_config)
    weights = weights_of(hf_config)
    parts = held(model, weights)
    source = Source(folder)
    shapes = source.shapes
    redundant_head = hf_config.tie_word_embeddings and HEAD in shapes
    if redundant_head:  # some published checkpoints of tied models carry a copy of the embedding
        del shapes[HEAD]
    _check_names(folder, weights, shapes)
    if redundant_head:
        _check_head(source, parts)
    with torch.no_grad():
        for part in parts:
            shape = tuple(part.parameter.shape)
            part.parameter.copy_(shard(part.weight, source.read, rank=part.rank, size=part.size, shape=shape))


def _check_names(folder: Path, weights: Sequence[Weight], found: dict[str, Shape]) -> None:
    expected = {name: shape for weight in weights for name, shape in zip(weight.hf, weight.shapes, strict=True)}
    both = expected.keys() & found.keys()
    misshaped = [f"{n}: {found[n]} in the file, {expected[n]} by config.json" for n in both if found[n] != expected[n]]
    problems = [
        ("weights that config.json asks for are missing", expected.keys() - found.keys()),
        ("weights that no rule of the name map uses", found.keys() - expected.keys()),
        ("shapes contradict config.json", misshaped),
    ]
    if text := "\n".join(f"{what}:{listing(names)}" for what, names in problems if names):
        raise WeightsError(f"{folder}: {text}")


def _check_head(source: Source, parts: Sequence[Held]) -> None:
    """A head stored beside a tied embedding must be the same; else it would be dropped silently."""
    for part in parts:
        if part.weight.vocabulary:
            rows, total = part.parameter.shape[0], part.weight.shapes[0][0]
            start, stop = min(part.rank * rows, total), min((part.rank + 1) * rows, total)
            if not torch.equal(source.read(HEAD, 0, start, stop), source.read(EMBEDDING, 0, start, stop)):
                raise WeightsError(
                    f"{source.folder}: config.json ties the embeddings, but {HEAD} differs from {EMBEDDING}; "
                    "set tie_word_embeddings to false there if the head is meant to be used"
                )
