"""The real SGLang in its own process: what can go wrong with weights and processes, and that it is noticed.

The trainer is transformers' float32 forward here. tests/integration/test_run_sglang.py has the real one.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from engine_fixtures import ENGINES, VOCABULARY, checkpoint_weights, random_policy, reference_logprobs
from torch import Tensor
from transformers import PreTrainedModel

from megatron_treeopsd.engine import transport
from megatron_treeopsd.engine.base import Completion, Engine, EngineError, Sampling
from megatron_treeopsd.engine.engine_folder import SHARED_MEMORY
from megatron_treeopsd.engine.sglang import SGLangEngine
from megatron_treeopsd.engine.staging import StagedWeights
from megatron_treeopsd.engine.transport import distributed
from megatron_treeopsd.engine.transport.disk import Disk
from megatron_treeopsd.published import check_probes, sample_probe

pytestmark = pytest.mark.sglang

FAMILY = "qwen3_moe"
TRANSPORTS = [name for name in get_args(transport.Name) if name != "auto"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of the same shape with different weights."""
    made = [tmp_path_factory.mktemp("policy") / str(seed) for seed in range(2)]
    for seed, folder in enumerate(made):
        random_policy(FAMILY, seed=seed).save_pretrained(folder)
    return made


@pytest.fixture
def engine(folders: list[Path], shared_engines: dict[tuple[str, str], Engine]) -> SGLangEngine:
    """Serves version 1, the first checkpoint."""
    key = ("sglang", FAMILY)
    if key not in shared_engines:
        shared_engines[key] = ENGINES["sglang"].build(folders[0])
    engine = shared_engines[key]
    assert isinstance(engine, SGLangEngine)
    engine.publish(checkpoint_weights(folders[0]).items(), version=1)
    engine.counters.reset()
    return engine


@pytest.fixture(params=TRANSPORTS)
def over(request: pytest.FixtureRequest, engine: SGLangEngine) -> Iterator[SGLangEngine]:
    """The engine, which takes its weights in another way than it was started with."""
    engine.take_weights_by(request.param)
    yield engine
    engine.take_weights_by("auto")


def difference(engine: SGLangEngine, policy: PreTrainedModel) -> float:
    """What the check after a publish finds if `policy` is the trainer's; raises `EngineError` as it does."""
    probe = sample_probe(engine, vocabulary=VOCABULARY, temperature=1.0)
    expected = [np.array(reference_logprobs(policy, probe.prompt_ids, probe.turns[0].sampled_ids))]
    return check_probes([probe], [expected], version=engine.version, tolerance=1e-4)


def update(engine: SGLangEngine, weights: dict[str, Tensor], *, leave_out: str = "") -> None:
    """A weight update by hand, without a step or with tensors under any name."""
    call = functools.partial(engine._process.call, seconds=60)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    with StagedWeights(weights.items(), shapes=shapes, tied=False, dtype=torch.float32, bucket_bytes=2**16) as staged:
        engine._transport.load(call, staged, version=1)
    if leave_out != "flush":
        call("flush")


def with_head(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}


# ------------------------------------------------------------------------------------------- what a check must notice
def test_a_good_publish_passes_the_check_over_every_transport(over: SGLangEngine, folders: list[Path]) -> None:
    sums = [over.checksum()]  # as the engine's own transport has left it
    assert difference(over, random_policy(FAMILY)) < 1e-4
    for version, seed in enumerate((1, 0), 2):
        over.publish(checkpoint_weights(folders[seed]).items(), version=version)
        assert difference(over, random_policy(FAMILY, seed=seed)) < 1e-4
        sums.append(over.checksum())
    assert sums[0] == sums[2] != sums[1]
    assert over.counters.requests == 0, "probes are not rollouts"


def test_a_sleeping_engine_is_woken_by_a_publish(over: SGLangEngine, folders: list[Path]) -> None:
    over.naps.reset()
    over.sleep()
    over.sleep()
    with pytest.raises(EngineError, match="sleeps; publish to it first"):
        difference(over, random_policy(FAMILY))
    over.publish(checkpoint_weights(folders[1]).items(), version=2)
    assert difference(over, random_policy(FAMILY, seed=1)) < 1e-4
    assert min(over.naps.sleep_seconds, over.naps.wake_seconds) > 0
    assert over.naps.freed_bytes == 0, "SGLang keeps its memory on a CPU"


def test_keys_and_values_of_old_weights_are_noticed(engine: SGLangEngine, folders: list[Path]) -> None:
    difference(engine, random_policy(FAMILY))  # the probe's prompt is in the cache now
    update(engine, with_head(checkpoint_weights(folders[1])), leave_out="flush")
    with pytest.raises(EngineError, match="does not serve version 1"):
        difference(engine, random_policy(FAMILY, seed=1))
    engine._process.call("flush", seconds=60)
    assert difference(engine, random_policy(FAMILY, seed=1)) < 1e-4


class Forgetful:
    """An engine process that says it did a step and did not."""

    def __init__(self, process: Any, step: str) -> None:
        self.process, self.step = process, step

    def call(self, call: str, **fields: Any) -> Any:
        return None if call.startswith(self.step) else self.process.call(call, **fields)


