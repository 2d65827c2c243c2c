"""Name map of Llama 3.x: that of dense Qwen3 without norms of queries and keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_treeopsd.weights import qwen3
from megatron_treeopsd.weights.rules import Weight

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ARCHITECTURE = "LlamaForCausalLM"


def weights(config: PreTrainedConfig) -> Iterator[Weight]:
    """Every weight of the model, in the order of a forward pass."""
    yield qwen3.embedding(config)
    for layer in range(config.num_hidden_layers):
        yield from qwen3.attention(config, layer, head_norms="")
        yield from qwen3.dense_mlp(config, layer)
    yield from qwen3.head(config)
