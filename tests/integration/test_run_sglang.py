"""Whole runs with the real SGLang: the same loop, another word in the recipe."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from runs import POLICY, metrics, summary_of, treeopsd, words

from megatron_treeopsd import environment, reward
from megatron_treeopsd.collect import Collector, Share
from megatron_treeopsd.engine.build import build_engine
from megatron_treeopsd.engine.embedded import EmbeddedEngine
from megatron_treeopsd.environment.data import load_questions
from megatron_treeopsd.recipes import load_recipe
from megatron_treeopsd.session import evaluation_sample
from megatron_treeopsd.tokenizer import load_tokenizer
from megatron_treeopsd.tree import load_trees

pytestmark = pytest.mark.sglang

MARK = "TREEOPSD_TEST_RUN"
"""Environment variable by which a test knows the processes of its own run."""


def engine_of(run: Path) -> int:
    """Process id of the engine of a run; 0 if there is none (yet)."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            worker = b"sglang_worker.py" in (folder / "cmdline").read_bytes()
            if worker and f"{MARK}={run}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                return int(folder.name)
        except OSError:  # it has just ended, or is somebody else's
            continue
    return 0


def kill_during_second_step(run: Path, killed: list[int]) -> None:
    """Wait until the first step is over, and a little longer; then kill the engine."""
    while not (run / "metrics.jsonl").is_file() or not (run / "metrics.jsonl").read_text():
        time.sleep(0.05)
    time.sleep(0.5)
    if pid := engine_of(run):
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)


def test_two_training_processes_and_one_engine_take_three_steps(
    factbook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expert parallel over two processes, an engine for both that is killed in the middle of the second step.

    What the engine says is compared with the trainer in every step, and with the embedded engine for the weights that
    the run began with.
    """
    run = tmp_path / "run"
    monkeypatch.setenv(MARK, str(run))
    wanted = words(
        run,
        factbook,
        "layout.ep=2",
        "engine=sglang",
        "engine.ranks_per_engine=2",
        "mismatch.routes=replay",
        "steps=3",
        "update.questions_per_step=2",
        "evaluation.questions=12",
        "evaluation.sampled_repeats=0",
        "logging.trees_every_steps=1",
    )
    killed: list[int] = []
    threading.Thread(target=kill_during_second_step, args=(run, killed), daemon=True).start()
    done = treeopsd("train", *wanted, processes=2, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert killed
    assert "starting it again with version 1, lost requests follow" in done.stdout + done.stderr
    summary, rows = summary_of(run), metrics(run)
    assert summary["steps"] == len(rows) == 3
    # Every step samples with weights that were published before it, and is scored by the trainer at that version.
    assert max(row["mismatch/logprob_abs_max"] for row in rows) <= 1e-4
    assert max(row["mismatch/turn_ratio_error_max"] for row in rows) <= 1e-3
    assert {row["mismatch/routes_replayed_share"] for row in rows} == {1.0}
    assert max(row["mismatch/routes_differ_share"] for row in rows) <= 0.01
    assert all(row["rollout/leaves"] == 2 * 12 for row in rows)
    assert summary["cached_tokens"] > 0
    grown = [load_trees(run / "trees" / f"step_{step:06d}.safetensors") for step in range(3)]
    for step, trees in enumerate(grown):
        assert {turn.version for tree in trees for turn in tree.turns} == {step}

    recipe = load_recipe(words(run, factbook, "steps=3"))
    engine = build_engine(recipe.engine, checkpoint=POLICY, dtype=recipe.model.dtype)
    assert isinstance(engine, EmbeddedEngine)

    async def score_all() -> float:
        async def worst(prefix: list[int], ids: list[int], logprobs: list[float]) -> float:
            scores = await engine.score(prefix, ids, session="x")
            return max(abs(a - b) for a, b in zip(scores, logprobs, strict=True))

        turns = [(tree.path_ids(turn.parent), turn) for tree in grown[0] for turn in tree.turns]
        return max(await asyncio.gather(*(worst(p, turn.sampled_ids, turn.sampled_logprobs) for p, turn in turns)))

    assert asyncio.run(score_all()) <= 1e-4
    world = environment.build(recipe.task, load_tokenizer(POLICY))
    share = Share(0, 1, lambda items: [items])
    scorer = reward.build(recipe.reward)
    collector = Collector(recipe, engine=engine, environment=world, reward=scorer, share=share)
    questions = evaluation_sample(load_questions(factbook / "test.jsonl"), 12)
    greedy = collector.evaluate(questions, repeats=0)
    before = summary["evaluations"][0]
    assert {name: before[name] for name in greedy} == pytest.approx(greedy)
    world.close()
    engine.close()


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
