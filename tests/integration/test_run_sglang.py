"""Whole runs with the real SGLang: the same loop, another word in the recipe."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import POLICY, ROOT, environment, metrics, trained, treeopsd, words

from megatron_treeopsd.tree import load_trees

pytestmark = pytest.mark.sglang


def test_two_training_processes_and_one_engine_take_three_steps(factbook: Path, tmp_path: Path) -> None:
    """Expert parallel over two processes; the first of them holds the engine that both publish to."""
    run = tmp_path / "run"
    layout = ("layout.ep=2", "engine=sglang", "engine.ranks_per_engine=2")
    summary = trained(
        run,
        factbook,
        *layout,
        "steps=3",
        "update.questions_per_step=2",
        "logging.trees_every_steps=1",
        processes=2,
        timeout=900,
    )
    assert summary["steps"] == 3
    rows = metrics(run)
    assert len(rows) == 3
    # Every step samples with weights that were published before it, and is scored by the trainer at that version.
    assert max(row["mismatch/logprob_abs_max"] for row in rows) <= 1e-4
    assert max(row["mismatch/turn_ratio_error_max"] for row in rows) <= 1e-3
    assert all(row["rollout/leaves"] == 2 * 12 for row in rows)
    assert summary["cached_tokens"] > 0
    for step in range(3):
        trees = load_trees(run / "trees" / f"step_{step:06d}.safetensors")
        assert {turn.version for tree in trees for turn in tree.turns} == {step}


def test_rollouts_compute_unique_tokens_and_a_page_a_branch(factbook: Path) -> None:
    """Real questions, from the engine's own count of what was in its cache."""
    bench = ROOT / "tools" / "bench" / "rollout.py"
    data = (f"task.data={factbook}", f"model.checkpoint={POLICY}")
    done = subprocess.run(
        [sys.executable, str(bench), "--engine", "sglang", "--questions", "3", "--json", *data],
        env=environment(), cwd=ROOT, text=True, capture_output=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["unique_prompt_tokens"] <= found["prompt_tokens_computed"] <= found["limit_prompt_tokens"]
    assert found["prompt_tokens_computed"] < found["cold_branch_prompt_tokens"] < found["no_cache_prompt_tokens"]


def test_a_port_in_use_ends_the_run_in_plain_words(factbook: Path, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        started = time.monotonic()
        done = treeopsd(
            "train", *words(tmp_path / "run", factbook, "engine=sglang", f"engine.port={port}", "steps=1"), timeout=200
        )
    assert done.returncode != 0
    assert f"engine.port={port} cannot be used: Address already in use" in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - started < 200
