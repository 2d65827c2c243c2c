"""Random tiny checkpoints of every family, with the companions that real ones have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

FAMILIES = ("qwen3", "qwen3_moe", "llama")
VOCAB = 250
"""Not a multiple of what Megatron pads vocabularies to."""


def make_checkpoint(
    folder: Path, family: str = "qwen3_moe", *, tied: bool = False, dtype: torch.dtype = torch.float32, **saving: Any
) -> PreTrainedModel:
    """Save a checkpoint and return its model. `saving`: options of `save_pretrained`.

    Weights are large enough for attention and routing to depend on every input.
    """
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    model: PreTrainedModel
    if family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    elif family == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts))
    else:
        # As Llama 3.1, so that some waves are kept, some stretched, some mixed.
        shape["rope_parameters"] = {
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }  # fmt: skip
        model = LlamaForCausalLM(LlamaConfig(**shape))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model = model.to(dtype).eval()
    model.save_pretrained(folder, **saving)
    (folder / "tokenizer.json").write_text('{"version": "1.0",  "model": {}}\n')
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}\n")
    (folder / "additional_chat_templates").mkdir(exist_ok=True)
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    return model
