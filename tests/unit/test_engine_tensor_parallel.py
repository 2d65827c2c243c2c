"""One real SGLang engine that is divided over two processes takes weights in every way and computes what one does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import get_args

import pytest
import torch
from engine_fixtures import SGLANG_PYTHON, checkpoint_weights, random_policy, reference_logprobs

from megatron_treeopsd import config
from megatron_treeopsd.engine import transport
from megatron_treeopsd.engine.base import Sampling
from megatron_treeopsd.engine.sglang import SGLangEngine

pytestmark = pytest.mark.sglang

PROMPT = [3 + 7 * i % 90 for i in range(12)]


def test_two_processes_are_one_engine_over_every_transport(tmp_path: Path) -> None:
    policies = [random_policy(seed=seed) for seed in range(2)]
    for seed, policy in enumerate(policies):
        policy.save_pretrained(tmp_path / str(seed))
    section = config.SGLangEngine(
        name="sglang", python=SGLANG_PYTHON, max_batch=8, cache_tokens=4096, bucket_mb=1, tensor_parallel=2
    )
    engine = SGLangEngine(section, checkpoint=tmp_path / "0", dtype=torch.float32)
    sums: dict[int, set[str]] = {0: set(), 1: set()}
    version = 0
    for name in get_args(transport.Name):
        engine.take_weights_by(name)
        for seed, policy in enumerate(policies):
            version += 1
            engine.publish(checkpoint_weights(tmp_path / str(seed)).items(), version=version)
            sampling = Sampling(16, frozenset(), 1.0)
            completion = asyncio.run(engine.generate(PROMPT, seed=1, sampling=sampling, session="x"))
            engine.release("x")
            assert completion.logprobs == pytest.approx(
                reference_logprobs(policy, PROMPT, completion.ids), abs=1e-4
            ), name  # fmt: skip
            sums[seed].add(engine.checksum())
            engine.sleep()
    engine.close()
    assert [len(found) for found in sums.values()] == [1, 1], "the same weights whatever the way"
    assert sums[0] != sums[1]
