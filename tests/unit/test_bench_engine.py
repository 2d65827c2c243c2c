"""The benchmarks of rollouts and of publishing, on the embedded engine and without an engine."""

from __future__ import annotations

import argparse
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from megatron_treeopsd.tree import ROOT, Question, RolloutTree, Turn

pytestmark = pytest.mark.fast

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"


@pytest.fixture(scope="module")
def rollout() -> Any:
    return argparse.Namespace(**runpy.run_path(str(BENCH / "rollout.py")))


@pytest.fixture(scope="module")
def publish() -> Any:
    return argparse.Namespace(**runpy.run_path(str(BENCH / "publish.py")))


def test_tokens_of_a_tree_counted_by_hand(rollout: Any) -> None:
    """Prompt of 3; trunk turn of 2 sampled and 1 observed; then it goes on, and a fork of chain 1 does too."""
    tree = RolloutTree(Question("q", "", ()), [1, 2, 3])
    trunk = tree.add(Turn(ROOT, [4, 5], [0.0, 0.0], [6], chain=0), merge=False)
    tree.add(Turn(trunk, [7], [0.0], terminal=True, chain=0), merge=False)
    tree.add(Turn(trunk, [8], [0.0], terminal=True, chain=1), merge=False)
    requests = list(rollout.requests_of([tree]))
    assert [request.prompt for request in requests] == [[1, 2, 3], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]]
    assert rollout.computed_tokens(requests, shared=True) == 3 + 2  # the prompt, then 5 and 6: 4 was sampled
    assert rollout.computed_tokens(requests, shared=False) == 3 + 2 + 6  # the fork starts cold


def test_publishing_asks_once_a_bucket(publish: Any) -> None:
    seconds, requests, buckets = publish.seconds_by_tensors([100, 1000], bucket_bytes=2**16)
    assert list(seconds) == ["100", "1000"]
    assert requests == buckets == 1000 * 64 * 4 // 2**16 + 1
    found = {"bytes": 12, "shard_bytes": 10, "bytes_over_shard": 1.2, "model_bytes": 30, "requests": requests,
             "buckets": buckets, "seconds_by_tensors": {"1000": 0.5}}  # fmt: skip
    assert "1.20x its expert shard" in publish.table(found)
    assert "500.0" in publish.table(found)
    cost = {"requests": 2, "trainer_seconds": 0.5, "engine_seconds": 1.5, "wall_seconds": 3.0}
    found["sglang"] = [{"tensors": 1000, "bytes": 2**20, "buckets": 2, "disk": cost}]
    assert "disk         2      0.500      1.50       2000" in publish.table(found)


def test_errors_are_in_plain_words(rollout: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert rollout.main(["no.such.key=1"]) == 1
    assert capsys.readouterr().err.startswith("rollout.py: no: unknown key")


def test_table_and_json_agree(rollout: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    found = {
        "engine": "embedded", "questions": 1, "requests": 3, "branches": 1, "prompt_tokens_computed": 6,
        "unique_prompt_tokens": 5, "limit_prompt_tokens": 6, "cold_branch_prompt_tokens": 11,
        "no_cache_prompt_tokens": 15, "generated_tokens": 4, "generated_tokens_per_second": 2.0,
    }  # fmt: skip
    monkeypatch.setitem(rollout.main.__globals__, "measure", lambda recipe, questions: found)
    assert rollout.main(["--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1]) == found
    assert any(line.split() == ["computed", "6", "1.20x"] for line in lines)
