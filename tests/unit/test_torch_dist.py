"""The torch_dist format by itself: places by hand, blobs as torch writes them, metadata that cannot run anything."""

from __future__ import annotations

import io
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3MoeConfig

from megatron_treeopsd.convert.cut import Cut
from megatron_treeopsd.weights.extent import Files
from megatron_treeopsd.weights.families import weights_of
from megatron_treeopsd.weights.rules import Weight, WeightsError
from megatron_treeopsd.weights.torch_dist import blob, metadata
from megatron_treeopsd.weights.torch_dist.grid import Region, fill, pieces, regions, runs, segments, slot, slots
from megatron_treeopsd.weights.torch_dist.metadata import Blob, Chunk, StoredTensor
from megatron_treeopsd.weights.torch_dist.writer import extra_states

pytestmark = pytest.mark.fast

SHAPE: dict[str, Any] = {
    "vocab_size": 250, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8, "tie_word_embeddings": False,
}  # fmt: skip
MOE = Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
QWEN3_30B_A3B = Qwen3MoeConfig(
    vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    tie_word_embeddings=False,
)  # fmt: skip

QKV = Weight(("qkv.weight",), ("q", "k", "v"), ((4, 3), (2, 3), (2, 3)), layer=0, split=0, query_groups=2)
GATE_UP = Weight(("fc1.weight",), ("gate", "up"), ((4, 3), (4, 3)), layer=0, split=0)
DOWN = Weight(("fc2.weight",), ("down",), ((3, 4),), layer=0, split=1)
EMBEDDING = Weight(("embedding.weight",), ("embed",), ((5, 3),), layer="first", split=0, vocabulary=True)


# --------------------------------------------------------------------------------------------------------------- places
def test_rows_of_fused_weights_by_hand() -> None:
    """Megatron keeps q, k, v of one group together; in the global tensor gate and up are one after the other."""
    assert [(run.hf, run.start, run.rows) for run in runs(QKV)] == [
        (0, 0, 2), (1, 0, 1), (2, 0, 1), (0, 2, 2), (1, 1, 1), (2, 1, 1),
    ]  # fmt: skip
    assert [(run.at, run.hf, run.start, run.rows) for run in runs(GATE_UP)] == [(0, 0, 0, 4), (4, 1, 0, 4)]
    place = slot(QKV, layers=2, experts=0)
    assert list(segments(place, (1, 5))) == [("q", 1, 2), ("k", 0, 1), ("v", 0, 1), ("q", 2, 3)]


def test_parts_of_tensor_parallel_ranks_by_hand() -> None:
    def found(weight: Weight, multiple: int = 1) -> list[tuple[int, tuple[int, int], tuple[int, int]]]:
        place = slot(weight, layers=2, experts=0, vocabulary_multiple=multiple)
        return [(rank, region.rows, region.columns) for rank, region in regions(place, 2)]

    assert found(QKV) == [(0, (0, 4), (0, 3)), (1, (4, 8), (0, 3))]
    assert found(GATE_UP) == [(0, (0, 2), (0, 3)), (1, (2, 4), (0, 3)), (0, (4, 6), (0, 3)), (1, (6, 8), (0, 3))]
    assert found(DOWN) == [(0, (0, 3), (0, 2)), (1, (0, 3), (2, 4))]
    assert found(EMBEDDING, multiple=4) == [(0, (0, 4), (0, 3)), (1, (4, 8), (0, 3))]


def test_padding_is_zero() -> None:
    place = slot(EMBEDDING, layers=None, experts=0, vocabulary_multiple=4)
    full = torch.arange(15.0).view(5, 3)
    filled = fill(place, Region((3, 8), (1, 3)), lambda _, start, stop: full[start:stop], torch.float32)
    assert filled.tolist() == [[10, 11], [13, 14], [0, 0], [0, 0], [0, 0]]


def test_names_and_shapes_of_global_tensors() -> None:
    found = {slot.weight.key: slot for slot in slots(weights_of(MOE), vocabulary_multiple=128)}
    fc1 = found["decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"]
    assert fc1.keys == ("decoder.layers.mlp.experts.experts.linear_fc1.weight",)
    assert (fc1.lead, fc1.shape) == ((1, 3), (2, 4, 48, 32))
    assert fc1.box(Region((24, 48), (0, 32))) == ((1, 3, 24, 0), (1, 1, 24, 32))
    norm = found["decoder.layers.1.input_layernorm.weight"]
    assert norm.keys == (
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.input_layernorm.weight",
    )
    assert norm.box(norm.whole) == ((1, 0), (1, 32))
    embedding = found["embedding.word_embeddings.weight"]
    assert (embedding.shape, embedding.lead) == ((256, 32), ())
    tied = Qwen3Config(**SHAPE | {"tie_word_embeddings": True})
    keys = {key for slot in slots(weights_of(tied)) if slot.weight.vocabulary for key in slot.keys}
    assert keys == {"embedding.word_embeddings.weight"}  # Megatron saves no head beside it


