"""Name map of dense Qwen3: 8 rules. Its pieces serve the other families, which are built alike.

Each rule names the Hugging Face tensor(s), then Megatron's parameter: first as the local layer spec calls it, then as
the Transformer Engine spec does where that differs (it folds a norm into the linear layer behind it).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_treeopsd.weights.rules import Weight

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ARCHITECTURE = "Qwen3ForCausalLM"


def weights(config: PreTrainedConfig) -> Iterator[Weight]:
    """Every weight of the model, in the order of a forward pass."""
    yield embedding(config)
    for layer in range(config.num_hidden_layers):
        yield from attention(config, layer)
        yield from dense_mlp(config, layer)
    yield from head(config)


def embedding(config: PreTrainedConfig) -> Weight:
    # A tied model has no head of its own, but its last pipeline stage holds a copy of the embedding under that name.
    copy = ("output_layer.weight",) if config.tie_word_embeddings else ()
    return Weight(
        megatron=("embedding.word_embeddings.weight", *copy),
        hf=("model.embed_tokens.weight",),
        shapes=((config.vocab_size, config.hidden_size),),
        layer="first",
        split=0,
        vocabulary=True,
    )


def head(config: PreTrainedConfig) -> Iterator[Weight]:
    yield Weight(
        megatron=("decoder.final_layernorm.weight",),
        hf=("model.norm.weight",),
        shapes=((config.hidden_size,),),
        layer="last",
    )
    if not config.tie_word_embeddings:
        yield Weight(
            megatron=("output_layer.weight",),
            hf=("lm_head.weight",),
            shapes=((config.vocab_size, config.hidden_size),),
            layer="last",
            split=0,
            vocabulary=True,
        )


def attention(config: PreTrainedConfig, layer: int, *, head_norms: str = "qk") -> Iterator[Weight]:
    """Norm, fused query/key/value, norms of each head of what `head_norms` names, output projection."""
    h, m = f"model.layers.{layer}", f"decoder.layers.{layer}"
    hidden, groups = config.hidden_size, config.num_key_value_heads
    head_dim = config.head_dim or hidden // config.num_attention_heads  # null in a configuration means that
    queries = config.num_attention_heads * head_dim
    yield Weight(
        megatron=(f"{m}.input_layernorm.weight", f"{m}.self_attention.linear_qkv.layer_norm_weight"),
        hf=(f"{h}.input_layernorm.weight",),
        shapes=((hidden,),),
        layer=layer,
    )
    yield Weight(
        megatron=(f"{m}.self_attention.linear_qkv.weight",),
        hf=tuple(f"{h}.self_attn.{name}_proj.weight" for name in "qkv"),
        shapes=((queries, hidden), (groups * head_dim, hidden), (groups * head_dim, hidden)),
        layer=layer,
        split=0,
        query_groups=groups,
    )
    for name in head_norms:
        yield Weight(
            megatron=(f"{m}.self_attention.{name}_layernorm.weight",),
            hf=(f"{h}.self_attn.{name}_norm.weight",),
            shapes=((head_dim,),),
            layer=layer,
        )
    yield Weight(
        megatron=(f"{m}.self_attention.linear_proj.weight",),
        hf=(f"{h}.self_attn.o_proj.weight",),
        shapes=((hidden, queries),),
        layer=layer,
        split=1,
    )


def mlp_norm(config: PreTrainedConfig, layer: int) -> Weight:
    h, m = f"model.layers.{layer}", f"decoder.layers.{layer}"
    return Weight(
        megatron=(f"{m}.pre_mlp_layernorm.weight", f"{m}.mlp.linear_fc1.layer_norm_weight"),
        hf=(f"{h}.post_attention_layernorm.weight",),
        shapes=((config.hidden_size,),),
        layer=layer,
    )


def dense_mlp(config: PreTrainedConfig, layer: int) -> Iterator[Weight]:
    h, m = f"model.layers.{layer}.mlp", f"decoder.layers.{layer}.mlp"
    inner, hidden = config.intermediate_size, config.hidden_size
    yield mlp_norm(config, layer)
    yield Weight(
        megatron=(f"{m}.linear_fc1.weight",),
        hf=(f"{h}.gate_proj.weight", f"{h}.up_proj.weight"),
        shapes=((inner, hidden), (inner, hidden)),
        layer=layer,
        split=0,
    )
    yield Weight(
        megatron=(f"{m}.linear_fc2.weight",),
        hf=(f"{h}.down_proj.weight",),
        shapes=((hidden, inner),),
        layer=layer,
        split=1,
    )
