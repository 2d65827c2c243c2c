"""What the CPU support must leave as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_treeopsd.backend import cpu

pytestmark = pytest.mark.fast


def test_device_contexts_still_reach_tensor_factories() -> None:
    cpu.install()
    with torch.device("meta"):
        made = [
            torch.arange(3),
            torch.zeros(2),
            torch.ones(2),
            torch.empty(2),
            torch.full((2,), 1.0),
            torch.tensor([1.0]),
        ]
    assert {tensor.device.type for tensor in made} == {"meta"}


def test_cuda_means_the_cpu() -> None:
    cpu.install()
    if torch.cuda.is_available():
        pytest.skip("with a GPU nothing is redirected")
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.arange(3, device=torch.device("cuda", 0)).device.type == "cpu"
    assert torch.ones(1).cuda().device.type == "cpu"


def test_transformers_loads_the_same_model_under_it(tmp_path: Path) -> None:
    """Loading builds the model on the meta device; its rotary frequencies are in no checkpoint and must be computed."""
    cpu.install()
    shape = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(shape)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    theta = shape.rope_parameters["rope_theta"]
    expected = theta ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq.double(), expected, rtol=1e-6, atol=0)
    ids = torch.randint(64, (1, 9))
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=0)