def test_layers_that_differ_have_tensors_of_their_own() -> None:
    config = Qwen3MoeConfig(
        **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=2
    )
    found = {slot.weight.key: slot for slot in slots(weights_of(config))}
    expert = found["decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight"]
    assert expert.keys == ("decoder.layers.1.mlp.experts.experts.linear_fc2.weight",)
    assert (expert.lead, expert.shape) == ((3,), (4, 32, 24))
    assert found["decoder.layers.0.mlp.linear_fc1.weight"].shape == (96, 32)


def test_states_that_modules_of_both_specs_ask_for() -> None:
    keys = set(extra_states(slots(weights_of(MOE))))
    for module in ("linear_qkv", "linear_proj", "core_attention", "q_layernorm"):
        assert f"decoder.layers.self_attention.{module}._extra_state/shard_1_2" in keys
    assert "decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_1.3_2.4" in keys
    assert "decoder.final_layernorm._extra_state/shard_0_1" in keys
    assert not [key for key in keys if "router" in key or "embedding" in key or "output_layer" in key]


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"tp": 2},
        {"ep": 4},
        {"pp": 2},
        {"tp": 2, "ep": 2, "pp": 2},
        {"tp": 2, "ep": 2, "etp": 2},
        {"tp": 4, "ep": 2},
    ],
    ids=lambda layout: "-".join(f"{name}{size}" for name, size in layout.items()) or "tp1",
)
def test_pieces_cover_every_element_once(layout: dict[str, int]) -> None:
    weights = weights_of(MOE)
    cut = Cut.of(weights, **layout)
    ranks = set()
    for place in slots(weights, vocabulary_multiple=128 * cut.tp):
        seen = torch.zeros(place.rows, place.whole.columns[1], dtype=torch.int8)
        for part, region in pieces(place, cut.size(place.weight), itemsize=4, max_bytes=500):
            seen[region.within(place.whole)] += 1
            ranks.add(cut.rank(place.weight, part))
        assert (seen == 1).all(), place.weight.key
    assert ranks == set(range(cut.ranks))


@pytest.mark.parametrize(
    ("layout", "ranks"), [({"tp": 1, "ep": 8}, 8), ({"tp": 4, "ep": 8, "pp": 2}, 16), ({"tp": 2, "ep": 4, "etp": 2}, 8)]
)
def test_every_name_of_qwen3_30b_a3b_once(layout: dict[str, int], ranks: int) -> None:
    """The whole map on names and shapes: 18,867 Hugging Face tensors, each element in one rank's file."""
    weights = weights_of(QWEN3_30B_A3B)
    cut = Cut.of(weights, **layout)
    assert cut.ranks == ranks
    names: dict[str, int] = {}
    per_rank = dict.fromkeys(range(ranks), 0)
    for place in slots(weights, vocabulary_multiple=128 * cut.tp):
        count = 0
        for part, region in pieces(place, cut.size(place.weight), itemsize=2, max_bytes=2**26):
            size = (region.rows[1] - region.rows[0]) * (region.columns[1] - region.columns[0])
            count += size
            per_rank[cut.rank(place.weight, part)] += size
            for name, start, stop in segments(place, region.rows):
                names[name] = names.get(name, 0) + (stop - start) * (region.columns[1] - region.columns[0])
        assert count == place.rows * place.whole.columns[1]
    assert len(names) == 18_867
    sizes = {name: torch.Size(shape).numel() for w in weights for name, shape in zip(w.hf, w.shapes, strict=True)}
    assert names == sizes
    experts = 48 * 128 * 3 * 768 * 2048
    assert min(per_rank.values()) >= experts // (layout["ep"] * layout.get("etp", 1) * layout.get("pp", 1))


def test_layouts_that_do_not_divide_the_model() -> None:
    dense = weights_of(Qwen3Config(**SHAPE))
    for weights, layout, message in [
        (weights_of(MOE), {"ep": 3}, "ep=3 does not divide the model's 4 experts"),
        (weights_of(MOE), {"pp": 3}, "pp=3 does not divide the model's 2 layers"),
        (weights_of(MOE), {"tp": 8}, "4 key/value heads cannot be divided over tensor parallel 8"),
        (weights_of(MOE), {"etp": 5}, "cannot be divided over expert tensor parallel 5"),
        (dense, {"ep": 2}, "ep=2: the model has no experts to divide"),
        (dense, {"tp": 0}, "tp=0: a parallel size is at least 1"),
    ]:
        with pytest.raises(WeightsError, match=message):
            Cut.of(weights, **layout)


