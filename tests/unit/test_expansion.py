"""How trees grow: forking rule, budgets, merging, determinism, with scripted parts and with the embedded engine."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_fixtures import ANSWER, OBSERVATION, SEARCH, ScriptedEngine, ScriptedEnvironment, random_policy

from megatron_treeopsd import config
from megatron_treeopsd.engine.base import Engine, EngineError, Sampling
from megatron_treeopsd.engine.embedded import EmbeddedEngine
from megatron_treeopsd.environment.base import Environment, Outcome
from megatron_treeopsd.expansion import build
from megatron_treeopsd.expansion.base import Expansion
from megatron_treeopsd.tree import ROOT, Question, RolloutTree, TreeError

pytestmark = pytest.mark.fast

QUESTION = Question("q", "40 41 42", ())


def make(
    engine: Engine,
    *,
    environment: Environment | None = None,
    max_turns: int = 5,
    context: int = 200,
    temperature: float = 1.0,
    **section: Any,
) -> Expansion:
    environment = environment or ScriptedEnvironment()
    parsed: config.Expansion
    if "chains" in section:
        parsed = config.Chains(name="chains", **section)
    else:
        parsed = config.InitializeThenExpand(name="initialize_then_expand", **section)
    task = config.Task(name="t", data=Path("unused"), max_turns=max_turns, max_context_tokens=context)
    sampling = Sampling(6, environment.stop_ids, temperature)
    return build(parsed, engine=engine, environment=environment, sampling=sampling, task=task)


def grow(expansion: Expansion, *, seed: int = 1, question: Question = QUESTION) -> RolloutTree:
    tree = asyncio.run(expansion.grow(question, seed=seed, session=f"s{seed}"))
    tree.check()
    return tree


def turns_in(prompt: list[int]) -> int:
    return prompt.count(OBSERVATION)


def never_ends(prompt: list[int], seed: int) -> list[int]:
    """Turns that differ from draw to draw, so that nothing merges."""
    return [10 + seed % 80, 10 + seed // 80 % 80, SEARCH]


def answers_after(turns: int) -> Callable[[list[int], int], list[int]]:
    def reply(prompt: list[int], seed: int) -> list[int]:
        return [*never_ends(prompt, seed)[:2], ANSWER if turns_in(prompt) == turns - 1 else SEARCH]

    return reply


def fork_starts(tree: RolloutTree, trunks: int) -> list[tuple[int, int]]:
    """(chain, number of turns in front of the fork) of every fork."""
    return [
        (turn.chain, len(tree.path(turn.parent)))
        for turn in tree.turns
        if turn.chain >= trunks and (turn.parent == ROOT or tree.turns[turn.parent].chain != turn.chain)
    ]


# ------------------------------------------------------------------------------------------------------ forking rule
def test_chains_are_independent_trajectories_from_the_prompt() -> None:
    engine = ScriptedEngine(answers_after(3))
    tree = grow(make(engine, chains=8))
    assert (tree.leaf_count, len(tree.turns)) == (8, 24)
    assert [turn.chain for turn in tree.turns] == [chain for chain in range(8) for _ in range(3)]
    assert sum(turn.parent == ROOT for turn in tree.turns) == 8
    assert engine.most_running == 8
    assert engine.opened == {"s1": 8 * 200}, "eight trajectories of at most 200 tokens"
    assert engine.released == ["s1"]


def test_trunks_and_forks_have_their_numbers_and_places() -> None:
    engine = ScriptedEngine(answers_after(5))
    tree = grow(make(engine, trunks=4, forks=2))
    assert tree.leaf_count == 12
    forks = fork_starts(tree, 4)
    assert [chain for chain, _ in forks] == list(range(4, 12))
    assert all(1 <= depth <= 4 for _, depth in forks)
    for turn in tree.turns:
        if turn.chain >= 4 and tree.turns[turn.parent].chain != turn.chain:
            assert tree.turns[turn.parent].chain == (turn.chain - 4) // 2  # each trunk has its own two forks
    assert all(len(tree.path(leaf)) == 5 for leaf in tree.terminals())
    assert engine.opened == {"s1": 12 * 200}
    assert engine.released == ["s1"]


def test_fork_depths_are_uniform_over_the_intermediate_turns_with_replacement() -> None:
    expansion = make(ScriptedEngine(answers_after(5)), trunks=4, forks=2)
    depths: Counter[int] = Counter()
    same = 0
    for seed in range(150):
        forks = [depth for _, depth in fork_starts(grow(expansion, seed=seed), 4)]
        depths.update(forks)
        same += sum(a == b for a, b in zip(forks[::2], forks[1::2], strict=True))
    assert set(depths) == {1, 2, 3, 4}  # never behind the prompt, never behind the last turn
    expected = 1200 / 4
    assert sum((count - expected) ** 2 / expected for count in depths.values()) < 16.3  # chi-square, 3 d.o.f., p=0.001
    assert abs(same / 600 - 1 / 4) < 0.06  # with replacement: two forks of a trunk meet in one of four turns


@pytest.mark.parametrize("turns", [2, 5])
def test_four_trunks_with_two_forks_cost_eight_trajectories(turns: int) -> None:
    """ALGORITHMS.md §1.1: E[(T-k)/T] = 1/2 for k uniform on 1..T-1, hence 4 + 4 * 2 / 2 = 8."""
    engine = ScriptedEngine(answers_after(turns))
    expansion = make(engine, trunks=4, forks=2)
    costs = []
    for seed in range(200):
        engine.counters.reset()
        grow(expansion, seed=seed)
        costs.append(engine.counters.generated_tokens / (3 * turns))
    error = float(np.std(costs)) / len(costs) ** 0.5
    assert abs(float(np.mean(costs)) - 8.0) <= 4 * error + 1e-9
    assert error < 0.05


def test_a_trunk_of_one_turn_is_forked_at_the_prompt_or_not_at_all() -> None:
    engine = ScriptedEngine(answers_after(1))
    tree = grow(make(engine, trunks=4, forks=2))
    assert (tree.leaf_count, len(tree.turns)) == (12, 12)
    assert all(turn.parent == ROOT for turn in tree.turns)
    tree = grow(make(engine, trunks=4, forks=2, fork_fallback="none"))
    assert tree.leaf_count == 4


def test_a_truncated_trunk_is_forked_within_the_budgets_that_are_left() -> None:
    engine = ScriptedEngine(never_ends)
    tree = grow(make(engine, trunks=3, forks=3, max_turns=4))
    assert tree.leaf_count == 12
    assert all(len(tree.path(leaf)) == 4 and tree.turns[leaf].prediction is None for leaf in tree.terminals())
    tree = grow(make(engine, trunks=3, forks=3, max_turns=50, context=33))
    assert max(len(tree.path_ids(leaf)) for leaf in tree.terminals()) <= 33
    assert {len(tree.path(leaf)) for leaf in tree.terminals()} == {6}  # 3 + 6 * (3 + 2) = 33


def test_forks_start_when_their_trunk_has_ended_and_run_together() -> None:
    """The second trunk is slow; the first trunk's forks are answered before it ends."""
    order: list[str] = []

    def reply(prompt: list[int], seed: int) -> list[int]:
        order.append("fork" if len(order) >= 2 and turns_in(prompt) else "trunk")
        return [*never_ends(prompt, seed)[:2], ANSWER if turns_in(prompt) else SEARCH]

    slow: set[int] = set()

    def delay(seed: int) -> int:
        if len(slow) < 2:
            slow.add(seed)
            return 50 * (len(slow) - 1)
        return 0

    engine = ScriptedEngine(reply, delay=delay)
    tree = grow(make(engine, trunks=2, forks=4))
    assert tree.leaf_count == 10
    first_trunk_done = [turns_in(prompt) for prompt, _, _, _ in engine.requests]
    assert first_trunk_done[:3] == [0, 0, 1]
    assert first_trunk_done[3:7] == [1, 1, 1, 1]  # four forks, before the second trunk's second turn
    assert engine.most_running >= 5


