"""Whole trees from the real SGLang, with a cache that holds one or two of them."""

from __future__ import annotations

import asyncio
import os
import runpy
import signal
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from runs import POLICY, ROOT

from megatron_treeopsd import environment, reward
from megatron_treeopsd.collect import Collector
from megatron_treeopsd.config import Recipe
from megatron_treeopsd.engine.base import Completion, Sampling
from megatron_treeopsd.engine.build import build_engine
from megatron_treeopsd.engine.gate import Gate
from megatron_treeopsd.engine.sglang import SGLangEngine
from megatron_treeopsd.environment.base import Environment
from megatron_treeopsd.environment.data import load_questions
from megatron_treeopsd.questions import QuestionSource, stable_seed
from megatron_treeopsd.recipes import load_recipe
from megatron_treeopsd.tree import Question, RolloutTree

pytestmark = pytest.mark.sglang

BENCH = Namespace(**runpy.run_path(str(ROOT / "tools" / "bench" / "rollout.py")))
CACHE_TOKENS, SLOTS = 1000, 16


class Stage(NamedTuple):
    recipe: Recipe
    engine: SGLangEngine
    world: Environment
    collector: Collector
    questions: list[Question]

    async def grow(self, numbers: Sequence[int]) -> list[RolloutTree]:
        """The trees of some questions, all at the same time; those of a question are called by its number."""
        seeds = {n: stable_seed("trees", n) for n in numbers}
        grow = self.collector.training.grow
        return list(await asyncio.gather(*(grow(self.questions[n], seed=seeds[n], session=str(n)) for n in numbers)))


@pytest.fixture(scope="module")
def running(factbook: Path) -> Iterator[Stage]:
    recipe = load_recipe(
        [
            "engine=sglang",
            f"engine.python={ROOT / '.venv-sglang' / 'bin' / 'python'}",
            f"engine.cache_tokens={CACHE_TOKENS}",
            f"engine.max_batch={SLOTS}",
            f"model.checkpoint={POLICY}",
            f"task.data={factbook}",
            "expansion.merge_siblings=false",
            "steps=1",
        ]
    )
    world = environment.build(recipe.task, BENCH.load_tokenizer(POLICY))
    engine = build_engine(recipe.engine, checkpoint=POLICY, dtype=recipe.model.dtype)
    assert isinstance(engine, SGLangEngine)
    collector = BENCH.alone(recipe, engine, world)
    source = QuestionSource(load_questions(factbook / "train.jsonl"), seed=1)
    yield Stage(recipe, engine, world, collector, source.draw(0, 8, recipe.task.hop_weights))
    engine.close()
    world.close()


@pytest.fixture
def stage(running: Stage) -> Stage:
    """The engine with an empty cache."""
    running.engine.publish(BENCH.checkpoint_weights(POLICY), version=running.engine.version + 1)
    running.engine.counters.reset()
    running.engine._requests.retractions = 0
    return running


def assert_equal(trees: Sequence[RolloutTree], others: Sequence[RolloutTree]) -> None:
    """The same turns in the same places; log-probabilities up to the rounding of another batch."""
    for tree, other in zip(trees, others, strict=True):
        assert len(tree.turns) == len(other.turns)
        for turn, same in zip(tree.turns, other.turns, strict=True):
            assert (turn.parent, turn.sampled_ids, turn.observation_ids) == (
                same.parent,
                same.sampled_ids,
                same.observation_ids,
            )
            assert turn.sampled_logprobs == pytest.approx(same.sampled_logprobs, abs=2e-5)


# ----------------------------------------------------------------------------------------------- same seeds, same trees
def test_trees_depend_on_their_seeds_only(stage: Stage) -> None:
    """One question at a time, all at once, and all at once with the engine killed in the middle."""

    async def one_by_one() -> list[RolloutTree]:
        return [(await stage.grow([number]))[0] for number in range(4)]

    async def with_a_kill() -> list[RolloutTree]:
        growing = asyncio.create_task(stage.grow(range(4)))
        while stage.engine.counters.requests < 40:
            assert not growing.done()
            await asyncio.sleep(0.01)
        os.kill(stage.engine.pid, signal.SIGKILL)
        return await growing

    alone = asyncio.run(one_by_one())
    assert sum(len(tree.turns) for tree in alone) > 80
    assert_equal(asyncio.run(stage.grow(range(4))), alone)
    stage.engine.counters.reset()
    pid = stage.engine.pid
    assert_equal(asyncio.run(with_a_kill()), alone)
    assert stage.engine.pid != pid


# ------------------------------------------------------------------------------------------------- what the cache holds
def test_with_admission_no_tree_is_computed_twice(stage: Stage) -> None:
    """Eight trees of up to 800 tokens through a cache of 1000, by SGLang's own count of what it found in its cache."""
    engine = stage.engine

    def computed_and_limit() -> tuple[int, int, int]:
        engine.counters.reset()
        trees = asyncio.run(stage.grow(range(8)))
        limit = cold = 0
        for tree in trees:
            requests = list(BENCH.requests_of([tree]))
            branches = len(requests) - len({tuple(request.prompt) for request in requests})
            limit += BENCH.computed_tokens(requests, shared=True) + branches
            cold += BENCH.computed_tokens(requests, shared=False)
        return engine.counters.computed_tokens, limit, cold

    computed, limit, cold = computed_and_limit()
    assert computed <= limit < cold < engine.counters.prompt_tokens
    assert engine._requests.retractions == 0
    assert engine._requests._gate._known.pinned_tokens == 0, "every tree was released"
    engine.publish(BENCH.checkpoint_weights(POLICY), version=engine.version + 1)
    engine._requests._gate = Gate(slots=SLOTS, cache_tokens=10**6)  # as good as none
    without, same, _ = computed_and_limit()
    assert same == limit
    assert without > 1.1 * limit


