"""The name map by itself: hand-computed layouts, inverse functions, every name of the real 30B shape exactly once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

from megatron_treeopsd.weights.families import weights_of
from megatron_treeopsd.weights.place import Place, bind
from megatron_treeopsd.weights.rules import Shape, Weight, WeightsError, join, shard

pytestmark = pytest.mark.fast

SHAPE: dict[str, Any] = {
    "vocab_size": 250, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DENSE = Qwen3Config(**SHAPE, tie_word_embeddings=False)
LLAMA = LlamaConfig(**SHAPE, tie_word_embeddings=False)
MOE = Qwen3MoeConfig(**SHAPE, **EXPERTS, tie_word_embeddings=False)
QWEN3_30B_A3B = Qwen3MoeConfig(
    vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    tie_word_embeddings=False,
)  # fmt: skip


def cut(weight: Weight, full: dict[str, Tensor], *, rank: int, size: int, shape: Shape) -> Tensor:
    def read(name: str, dim: int, start: int, stop: int) -> Tensor:
        return full[name].narrow(dim, start, stop - start)

    return shard(weight, read, rank=rank, size=size, shape=shape)


def column(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]


def test_query_key_value_are_interleaved_by_group() -> None:
    # 4 heads of size 1 in 2 groups, hidden size 1
    weight = Weight(("qkv",), ("q", "k", "v"), ((4, 1), (2, 1), (2, 1)), layer=0, split=0, query_groups=2)
    full = {"q": column(0, 1, 2, 3), "k": column(10, 11), "v": column(20, 21)}
    whole = cut(weight, full, rank=0, size=1, shape=(8, 1))
    assert whole.flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert cut(weight, full, rank=1, size=2, shape=(4, 1)).flatten().tolist() == [2, 3, 11, 21]


def test_gate_and_up_are_stacked_within_each_rank() -> None:
    weight = Weight(("fc1",), ("gate", "up"), ((4, 1), (4, 1)), layer=0, split=0)
    full = {"gate": column(0, 1, 2, 3), "up": column(10, 11, 12, 13)}
    assert cut(weight, full, rank=0, size=2, shape=(4, 1)).flatten().tolist() == [0, 1, 10, 11]
    assert cut(weight, full, rank=1, size=2, shape=(4, 1)).flatten().tolist() == [2, 3, 12, 13]


def test_vocabulary_is_padded_with_zeros_and_cut_back() -> None:
    weight = Weight(("embedding",), ("embed",), ((5, 1),), layer="first", split=0, vocabulary=True)
    full = {"embed": column(1, 2, 3, 4, 5)}
    parts = [cut(weight, full, rank=rank, size=3, shape=(4, 1)) for rank in range(3)]
    assert [part.flatten().tolist() for part in parts] == [[1, 2, 3, 4], [5, 0, 0, 0], [0, 0, 0, 0]]
    assert join(weight, parts)[0].flatten().tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("config", [DENSE, MOE, LLAMA], ids=["dense", "moe", "llama"])
def test_join_undoes_shard_and_each_element_is_read_once(config: Any, size: int) -> None:
    for weight in weights_of(config):
        full = {name: torch.randn(shape) for name, shape in zip(weight.hf, weight.shapes, strict=True)}
        read_elements = []

        def read(name: str, dim: int, start: int, stop: int, full: dict = full, log: list = read_elements) -> Tensor:
            part = full[name].narrow(dim, start, stop - start)
            log.append(part.numel())
            return part

        shape = weight.shard_shape(size)
        parts = [shard(weight, read, rank=rank, size=size, shape=shape) for rank in range(weight.parts(size))]
        assert {tuple(part.shape) for part in parts} == {shape}
        assert sum(read_elements) == sum(tensor.numel() for tensor in full.values())
        back = join(weight, parts)
        assert all(torch.equal(a, b) for a, b in zip(back, full.values(), strict=True)), weight.key


def te_parameters(config: Any, place: Place) -> Iterator[tuple[str, Shape]]:
    """Names and local shapes of a rank's parameters under the Transformer Engine spec, written down independently."""
    tp, etp, hidden = place.tp[1], place.etp[1], config.hidden_size
    if place.first:
        yield "embedding.word_embeddings.weight", (config.vocab_size // tp, hidden)
    for i in range(len(place.layers)):
        attention, mlp = f"decoder.layers.{i}.self_attention", f"decoder.layers.{i}.mlp"
        rows = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
        yield f"{attention}.linear_qkv.layer_norm_weight", (hidden,)
        yield f"{attention}.linear_qkv.weight", (rows // tp, hidden)
        if config.model_type != "llama":
            yield f"{attention}.q_layernorm.weight", (config.head_dim,)
            yield f"{attention}.k_layernorm.weight", (config.head_dim,)
        yield f"{attention}.linear_proj.weight", (hidden, config.num_attention_heads * config.head_dim // tp)
        if config.model_type != "qwen3_moe":
            yield f"{mlp}.linear_fc1.layer_norm_weight", (hidden,)
            yield f"{mlp}.linear_fc1.weight", (2 * config.intermediate_size // tp, hidden)
            yield f"{mlp}.linear_fc2.weight", (hidden, config.intermediate_size // tp)
            continue
        yield f"decoder.layers.{i}.pre_mlp_layernorm.weight", (hidden,)
        yield f"{mlp}.router.weight", (config.num_experts, hidden)
        inner = config.moe_intermediate_size
        for e in range(config.num_experts // place.ep[1]):
            yield f"{mlp}.experts.linear_fc1.weight{e}", (2 * inner // etp, hidden)
            yield f"{mlp}.experts.linear_fc2.weight{e}", (hidden, inner // etp)
    if place.last:
        yield "decoder.final_layernorm.weight", (hidden,)
        if not config.tie_word_embeddings:
            yield "output_layer.weight", (config.vocab_size // tp, hidden)


def places(config: Any, *, tp: int, ep: int, etp: int, pp: int) -> Iterator[Place]:
    """Positions of a layout: every tensor-parallel rank with the first experts, all experts on the first of them."""
    count = config.num_hidden_layers // pp
    for stage, expert, t, e in itertools.product(range(pp), range(ep), range(tp), range(etp)):
        if t > 0 and (expert, e) != (0, 0):
            continue
        yield Place(
            tp=(t, tp),
            etp=(e, etp),
            ep=(expert, ep),
            layers=tuple(range(stage * count, (stage + 1) * count)),
            first=stage == 0,
            last=stage == pp - 1,
            experts=getattr(config, "num_experts", 0),
        )


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 1, "ep": 8, "etp": 1, "pp": 1},
        {"tp": 4, "ep": 8, "etp": 1, "pp": 2},
        {"tp": 2, "ep": 4, "etp": 2, "pp": 1},
    ],
    ids=["tp1ep8", "tp4ep8pp2", "tp2ep4etp2"],
)
def test_every_name_of_qwen3_30b_a3b_once_under_transformer_engine_names(layout: dict[str, int]) -> None:
    weights = weights_of(QWEN3_30B_A3B)
    names = [name for weight in weights for name in weight.hf]
    assert len(names) == len(set(names)) == 18_867
    held: Counter[tuple[str, int]] = Counter()
    for place in places(QWEN3_30B_A3B, **layout):
        parameters = dict(te_parameters(QWEN3_30B_A3B, place))
        bound = bind(weights, parameters, place)
        assert len({weight.key for weight in bound.values()}) == len(parameters)
        for local, weight in bound.items():
            rank, size = place.split(weight)
            first = (place.ep[0], place.etp[0]) == (0, 0) if weight.expert is None else place.tp[0] == 0
            held[weight.key, rank] += first
            if rank == place.ep[0] == 0 and (weight.layer in ("first", "last", place.layers[0])):
                meta = {n: torch.empty(s, device="meta") for n, s in zip(weight.hf, weight.shapes, strict=True)}
                part = cut(weight, meta, rank=rank, size=size, shape=parameters[local])
                assert tuple(part.shape) == parameters[local], local
                full = join(weight, [part] * weight.parts(size))
                assert [tuple(t.shape) for t in full] == list(weight.shapes), local
    sizes = {True: layout["tp"], False: layout["etp"]}
    assert held.keys() == {(w.key, rank) for w in weights for rank in range(sizes[w.expert is None])}
    assert set(held.values()) == {1}


@pytest.mark.parametrize("family", [Qwen3Config, LlamaConfig])
@pytest.mark.parametrize("tied", [True, False])
def test_dense_transformer_engine_names(tied: bool, family: Any) -> None:
    config = family(**SHAPE, tie_word_embeddings=tied)
    place = Place(tp=(1, 2), layers=(1,), first=False)
    bound = bind(weights_of(config), dict(te_parameters(config, place)), place)
    assert {name: weight.hf for name, weight in bound.items() if "layer" in name and "self" not in name} == {
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": ("model.layers.1.post_attention_layernorm.weight",),
        "decoder.layers.0.mlp.linear_fc1.weight": (
            "model.layers.1.mlp.gate_proj.weight",
            "model.layers.1.mlp.up_proj.weight",
        ),
        "decoder.layers.0.mlp.linear_fc2.weight": ("model.layers.1.mlp.down_proj.weight",),
        "decoder.final_layernorm.weight": ("model.norm.weight",),
        **({} if tied else {"output_layer.weight": ("lm_head.weight",)}),
    }


def test_tied_head_of_the_last_stage_is_the_embedding() -> None:
    config = Qwen3Config(**SHAPE, tie_word_embeddings=True)
    place = Place(layers=(1,), first=False)
    parameters = {**dict(te_parameters(config, place)), "output_layer.weight": (250, 32)}
    assert bind(weights_of(config), parameters, place)["output_layer.weight"].hf == ("model.embed_tokens.weight",)


def test_dense_layers_among_sparse_ones() -> None:
    config = Qwen3MoeConfig(**SHAPE, **EXPERTS, decoder_sparse_step=2)
    names = {name for weight in weights_of(config) for name in weight.hf}
    assert "model.layers.0.mlp.gate_proj.weight" in names
    assert "model.layers.0.mlp.gate.weight" not in names
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in names
    assert "model.layers.1.mlp.gate_proj.weight" not in names


def test_errors_list_what_does_not_fit() -> None:
    place = Place(layers=(0, 1), experts=4)
    good = dict(te_parameters(MOE, place))
    weights = weights_of(MOE)
    with pytest.raises(WeightsError, match=r"does not know:\n  decoder\.layers\.1\.mlp\.bias \(3,\)"):
        bind(weights, {**good, "decoder.layers.1.mlp.bias": (3,)}, place)
    lost = {name: shape for name, shape in good.items() if not name.endswith(("fc2.weight3", "q_layernorm.weight"))}
    with pytest.raises(WeightsError) as error:
        bind(weights, lost, place)
    for layer in (0, 1):
        assert f"decoder.layers.{layer}.mlp.experts.local_experts.3.linear_fc2.weight" in str(error.value)
        assert f"decoder.layers.{layer}.self_attention.q_layernorm.weight" in str(error.value)
    with pytest.raises(WeightsError, match=r"router\.weight: \(5, 32\) in the model, \(4, 32\) by the checkpoint"):
        bind(weights, {**good, "decoder.layers.0.mlp.router.weight": (5, 32)}, place)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (Place(tp=(0, 8)), "4 key/value heads cannot be divided over tensor parallel 8"),
        (Place(etp=(0, 5)), r"dimension 0 of \[24, 24\] cannot be divided over expert tensor parallel 5"),
        (Place(ep=(0, 3)), "4 experts cannot be divided over expert parallel 3"),
    ],
)
def test_layouts_that_do_not_divide_the_model(place: Place, message: str) -> None:
    position = Place(tp=place.tp, etp=place.etp, ep=place.ep, layers=(0, 1), experts=4)
    good = dict(te_parameters(MOE, Place(layers=(0, 1), experts=4)))
    with pytest.raises(WeightsError, match=message):
        bind(weights_of(MOE), good, position)


def test_unknown_architecture_names_what_is_known() -> None:
    from transformers import GPT2Config, Qwen3ForSequenceClassification

    known = "LlamaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM"
    with pytest.raises(WeightsError, match=f"'gpt2' is not supported. Supported: {known}"):
        weights_of(GPT2Config())
    config = Qwen3Config(**SHAPE, architectures=[Qwen3ForSequenceClassification.__name__])
    with pytest.raises(WeightsError, match="architecture Qwen3ForSequenceClassification is not supported"):
        weights_of(config)
