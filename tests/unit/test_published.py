"""The check after a publish, and who samples for whom."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_fixtures import ENGINES, VOCABULARY, checkpoint_weights, random_policy, reference_logprobs

from megatron_treeopsd import config
from megatron_treeopsd.collect import Share
from megatron_treeopsd.engine.base import EngineError
from megatron_treeopsd.engine.build import build_engine
from megatron_treeopsd.published import check_probes, sample_probe

pytestmark = pytest.mark.fast


def test_engine_and_trainer_agree_or_the_version_is_named(tmp_path: Path) -> None:
    policy = random_policy()
    policy.save_pretrained(tmp_path)
    engine = ENGINES["embedded"].build(tmp_path)
    engine.publish(checkpoint_weights(tmp_path).items(), version=3)
    probe = sample_probe(engine, vocabulary=VOCABULARY, temperature=0.7)
    assert engine.counters.requests == 0
    again = sample_probe(engine, vocabulary=VOCABULARY, temperature=0.7)
    assert again.turns[0].sampled_ids == probe.turns[0].sampled_ids
    logprobs = np.array(reference_logprobs(policy, probe.prompt_ids, probe.turns[0].sampled_ids, temperature=0.7))
    assert check_probes([probe], [[logprobs]], version=3, tolerance=1e-4) < 1e-5
    with pytest.raises(EngineError, match=r"engine 1 does not serve version 3 .* differs .* by 2\.00e-03"):
        check_probes([probe, probe], [[logprobs], [logprobs - 2e-3]], version=3, tolerance=1e-3)
    with pytest.raises(EngineError, match="it says version 3"):
        check_probes([probe], [[logprobs]], version=4, tolerance=1e-3)
    with pytest.raises(EngineError, match="by nan"):
        check_probes([probe], [[logprobs * np.nan]], version=3, tolerance=1e-3)


@pytest.mark.parametrize(
    ("world", "ranks_per_engine", "expected"),
    [
        (1, 1, [[0, 1, 2, 3, 4]]),
        (2, 1, [[0, 2, 4], [1, 3]]),
        (2, 2, [[0, 1, 2, 3, 4], []]),
        (4, 2, [[0, 2, 4], [], [1, 3], []]),
        (3, 2, [[0, 2, 4], [], [1, 3]]),
    ],
)
def test_each_question_belongs_to_one_engine(world: int, ranks_per_engine: int, expected: list[list[int]]) -> None:
    shares = [Share(rank, world, lambda items: [items], ranks_per_engine) for rank in range(world)]
    assert [list(share.of(5)) for share in shares] == expected


def test_a_guest_takes_the_weights_and_samples_nothing(tmp_path: Path) -> None:
    section = config.SGLangEngine(name="sglang", ranks_per_engine=2)
    guest = build_engine(section, checkpoint=tmp_path, dtype="float32", rank=1)
    taken = iter([("a", None), ("b", None)])
    guest.publish(taken, version=5)  # type: ignore[arg-type]
    assert next(taken, None) is None, "a collective is walked to its end"
    assert guest.version == 5
    with pytest.raises(EngineError, match=r"engine\.ranks_per_engine"):
        sample_probe(guest, vocabulary=9, temperature=1.0)