# ---------------------------------------------------------------------------------------------------------- merging
def test_identical_draws_become_one_turn_with_multiplicity() -> None:
    """All trunks say the same first, then differ: they share the first turn, and forks may hang below it."""

    def reply(prompt: list[int], seed: int) -> list[int]:
        return [50, SEARCH] if not turns_in(prompt) else [10 + seed % 80, 10 + seed // 80 % 80, ANSWER]

    tree = grow(make(ScriptedEngine(reply), trunks=4, forks=2))
    assert [turn.multiplicity for turn in tree.turns if turn.parent == ROOT] == [4]
    assert tree.turns[0].chain == 0
    assert tree.leaf_count == 12
    assert [turn.chain for turn in tree.turns] == [0, 0, *range(1, 12)]


def test_a_policy_that_always_says_the_same_gives_one_path() -> None:
    tree = grow(make(ScriptedEngine(lambda prompt, seed: [50, ANSWER if turns_in(prompt) == 2 else SEARCH])))
    assert [turn.multiplicity for turn in tree.turns[:1]] == [4]
    assert (len(tree.turns), tree.leaf_count) == (3, 12)
    assert sum(turn.multiplicity for turn in tree.turns) == sum(
        turn.multiplicity
        for turn in grow(
            make(ScriptedEngine(lambda p, s: [50, ANSWER if turns_in(p) == 2 else SEARCH]), merge_siblings=False)
        ).turns
    )


def test_without_merging_each_draw_is_a_turn() -> None:
    tree = grow(make(ScriptedEngine(lambda prompt, seed: [50, ANSWER]), chains=8))
    assert (len(tree.turns), tree.leaf_count) == (8, 8)


class Fickle(ScriptedEnvironment):
    """Answers the same turn differently each time."""

    def step(self, *arguments: Any, **options: Any) -> Outcome:
        outcome = super().step(*arguments, **options)
        return Outcome([*outcome.observation_ids[:-1], 30 + len(self.lasts)], done=False, action="search")


def test_merging_what_was_answered_differently_is_an_error() -> None:
    engine = ScriptedEngine(lambda prompt, seed: [50, SEARCH])
    with pytest.raises(TreeError, match="merge_siblings=false"):
        grow(make(engine, environment=Fickle(), max_turns=2))
    assert engine.released == ["s1"]
    grow(make(engine, environment=Fickle(), max_turns=2, merge_siblings=False))


# ------------------------------------------------------------------------------------------------------ determinism
def test_the_tree_does_not_depend_on_the_order_in_which_draws_come_back() -> None:
    def coarse(prompt: list[int], seed: int) -> list[int]:
        """Few different turns, so that chains merge; which of the twins comes first must not matter."""
        return [50 + seed % 2, ANSWER if seed % 5 == 0 else SEARCH]

    def jitter(key: str) -> Callable[[int], int]:
        return lambda seed: hashlib.blake2b(f"{key}{seed}".encode(), digest_size=1).digest()[0] % 17

    trees = [
        grow(make(ScriptedEngine(coarse, delay=delay), trunks=4, forks=3))
        for delay in (lambda seed: 0, jitter("a"), jitter("b"))
    ]
    assert any(turn.multiplicity > 1 for turn in trees[0].turns)
    for tree in trees[1:]:
        assert structure(tree) == structure(trees[0])


def structure(tree: RolloutTree) -> list[tuple[Any, ...]]:
    return [(t.parent, t.sampled_ids, t.observation_ids, t.terminal, t.multiplicity, t.chain) for t in tree.turns]


def questions(count: int) -> list[Question]:
    rng = random.Random(0)
    return [Question(str(i), " ".join(str(rng.randrange(4, 96)) for _ in range(8)), ()) for i in range(count)]


def test_the_same_seed_gives_the_same_tree_alone_and_in_a_crowd() -> None:
    """With the embedded engine: alone with many rows, and among five others with few rows and another order."""

    def grow_all(order: list[int], max_batch: int) -> dict[int, RolloutTree]:
        engine = EmbeddedEngine(random_policy(), max_batch=max_batch, cache_tokens=8192)
        expansion = make(engine, temperature=0.7)

        async def gather() -> list[RolloutTree]:
            calls = (expansion.grow(questions(6)[i], seed=i, session=str(i)) for i in order)
            return list(await asyncio.gather(*calls))

        trees = asyncio.run(gather())
        engine.cache.check()
        assert engine.cache.pins == 0
        return dict(zip(order, trees, strict=True))

    crowd = grow_all([4, 2, 0, 5, 1, 3], max_batch=16)
    for index in (0, 5):
        alone = grow_all([index], max_batch=64)[index]
        assert structure(alone) == structure(crowd[index])
        for a, b in zip(alone.turns, crowd[index].turns, strict=True):
            assert a.sampled_logprobs == pytest.approx(b.sampled_logprobs, abs=1e-5)
    assert structure(crowd[0]) != structure(crowd[1])


def test_other_seeds_give_other_trees() -> None:
    expansion = make(ScriptedEngine(answers_after(4)))
    assert structure(grow(expansion, seed=1)) == structure(grow(expansion, seed=1))
    assert structure(grow(expansion, seed=1)) != structure(grow(expansion, seed=2))


# ----------------------------------------------------------------------------------------------------------- errors
def test_an_engine_error_stops_the_tree_and_frees_its_session() -> None:
    def reply(prompt: list[int], seed: int) -> list[int]:
        if turns_in(prompt) == 2:
            raise EngineError("request 17 was lost")
        return never_ends(prompt, seed)

    engine = ScriptedEngine(reply)

    async def check() -> None:
        with pytest.raises(EngineError, match="request 17 was lost"):
            await make(engine).grow(QUESTION, seed=1, session="x")
        asked = len(engine.requests)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(engine.requests) == asked  # nothing goes on behind the error

    asyncio.run(check())
    assert engine.released == ["x"]


def test_the_turn_limit_is_the_smaller_one_of_task_and_sampling() -> None:
    engine = ScriptedEngine(never_ends)
    task = config.Task(name="t", data=Path("unused"), max_turn_tokens=2)
    environment = ScriptedEnvironment()
    expansion = build(
        config.Chains(name="chains", chains=1),
        engine=engine,
        environment=environment,
        sampling=Sampling(6, environment.stop_ids),
        task=task,
    )
    grow(expansion)
    assert {sampling.max_new_tokens for _, _, sampling, _ in engine.requests} == {2}


def test_sampled_expansions_ask_for_no_curriculum() -> None:
    expansion = make(ScriptedEngine(never_ends))
    expansion.set_progress(0.5)
    assert expansion.needs_engine
    assert expansion.question_weights(0.5) is None