@pytest.mark.parametrize(
    ("step", "message"),
    [("flush", "cache was not emptied"), ("update", "took None of a bucket|answered None, but has not taken")],
)
def test_a_step_of_a_publish_that_did_not_happen_is_noticed(
    over: SGLangEngine, step: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "_SECONDS_BEHIND", 1.0)
    assert over._weights is not None
    with pytest.raises(EngineError, match=message):
        over._load(Forgetful(over._process, step), over._weights, 2)  # type: ignore[arg-type]
    if step == "update" and not isinstance(over._transport, Disk):
        over._process.call("end", seconds=60)


def fused(policy: PreTrainedModel) -> dict[str, Tensor]:
    """The names that transformers has in memory: all experts of a layer in one tensor."""
    return {name: parameter.detach() for name, parameter in policy.named_parameters()}


def test_fused_expert_names_are_refused_and_would_be_noticed(over: SGLangEngine) -> None:
    other = random_policy(FAMILY, seed=1)
    with pytest.raises(EngineError, match=r"unknown name model.layers.0.mlp.experts.gate_up_proj"):
        over.publish(fused(other).items(), version=2)
    assert over.version == 1
    update(over, with_head(fused(other)))  # SGLang takes them, and says that all went well
    with pytest.raises(EngineError, match="differs from the trainer's"):
        difference(over, other)


def test_a_lost_bucket_is_noticed(over: SGLangEngine, folders: list[Path]) -> None:
    weights = with_head(checkpoint_weights(folders[1]))
    lost = [name for name in weights if name.startswith("model.layers.1.mlp.experts")]
    update(over, {name: tensor for name, tensor in weights.items() if name not in lost})
    with pytest.raises(EngineError, match="differs from the trainer's"):
        difference(over, random_policy(FAMILY, seed=1))


def test_a_half_finished_update_is_noticed(over: SGLangEngine, folders: list[Path]) -> None:
    weights = dict(sorted(checkpoint_weights(folders[1]).items())[:10])
    update(over, weights)
    for seed in range(2):  # neither the old weights nor the new ones
        with pytest.raises(EngineError, match="differs from the trainer's"):
            difference(over, random_policy(FAMILY, seed=seed))


# --------------------------------------------------------------------------------------------------------- processes
def many(engine: SGLangEngine, *, tokens: int) -> list[Completion]:
    async def gather() -> list[Completion]:
        prompts = ([3 + (7 * i + j) % 90 for j in range(12)] for i in range(24))
        sampling = Sampling(tokens, frozenset({1, 2}), 1.0)
        calls = (engine.generate(ids, seed=i, sampling=sampling, session=str(i)) for i, ids in enumerate(prompts))
        return list(await asyncio.gather(*calls))

    return asyncio.run(gather())


def test_aborted_requests_return_what_they_have(engine: SGLangEngine) -> None:
    async def run() -> Completion:
        sampling = Sampling(200, frozenset(), 1.0)
        task = asyncio.create_task(engine.generate([5, 6, 7], seed=1, sampling=sampling, session="x"))
        await asyncio.sleep(0.5)
        engine.abort("x")
        return await task

    completion = asyncio.run(run())
    engine.release("x")
    assert completion.finish == "abort"
    assert 1 <= len(completion.ids) == len(completion.logprobs) < 200


def test_who_goes_away_ends_no_request_of_others(engine: SGLangEngine) -> None:
    """SGLang aborts every request whose name begins with the one that it is given."""
    engine._process._next = 1

    async def run() -> list[Completion]:
        sampling = Sampling(60, frozenset(), 1.0)
        first, *others = (
            asyncio.create_task(engine.generate([5, 6, 7 + i], seed=i, sampling=sampling, session="x"))
            for i in range(12)
        )
        await asyncio.sleep(0.3)
        first.cancel()
        return list(await asyncio.gather(*others))

    completions = asyncio.run(run())
    engine.release("x")
    assert [(completion.finish, len(completion.ids)) for completion in completions] == [("length", 60)] * 11


@pytest.mark.parametrize("over", ["distributed"], indirect=True)
def test_a_killed_engine_comes_back_and_samples_the_same(
    over: SGLangEngine, folders: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Over the transport that has to meet the new process first."""
    engine = over
    engine.publish(checkpoint_weights(folders[0]).items(), version=1)
    shared_memory = [SHARED_MEMORY / name for name in engine._folder.shared_memory.read_text().split()]
    assert shared_memory
    assert all(file.exists() for file in shared_memory)
    before, checksum, pid = many(engine, tokens=60), engine.checksum(), engine.pid
    killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    killer.start()
    with caplog.at_level(logging.WARNING):
        after = many(engine, tokens=60)
    killer.join()
    assert engine.pid != pid, "it was killed while it was sampling"
    assert [completion.ids for completion in after] == [completion.ids for completion in before]
    assert [completion.version for completion in after] == [1] * 24
    assert engine.checksum() == checksum
    assert "starting it again with version 1, lost requests follow" in caplog.text
    assert "the engine is back" in caplog.text
    assert not any(file.exists() for file in shared_memory), "nothing of the killed process is left"
