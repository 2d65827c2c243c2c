"""One trajectory: masks, budgets, finish reasons, states and seeds, with a scripted engine and environment."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from engine_fixtures import ANSWER, OBSERVATION, SEARCH, ScriptedEngine, ScriptedEnvironment

from megatron_treeopsd.engine.base import Completion, Sampling
from megatron_treeopsd.episode import Budgets, EpisodeError, play
from megatron_treeopsd.questions import stable_seed
from megatron_treeopsd.tree import ROOT, Question, RolloutTree

pytestmark = pytest.mark.fast

PROMPT = [40, 41, 42]
SAMPLING = Sampling(4, frozenset({SEARCH, ANSWER}), temperature=0.7)


class Stage:
    """A tree with everything that `play` needs."""

    def __init__(self, *turns: list[int], max_turns: int = 5, context: int = 100) -> None:
        """`turns[d]` is what the policy says at depth d, whoever asks; the last one repeats."""
        self.environment = ScriptedEnvironment()
        self.tree = RolloutTree(Question("q7", "40 41 42", ()), list(PROMPT))
        self.states: dict[int, Any] = {ROOT: None}
        self.budgets = Budgets(max_turns=max_turns, max_context_tokens=context)
        self.engine = ScriptedEngine(lambda prompt, seed: turns[min(prompt.count(OBSERVATION), len(turns) - 1)])

    def play(self, node: int = ROOT, *, chain: int = 0, seed: int = 11) -> int:
        return asyncio.run(
            play(
                self.tree,
                node,
                engine=self.engine,
                environment=self.environment,
                states=self.states,
                sampling=SAMPLING,
                budgets=self.budgets,
                session="s",
                seed=seed,
                chain=chain,
            )
        )


def test_a_trajectory_token_by_token() -> None:
    stage = Stage([50, SEARCH], [51, 52, SEARCH], [53, ANSWER])
    leaf = stage.play(chain=2)
    stage.tree.check()
    first, second, third = stage.tree.turns
    assert leaf == 2
    assert [turn.sampled_ids for turn in stage.tree.turns] == [[50, SEARCH], [51, 52, SEARCH], [53, ANSWER]]
    assert [turn.observation_ids for turn in stage.tree.turns] == [[OBSERVATION, 1], [OBSERVATION, 2], []]
    assert [turn.parent for turn in stage.tree.turns] == [ROOT, 0, 1]
    assert [turn.terminal for turn in stage.tree.turns] == [False, False, True]
    assert [turn.action for turn in stage.tree.turns] == ["search", "search", "answer"]
    assert (first.prediction, second.prediction, third.prediction) == (None, None, "53")
    assert {turn.finish for turn in stage.tree.turns} == {"stop"}
    assert {turn.chain for turn in stage.tree.turns} == {2}
    assert {turn.version for turn in stage.tree.turns} == {stage.engine.version}
    assert stage.environment.lasts == [False, False, False]
    assert stage.states == {ROOT: None, 0: 1, 1: 2, 2: 3}


def test_only_what_the_engine_sampled_counts_as_sampled() -> None:
    """Token-in/token-out: prompts are path tokens, and no token outside a completion carries a log-probability."""
    stage = Stage([50, SEARCH], [51, 52, SEARCH], [53, ANSWER])
    stage.play()
    path = list(PROMPT)
    for turn, (prompt, seed, sampling, session) in zip(stage.tree.turns, stage.engine.requests, strict=True):
        assert prompt == path
        assert session == "s"
        assert sampling == SAMPLING
        assert turn.sampled_logprobs == [-float(seed % 7)] * len(turn.sampled_ids)
        path += turn.sampled_ids + turn.observation_ids
    assert stage.tree.path_ids(2) == path
    assert stage.tree.sampled_count == stage.engine.counters.generated_tokens == 7


def test_seeds_come_from_seed_chain_and_depth() -> None:
    stage = Stage([50, SEARCH], [53, ANSWER])
    stage.play(seed=5, chain=3)
    seeds = [seed for _, seed, _, _ in stage.engine.requests]
    assert seeds == [stable_seed(5, 3, 0), stable_seed(5, 3, 1)]
    # a changed rule would silently change every experiment
    assert stable_seed(5, 3, 0) == 3078613692664125691


def test_a_turn_without_a_stop_token_goes_to_the_environment_as_it_is() -> None:
    stage = Stage([50, 51, 52, 53, 54, 55], [53, ANSWER])
    stage.play()
    assert stage.tree.turns[0].sampled_ids == [50, 51, 52, 53]
    assert (stage.tree.turns[0].finish, stage.tree.turns[0].action) == ("length", "invalid")


def test_the_last_turn_is_announced_and_ends_without_a_prediction() -> None:
    stage = Stage([50, SEARCH], max_turns=3)
    leaf = stage.play()
    assert stage.environment.lasts == [False, False, True]
    turn = stage.tree.turns[leaf]
    assert (turn.terminal, turn.prediction, turn.observation_ids) == (True, None, [])
    assert len(stage.tree.path(leaf)) == 3


@pytest.mark.parametrize(
    ("context", "turns", "last_length", "why"),
    [
        (11, 2, 4, "a second turn of 4 fits exactly: 3 + 2 + 2 + 4"),
        (10, 2, 3, "the second turn is cut to the 3 tokens that are left"),
        (8, 2, 1, "one token is left for the second turn"),
        (7, 1, 2, "the observation would leave no token for another turn"),
        (5, 1, 2, "the first turn fills the context"),
        (4, 1, 1, "the first turn is cut to one token"),
    ],
)
def test_the_context_bounds_the_whole_path(context: int, turns: int, last_length: int, why: str) -> None:
    stage = Stage([50, SEARCH], [51, 52, 53, 54, ANSWER], context=context)
    leaf = stage.play()
    turn = stage.tree.turns[leaf]
    assert len(stage.tree.turns) == turns, why
    assert (len(turn.sampled_ids), turn.observation_ids, turn.terminal, turn.prediction) == (
        last_length,
        [],
        True,
        None,
    )
    assert len(stage.tree.path_ids(leaf)) <= context
    assert stage.environment.lasts[-1] == (len(PROMPT) + 4 * (turns - 1) + last_length >= context)


def test_a_prompt_that_fills_the_context_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(EpisodeError, match=r"question q7: 3 tokens .* task\.max_context_tokens=3; raise it"):
        Stage([50, ANSWER], context=3).play()


def test_a_fork_continues_with_the_state_and_the_budgets_of_its_node() -> None:
    stage = Stage([50, SEARCH], max_turns=4)
    trunk = stage.tree.path(stage.play())
    fork = stage.play(trunk[1], chain=1)
    path = stage.tree.path(fork)
    assert path[:2] == trunk[:2]
    assert len(path) == 4  # two turns were left
    assert [stage.tree.turns[i].observation_ids[-1:] for i in path] == [[1], [2], [3], []]
    assert [stage.tree.turns[i].chain for i in path] == [0, 0, 1, 1]
    stage.tree.check()


def test_an_aborted_turn_ends_the_trajectory_without_asking_the_environment() -> None:
    stage = Stage([50, SEARCH])
    generate = stage.engine.generate

    async def abort_second(prompt: list[int], **arguments: Any) -> Completion:
        completion = await generate(prompt, **arguments)
        return replace(completion, finish="abort") if len(stage.engine.requests) == 2 else completion

    stage.engine.generate = abort_second  # type: ignore[method-assign,assignment]
    leaf = stage.play()
    turn = stage.tree.turns[leaf]
    assert (len(stage.tree.turns), turn.finish, turn.action) == (2, "abort", "abort")
    assert (turn.terminal, turn.prediction) == (True, None)
    assert stage.environment.lasts == [False]
