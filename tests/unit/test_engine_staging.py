"""Weights in shared memory: what a set must be, and where its bytes lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from engine_fixtures import FAMILIES, checkpoint_weights, random_policy
from torch import Tensor

from megatron_treeopsd.engine.base import EngineError
from megatron_treeopsd.engine.staging import StagedWeights, checkpoint_shapes

pytestmark = pytest.mark.fast

WEIGHTS = {
    "model.embed_tokens.weight": torch.arange(6.0).view(3, 2),
    "model.norm.weight": torch.tensor([7.0]),
    "model.layers.0.mlp.experts.0.up_proj.weight": torch.arange(8.0, 16.0).view(2, 4),
}
SHAPES = {name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()}


def staged(weights: object, *, tied: bool = False, bucket_bytes: int = 1000, dtype: torch.dtype = torch.float32):  # type: ignore[no-untyped-def]
    pairs = weights.items() if isinstance(weights, dict) else weights
    return StagedWeights(pairs, shapes=SHAPES, tied=tied, dtype=dtype, bucket_bytes=bucket_bytes)  # type: ignore[arg-type]


def read_back(weights: StagedWeights) -> dict[str, Tensor]:
    """As another process reads them: by path and offset."""
    found = {}
    for bucket in weights.buckets:
        with open(bucket.path, "rb") as file:
            data = bytearray(file.read())
        assert len(data) == bucket.nbytes
        for placed in bucket.tensors:
            dtype = getattr(torch, bucket.dtype)
            count = torch.Size(placed.shape).numel()
            values = torch.frombuffer(data, dtype=dtype, count=count, offset=placed.offset)
            found[placed.name] = values.view(placed.shape).clone()
    return found


@pytest.mark.parametrize("bucket_bytes", [1, 40, 1000])
def test_every_tensor_is_where_the_bucket_says(bucket_bytes: int) -> None:
    with staged(WEIGHTS, bucket_bytes=bucket_bytes) as weights:
        assert len(weights.buckets) == {1: 3, 40: 2, 1000: 1}[bucket_bytes]
        found = read_back(weights)
        assert found.keys() == WEIGHTS.keys()
        assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)
        assert weights.nbytes == 4 * (6 + 1 + 8)
        path = weights.buckets[0].path
    assert not os.path.exists(path), "the memory is given back"


def test_tensors_are_cast_and_the_tied_head_is_sent_along() -> None:
    with staged(WEIGHTS, tied=True, dtype=torch.bfloat16) as weights:
        found = read_back(weights)
        assert torch.equal(found["lm_head.weight"], WEIGHTS["model.embed_tokens.weight"].bfloat16())
        assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    head = {"lm_head.weight": WEIGHTS["model.embed_tokens.weight"].clone()}
    with staged({**head, **WEIGHTS}, tied=True) as weights:
        assert len(read_back(weights)) == 4
    head["lm_head.weight"][0, 0] = 9.0
    with pytest.raises(EngineError, match="but the checkpoint ties them"):
        staged({**head, **WEIGHTS}, tied=True)


def test_what_is_wrong_is_listed_and_the_stream_is_walked_to_its_end() -> None:
    pairs = iter(
        [
            ("model.norm.weight", torch.zeros(2)),
            ("model.layers.0.mlp.experts.gate_up_proj", torch.zeros(1)),
            ("model.embed_tokens.weight", torch.zeros(3, 2)),
            ("model.embed_tokens.weight", torch.zeros(3, 2)),
        ]
    )
    with pytest.raises(EngineError) as error:
        staged(pairs)
    assert next(pairs, None) is None
    for words in (
        "the weights were not taken, 4 problems: ",
        "model.norm.weight has shape [2], expected [1]",
        "unknown name model.layers.0.mlp.experts.gate_up_proj",
        "model.embed_tokens.weight was given twice",
        "missing model.layers.0.mlp.experts.0.up_proj.weight",
    ):
        assert words in str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_are_those_of_the_files_however_they_are_stored(family: str, tmp_path: Path) -> None:
    policy = random_policy(family)
    policy.save_pretrained(tmp_path / "whole")
    expected = {name: tuple(tensor.shape) for name, tensor in checkpoint_weights(tmp_path / "whole").items()}
    policy.save_pretrained(tmp_path / "fused", save_original_format=False, max_shard_size="20KB")
    policy.config.save_pretrained(tmp_path / "elsewhere")
    for folder in ("whole", "fused", "elsewhere"):
        assert checkpoint_shapes(tmp_path / folder) == expected
    with pytest.raises(EngineError, match=r"no config\.json"):
        checkpoint_shapes(tmp_path / "nowhere")
