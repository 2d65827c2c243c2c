from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_treeopsd.observe.summary import write_summary

pytestmark = pytest.mark.fast
KEYS = {
    "method", "seed", "steps", "train_seconds", "total_seconds", "exact_match_before", "exact_match_after",
    "questions_evaluated", "generated_tokens", "cached_tokens", "spans", "versions",
}  # fmt: skip


def test_the_summary_has_what_others_rely_on(tmp_path: Path) -> None:
    written = write_summary(
        tmp_path / "summary.json",
        method="grpo",
        seed=3,
        steps=20,
        spans={"rollout": 2.5, "update": 1.25, "other": 0.25},
        excluded={"startup": 1.0, "evaluation": 5.0},
        generated_tokens=1000,
        cached_tokens=2000,
        before={"when": "before", "questions": 256.0, "exact_match_greedy": 0.25},
        after={"when": "after", "questions": 256.0, "exact_match_greedy": 0.5},
        extra={"interrupted": False},
    )
    read = json.loads((tmp_path / "summary.json").read_text())
    assert read == written
    assert read.keys() > KEYS
    assert (read["train_seconds"], read["total_seconds"]) == (4.0, 10.0)
    assert (read["exact_match_before"], read["exact_match_after"], read["questions_evaluated"]) == (0.25, 0.5, 256)
    assert read["interrupted"] is False
    assert {"megatron-treeopsd", "torch", "numpy"} <= read["versions"].keys()


def test_a_run_without_evaluation_says_null(tmp_path: Path) -> None:
    read = write_summary(
        tmp_path / "summary.json", method="sft", seed=1, steps=1, spans={"other": 1.0}, excluded={},
        generated_tokens=0, cached_tokens=0, before=None, after=None,
    )  # fmt: skip
    assert read["exact_match_before"] is read["exact_match_after"] is None
    assert read["questions_evaluated"] == 0
