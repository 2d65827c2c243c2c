"""Name map of Qwen3-MoE: attention and norms of dense Qwen3, a router, and two rules for each expert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_treeopsd.weights import qwen3
from megatron_treeopsd.weights.rules import Weight

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ARCHITECTURE = "Qwen3MoeForCausalLM"


def weights(config: PreTrainedConfig) -> Iterator[Weight]:
    """Every weight of the model, in the order of a forward pass."""
    yield qwen3.embedding(config)
    for layer in range(config.num_hidden_layers):
        yield from qwen3.attention(config, layer)
        yield from experts(config, layer) if is_sparse(config, layer) else qwen3.dense_mlp(config, layer)
    yield from qwen3.head(config)


def is_sparse(config: PreTrainedConfig, layer: int) -> bool:
    """Whether the layer is a mixture of experts."""
    dense = set(config.mlp_only_layers or ())
    return layer not in dense and config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0


def experts(config: PreTrainedConfig, layer: int) -> Iterator[Weight]:
    h, m = f"model.layers.{layer}.mlp", f"decoder.layers.{layer}.mlp"
    inner, hidden = config.moe_intermediate_size, config.hidden_size
    yield qwen3.mlp_norm(config, layer)
    yield Weight(
        megatron=(f"{m}.router.weight",),
        hf=(f"{h}.gate.weight",),
        shapes=((config.num_experts, hidden),),
        layer=layer,
    )
    for e in range(config.num_experts):
        yield Weight(
            megatron=(f"{m}.experts.local_experts.{e}.linear_fc1.weight", f"{m}.experts.linear_fc1.weight{e}"),
            hf=(f"{h}.experts.{e}.gate_proj.weight", f"{h}.experts.{e}.up_proj.weight"),
            shapes=((inner, hidden), (inner, hidden)),
            layer=layer,
            split=0,
            expert=e,
        )
        yield Weight(
            megatron=(f"{m}.experts.local_experts.{e}.linear_fc2.weight", f"{m}.experts.linear_fc2.weight{e}"),
            hf=(f"{h}.experts.{e}.down_proj.weight",),
            shapes=((hidden, inner),),
            layer=layer,
            split=1,
            expert=e,
        )
