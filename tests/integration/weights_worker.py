"""Loads, streams and saves one checkpoint at many layouts, in one of two processes; started by test_weights_layouts.py.

weights_worker.py FOLDER     with FOLDER/{moe,dense}_{tied,untied} as Hugging Face checkpoints
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import layout
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from megatron_treeopsd import weights
from megatron_treeopsd.backend import parallel
from megatron_treeopsd.backend.model import build_model
from megatron_treeopsd.config import Layout
from megatron_treeopsd.weights import streaming

LAYOUTS = {
    "dense": [{}, {"tp": 2}, {"pp": 2}],
    "moe": [{}, {"tp": 2}, {"ep": 2}, {"pp": 2}, {"tp": 2, "ep": 2}, {"tp": 2, "etp": 2}, {"cp": 2, "ep": 2}],
}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def empty_model(
    folder: Path, chosen: Layout, state: parallel.ParallelState, vocab: int | None = None
) -> torch.nn.Module:
    config = AutoConfig.from_pretrained(folder)
    config.vocab_size = vocab or config.vocab_size
    dtype = config.dtype
    model = build_model(config, chosen, state, dtype=dtype)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    return model


def round_trips(folder: Path, sizes: dict[str, int]) -> list[str]:
    config = AutoConfig.from_pretrained(folder)
    expected = load_file(folder / "model.safetensors")
    with layout(**sizes) as (chosen, state):
        model = empty_model(folder, chosen, state)
        weights.load_pretrained(model, folder, config)
        found = {name: tensor.clone() for name, tensor in weights.stream(model, config)}
        assert_equal(found, expected)
        destination = folder.with_name(f"{folder.name}_out_{'_'.join(map(str, sizes.items()))}")
        weights.save_pretrained(model, config, folder, destination, shard_bytes=200_000)
        written: dict[str, Tensor] = {}
        for file in destination.glob("*.safetensors"):
            written |= load_file(file)
        assert_equal(written, expected)

        # Other bucket sizes exchange the same tensors: one weight at a time, and a few.
        for streaming.BUCKET_BYTES in (1, 20_000):
            assert_equal(dict(weights.stream(model, config)), expected)
        streaming.BUCKET_BYTES = 128 * 2**20
        return list(found)


def padded_vocabulary(folder: Path) -> None:
    """A vocabulary that tensor parallelism does not divide: the model has more rows than the checkpoint."""
    config = AutoConfig.from_pretrained(folder)
    rows = config.vocab_size + 40
    with layout(tp=2) as (chosen, state):
        model = empty_model(folder, chosen, state, vocab=rows)
        weights.load_pretrained(model, folder, config)
        local = model.embedding.word_embeddings.weight
        assert local.shape[0] == rows // 2
        if state.tp_rank == 1:
            assert not local[-40:].any()
        assert_equal(dict(weights.stream(model, config)), load_file(folder / "model.safetensors"))


def lost_expert(folder: Path) -> None:
    """A weight that no rank announces is an error on all ranks, not a hang and not an incomplete checkpoint."""
    config = AutoConfig.from_pretrained(folder)
    with layout(ep=2) as (chosen, state):
        model = empty_model(folder, chosen, state)
        original = streaming.held

        def without_last(*arguments: object) -> list:  # type: ignore[type-arg]
            return [part for part in original(*arguments) if "local_experts.7.linear_fc2" not in part.weight.key]

        streaming.held = without_last
        with pytest.raises(
            weights.WeightsError, match=r"decoder\.layers\.1\.mlp\.experts\.local_experts\.7\.linear_fc2"
        ):
            list(weights.stream(model, config))
        streaming.held = original


def full_disk(folder: Path) -> None:
    """Rank 0 cannot write: every rank says so, and nothing is left."""
    import resource

    config = AutoConfig.from_pretrained(folder)
    destination = folder.with_name("nowhere")
    with layout(tp=2) as (chosen, state):
        model = empty_model(folder, chosen, state)
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        if state.rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, unlimited[1]))
        with pytest.raises(weights.WeightsError, match="File too large"):
            weights.save_pretrained(model, config, folder, destination)
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert not list(folder.parent.glob("*nowhere*"))


def main(root: Path) -> None:
    for family, layouts in LAYOUTS.items():
        for tied in ("tied", "untied"):
            folder = root / f"{family}_{tied}"
            orders = [round_trips(folder, sizes) for sizes in layouts]
            assert all(order == orders[0] for order in orders), "the order of names depends on the layout"
    for tied in ("tied", "untied"):
        padded_vocabulary(root / f"moe_{tied}")
    lost_expert(root / "moe_tied")
    full_disk(root / "moe_untied")
    dist.barrier()
    if os.environ["RANK"] == "0":
        print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