# ---------------------------------------------------------------------------------------------------------------- blobs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(3,), (1, 1, 7, 5), (0, 4), (2, 3, 4)])
def test_an_envelope_makes_what_torch_saves(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Written around bytes it loads in torch; and what torch saved, with checksums, is found by it."""
    tensor = torch.randn(shape).mul_(9).to(dtype)
    around = blob.envelope(dtype, shape)
    raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    ours = around.head + raw + around.tail
    assert len(ours) == around.length
    loaded = torch.load(io.BytesIO(ours), weights_only=True)
    assert loaded.dtype == dtype
    assert torch.equal(loaded, tensor)

    torch.save(tensor, theirs := io.BytesIO())
    path = tmp_path / "blobs"
    path.write_bytes(b"front" + ours + theirs.getvalue())
    files = Files()
    for offset, length in ((5, len(ours)), (5 + len(ours), len(theirs.getvalue()))):
        extent = blob.locate(files, path, offset, length, dtype, shape)
        assert extent is not None
        found = torch.empty(shape, dtype=dtype)
        files.read(extent, found)
        assert torch.equal(found, tensor)


def test_what_is_stored_in_another_form_is_left_to_torch(tmp_path: Path) -> None:
    tensor = torch.randn(4, 6)
    path = tmp_path / "blobs"
    torch.save(tensor.t(), path)  # strides of its own
    size = path.stat().st_size
    assert blob.locate(Files(), path, 0, size, torch.float32, (6, 4)) is None
    assert torch.equal(blob.load_whole(Files(), path, 0, size, torch.float32, (6, 4)), tensor.t())
    with pytest.raises(WeightsError, match=r"bytes 0 to \d+ hold no tensor: that is torch\.float32 \(4, 6\)"):
        blob.load_whole(Files(), path, 0, size, torch.float32, (4, 6))


def test_bytes_that_are_no_tensor(tmp_path: Path) -> None:
    path = tmp_path / "blobs"
    torch.save(torch.randn(8), path)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(WeightsError, match=r"blobs: bytes 0 to \d+ hold no tensor|truncated"):
        blob.locate(Files(), path, 0, size, torch.float32, (8,))


def test_damaged_blobs_give_the_tensor_or_an_error(tmp_path: Path) -> None:
    """Whatever surrounds the bytes of a tensor, they are never taken from another place, and nothing crashes."""
    tensor = torch.randn(8, 16)
    around = blob.envelope(tensor.dtype, (8, 16))
    raw = tensor.view(torch.uint8).numpy().tobytes()
    path, rng, survived = tmp_path / "blob", random.Random(0), 0
    for _ in range(200):
        head, tail = bytearray(around.head), bytearray(around.tail)
        for part in rng.choices([head, tail], k=rng.randint(1, 3)):
            part[rng.randrange(len(part))] = rng.randrange(256)
        path.write_bytes(head + raw + tail)
        what, found = (Files(), path, 0, around.length, tensor.dtype, (8, 16)), torch.empty(8, 16)
        try:
            extent = blob.locate(*what)
            if extent is None:  # its description is another one, which may be that of another tensor
                blob.load_whole(*what)
                continue
        except WeightsError:
            continue
        Files().read(extent, found)
        survived += 1
        assert torch.equal(found, tensor)
    assert 40 < survived < 160


# ------------------------------------------------------------------------------------------------------------- metadata
TENSORS = {
    "a.weight": StoredTensor(torch.bfloat16, (4, 2), [Chunk((0, 0), (2, 2), Blob("__0_0.distcp", 7, 100))]),
    "b": StoredTensor(torch.float32, (3,), [Chunk((0,), (3,), Blob("__1_0.distcp", 0, 50))]),
}


def test_metadata_is_read_as_it_was_written_and_by_torch(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import MetadataIndex

    metadata.write(tmp_path, TENSORS, {"common": Blob("__0_1.distcp", 0, 9)})
    assert metadata.read(tmp_path) == (TENSORS, {"common"})
    theirs = FileSystemReader(tmp_path).read_metadata()
    assert theirs.state_dict_metadata["a.weight"].size == (4, 2)
    assert theirs.storage_data[MetadataIndex("a.weight", torch.Size((0, 0)))].offset == 7
    assert str(tmp_path).encode() not in (tmp_path / ".metadata").read_bytes()


class Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('code from a file was run')",)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_reading_metadata_runs_nothing(tmp_path: Path, protocol: int) -> None:
    for value in (Evil(), {"state_dict_metadata": Evil(), "storage_data": {}}, [Evil()]):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(value, protocol=protocol))
        with pytest.raises(WeightsError, match=r"\.metadata: damaged, or of another format"):
            metadata.read(tmp_path)


def test_damaged_metadata_is_an_error_and_never_a_crash(tmp_path: Path) -> None:
    metadata.write(tmp_path, TENSORS, {})
    path = tmp_path / ".metadata"
    whole = path.read_bytes()
    rng = random.Random(0)
    survived = 0
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged[: rng.choice([len(damaged), rng.randrange(len(damaged))])])
        try:
            metadata.read(tmp_path)
            survived += 1
        except WeightsError:
            pass
    assert survived < 200
    path.unlink()
    with pytest.raises(WeightsError, match="no complete torch_dist folder"):
        metadata.read(tmp_path)


def test_metadata_stays_in_its_folder(tmp_path: Path) -> None:
    outside = {"a": StoredTensor(torch.float32, (1,), [Chunk((0,), (1,), Blob("../secret", 0, 9))])}
    metadata.write(tmp_path, outside, {})
    with pytest.raises(WeightsError, match=r"refers to \.\./secret, outside of the folder"):
        metadata.read(tmp_path)
