"""Strictly alone against a full batch, on the shape of the quickstart's policy and for thousands of tokens."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from megatron_treeopsd.engine.base import Completion, Sampling
from megatron_treeopsd.engine.embedded import EmbeddedEngine

VOCABULARY = 3400


def policy() -> PreTrainedModel:
    torch.manual_seed(0)
    shape = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    return AutoModelForCausalLM.from_config(shape).eval()


def test_two_thousand_tokens_alone_and_among_fifty_others() -> None:
    rng = random.Random(0)
    prompts = [[2, *(rng.randrange(5, VOCABULARY) for _ in range(rng.randint(8, 20)))] for _ in range(63)]
    lengths = [170] * 12 + [rng.randint(5, 180) for _ in range(51)]

    def run(engine: EmbeddedEngine, requests: list[int]) -> dict[int, Completion]:
        async def gather() -> list[Completion]:
            calls = (
                engine.generate(prompts[i], seed=i, sampling=Sampling(lengths[i], frozenset(), 1.0), session=str(i))
                for i in requests
            )
            return list(await asyncio.gather(*calls))

        return dict(zip(requests, asyncio.run(gather()), strict=True))

    alone: dict[int, Completion] = {}
    for request in range(12):
        alone |= run(EmbeddedEngine(policy(), max_batch=1, cache_tokens=1024), [request])
    shuffled = rng.sample(range(63), 63)
    crowd = run(EmbeddedEngine(policy(), max_batch=64, cache_tokens=32_768), shuffled)
    assert sum(len(completion.ids) for completion in alone.values()) >= 2_000
    for request, completion in alone.items():
        assert crowd[request].ids == completion.ids
        assert crowd[request].logprobs == pytest.approx(completion.logprobs, abs=2e-5)
