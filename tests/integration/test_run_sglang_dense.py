"""Dense families, trained by Megatron and sampled by the real SGLang, in ways that no other run has."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import POLICY, metrics, trained
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

pytestmark = pytest.mark.sglang

SHAPE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "bos_token_id", "eos_token_id",
    "pad_token_id",
)  # fmt: skip


def dense_policy(folder: Path, family: type[Qwen3Config] | type[LlamaConfig]) -> None:
    """A random policy of the shipped one's shape, with its tokenizer and chat template."""
    shipped: dict[str, Any] = json.loads((POLICY / "config.json").read_text())
    torch.manual_seed(0)
    shape = {name: shipped[name] for name in SHAPE}
    model = AutoModelForCausalLM.from_config(family(**shape, initializer_range=0.1, tie_word_embeddings=False))
    model.save_pretrained(folder)
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(POLICY / name, folder / name)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        (Qwen3Config, ("engine.transport=distributed", "engine.tensor_parallel=2")),
        (LlamaConfig, ("engine.transport=cuda_ipc",)),
    ],
    ids=["qwen3, two processes, process group", "llama, handles"],
)
def test_engine_and_trainer_agree(
    family: type[Qwen3Config] | type[LlamaConfig], more: tuple[str, ...], factbook: Path, tmp_path: Path
) -> None:
    """Each publish is checked against the trainer's log-probabilities, and so is every token of the rollouts."""
    dense_policy(tmp_path / "policy", family)
    sizes = ("steps=2", "update.questions_per_step=1", "update.mini_batches=1")
    agree = ("engine=sglang", "engine.verify_every=1", "engine.verify_tolerance=1e-4")
    trained(tmp_path / "run", factbook, f"model.checkpoint={tmp_path / 'policy'}", *sizes, *agree, *more, timeout=600)
    rows = metrics(tmp_path / "run")
    assert len(rows) == 2
    assert max(row["mismatch/logprob_abs_max"] for row in rows) <= 1e-4
    assert min(row["engine/sleep_seconds"] for row in rows) > 0
