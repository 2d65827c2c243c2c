"""The fresh tiny policy: shape, initial weights, tokenizer, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from factbook_data import prepared
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_treeopsd.environment.data import DataError
from megatron_treeopsd.environment.factbook.prepare import create_policy

pytestmark = pytest.mark.fast


def test_shape_initial_weights_and_tokenizer(tmp_path: Path) -> None:
    data, _ = prepared("factbook")
    state = torch.get_rng_state()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        create_policy(tmp_path / name, data=data, seed=seed)
    assert torch.equal(state, torch.get_rng_state())

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert model.dtype == torch.float32
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_781_824
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.1, rel=0.02)
    for layer in model.model.layers:
        assert layer.self_attn.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert layer.mlp.experts.gate_up_proj.std().item() == pytest.approx(0.02, rel=0.05)
        assert set(layer.self_attn.q_norm.weight.tolist() + layer.self_attn.k_norm.weight.tolist()) == {1.5}
        assert layer.mlp.experts.gate_up_proj.shape[0] == 8

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert len(tokenizer) == model.config.vocab_size
    assert (model.config.bos_token_id, model.config.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)

    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("trained")
    with pytest.raises(FileExistsError, match="choose another folder"):
        create_policy(tmp_path / "policy", data=prepared("factbook")[0], seed=1)
    assert (tmp_path / "policy" / "config.json").read_text() == "trained"


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no tokenizer there.*treeopsd prepare"):
        create_policy(tmp_path / "policy", data=tmp_path, seed=1)