def test_a_finished_tree_is_thrown_out_before_a_running_one(stage: Stage) -> None:
    """SGLang alone would throw out what was not used for longest, which is the running one here."""
    engine = stage.engine
    running, finished, *others = ([10 + n] * 300 for n in range(4))

    async def ask(ids: list[int], session: str) -> Completion:
        return await engine.generate(ids, seed=0, sampling=Sampling(1, frozenset(), 1.0), session=session)

    async def test() -> tuple[int, int]:
        await ask(running, "running")
        await ask(finished, "finished")
        engine.release("finished")
        for number, ids in enumerate(others):  # 4 * 300 do not fit
            await ask(ids, str(number))
            engine.release(str(number))
        cached = [(await ask(ids, "running")).cached_tokens for ids in (running, finished)]
        engine.release("running")
        return cached[0], cached[1]

    still, gone = asyncio.run(test())
    assert still == len(running) - 1
    assert gone < len(finished) // 2


# --------------------------------------------------------------------------------------------------------------- order
def test_old_trees_go_before_new_ones(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four slots for eight trees, and no other reason to wait."""
    engine = stage.engine
    engine._requests._gate = Gate(slots=4, cache_tokens=10**6)
    sent: list[int] = []
    send = engine._process.send

    def note(call: str, **fields: Any) -> Any:
        if call == "generate":
            sent.append(int(fields["session"]))
        return send(call, **fields)

    monkeypatch.setattr(engine._process, "send", note)
    asyncio.run(stage.grow(range(8)))
    turns = [[position for position, tree in enumerate(sent) if tree == number] for number in range(8)]
    assert min(map(len, turns)) >= 4
    means = [sum(positions) / len(positions) for positions in turns]
    assert means == sorted(means)
    begins = [min(positions) for positions in turns]
    assert begins == sorted(begins)


def test_sglangs_queue_keeps_the_order(stage: Stage) -> None:
    """Past the gate, with more requests than slots: the first fill them, the others go by priority."""
    process = stage.engine._process
    priorities = [-(7 * n % (2 * SLOTS) + 1) for n in range(2 * SLOTS)]
    answered: list[int] = []

    def ask(priority: int, tokens: int) -> Any:
        _, answer = process.send(
            "generate",
            ids=[20, 21, 22 - priority],
            sampling={"temperature": 1.0, "sampling_seed": 1},
            max_new_tokens=tokens,
            session="x",
            priority=priority,
            announce=False,
            routes=None,
        )
        answer.add_done_callback(lambda _: answered.append(priority))
        return answer

    waiting = [ask(0, 60) for _ in range(SLOTS)] + [ask(priority, 8) for priority in priorities]
    for answer in waiting:
        answer.result(60)
    process.call("close_session", seconds=60, session="x")
    assert answered[:SLOTS] == [0] * SLOTS
    for nth in range(2):
        found = answered[(nth + 1) * SLOTS : (nth + 2) * SLOTS]
        assert sorted(found, reverse=True) == [-priority for priority in range(nth * SLOTS + 1, (nth + 1) * SLOTS + 1)]


# --------------------------------------------------------------------------------------------------------------- abort
def test_an_aborted_tree_is_whole_and_leaves_the_others_alone(stage: Stage) -> None:
    engine = stage.engine
    whole = asyncio.run(stage.grow(range(3)))
    engine.counters.reset()

    async def abort_one() -> list[RolloutTree]:
        growing = asyncio.create_task(stage.grow(range(3)))
        while engine.counters.requests < 12:
            await asyncio.sleep(0.01)
        engine.abort("0")
        return await growing

    cut, *others = asyncio.run(abort_one())
    assert_equal(others, whole[1:])
    cut.check()
    reward.score_tree(reward.build(stage.recipe.reward), cut)
    aborted = [turn for turn in cut.turns if turn.finish == "abort"]
    assert aborted
    for turn in aborted:
        assert (turn.terminal, turn.action, turn.prediction, turn.reward) == (True, "abort", None, 0.0)
        assert turn.sampled_ids
    assert cut.token_count < whole[0].token_count
    assert engine._requests._gate._known.pinned_tokens == 0


# ---------------------------------------------------------------------------------------------------------------- idle
def processor_seconds(group: int) -> float:
    """What the processes of a group have used so far."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[2]) == group:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_an_idle_engine_leaves_the_cores_to_the_trainer(stage: Stage) -> None:
    """Its scheduler would poll without a pause; it takes a hundredth of a core now."""
    time.sleep(1)
    before = processor_seconds(stage.engine.pid)
    time.sleep(3)
    assert processor_seconds(stage.engine.pid) - before < 0.3
