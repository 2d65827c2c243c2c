"""A fresh tiny Qwen3-MoE policy with the Factbook's tokenizer, as a Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from megatron_treeopsd.environment.data import DataError
from megatron_treeopsd.environment.factbook.folder import written_whole

EMBEDDING_STD = 0.1
QK_NORM = 1.5
"""Tied embeddings this large and sharper attention from the start: copying from passages forms in minutes with them
and not at all without."""


def create_policy(folder: Path, *, data: Path, seed: int) -> None:
    """Write a randomly initialised policy to `folder`: 1.8 M parameters, float32, the same bytes for the same seed.

    8 experts of which 2 are active, grouped-query attention, qk-norm, tied embeddings. The tokenizer is that of the
    data folder `data`. Raises `DataError` if there is none, `FileExistsError` if `folder` is not empty: a trained
    checkpoint is never overwritten.
    """
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    source = data / "tokenizer"
    if not (source / "tokenizer.json").is_file():
        raise DataError(f"{source}: no tokenizer there; make the data folder first with `treeopsd prepare`")
    with written_whole(folder) as temporary:
        tokenizer = AutoTokenizer.from_pretrained(source)
        shape = Qwen3MoeConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,  # of dense layers; there are none
            moe_intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            router_aux_loss_coef=0.0,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            initializer_range=0.02,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            dtype="float32",
        )
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            model = Qwen3MoeForCausalLM(shape)
            model.model.embed_tokens.weight.normal_(0.0, EMBEDDING_STD)
            for layer in model.model.layers:
                layer.self_attn.q_norm.weight.fill_(QK_NORM)
                layer.self_attn.k_norm.weight.fill_(QK_NORM)
        model.save_pretrained(temporary)
        shutil.copytree(source, temporary, dirs_exist_ok=True)
