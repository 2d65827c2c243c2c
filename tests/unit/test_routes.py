"""Routes of a tree's tokens: asked for once, kept once, and missed where they are missing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_fixtures import ScriptedEnvironment, random_policy, reference_routes
from trees import random_tree

from megatron_treeopsd import config, expansion
from megatron_treeopsd.engine.base import Completion, Sampling
from megatron_treeopsd.engine.embedded import EmbeddedEngine
from megatron_treeopsd.routes import UNROUTED, add_routes, check_routed, known_length, route_dtype, token_routes
from megatron_treeopsd.tree import ROOT, Question, RolloutTree, TreeError, Turn

pytestmark = pytest.mark.fast

LAYERS, CHOSEN = 3, 2


def routes(first: int, count: int, dtype: type = np.int8) -> np.ndarray:
    """Token number `first + i` has route [first + i, ...]."""
    return np.broadcast_to(np.arange(first, first + count, dtype=dtype)[:, None, None], (count, LAYERS, CHOSEN))


def numbers(found: np.ndarray | None) -> list[int]:
    assert found is not None
    assert (found == found[:, :1, :1]).all()
    return found[:, 0, 0].tolist()


def example() -> RolloutTree:
    """The worked example of tree.py: a turn [5, 8, 6] + [9, 9] and two answers behind it."""
    tree = RolloutTree(Question("q", "", ()), [1, 7])
    tree.add(Turn(ROOT, [5, 8, 6], [0.0] * 3, [9, 9]))
    return tree


def test_each_token_is_asked_for_once_and_the_first_answer_stays() -> None:
    tree = example()
    assert known_length(tree, ROOT) == known_length(tree, 0) == 0
    add_routes(tree, 0, 0, routes(10, 4))  # the prompt and two of three sampled tokens
    assert (known_length(tree, ROOT), known_length(tree, 0)) == (2, 4)
    first = tree.add(Turn(0, [3, 4], [0.0] * 2, terminal=True), merge=False)
    add_routes(tree, first, 4, routes(14, 4))  # the rest of the turn, and one of two tokens of the answer
    second = tree.add(Turn(0, [3, 2], [0.0] * 2, terminal=True), merge=False)
    add_routes(tree, second, 4, routes(94, 4))  # was asked at the same time: the turn above has its routes already
    assert numbers(tree.prompt_routes) == [10, 11]
    assert numbers(tree.turns[0].routes) == [12, 13, 14, 15, 16]
    assert numbers(tree.turns[first].routes) == [17, UNROUTED]
    assert numbers(tree.turns[second].routes) == [97, UNROUTED]
    assert tree.turns[0].routes is not None
    assert tree.turns[0].routes.dtype == np.int8
    check_routed(tree)


def test_a_turn_without_sampled_tokens_or_observation_leaves_no_gap() -> None:
    tree = RolloutTree(Question("q", "", ()), [1, 7])
    tree.add(Turn(ROOT, [], [], [9]), merge=False)
    tree.add(Turn(0, [4], [0.0], terminal=True), merge=False)
    add_routes(tree, 1, 0, routes(0, 3))
    assert numbers(tree.turns[0].routes) == [2]
    assert known_length(tree, 1) == 3
    check_routed(tree)


def test_merged_siblings_complete_each_other() -> None:
    tree = example()
    add_routes(tree, 0, 0, routes(0, 4))
    twin = RolloutTree(tree.question, tree.prompt_ids)
    twin.add(Turn(ROOT, [5, 8, 6], [0.0] * 3, [9, 9]))
    twin.add(Turn(0, [3], [0.0], terminal=True))
    add_routes(twin, 1, 0, routes(50, 7))
    assert tree.add(twin.turns[0]) == 0
    assert numbers(tree.turns[0].routes) == [2, 3, 54, 55, 56]


def test_missing_routes_are_named() -> None:
    tree = example()
    tree.add(Turn(0, [3, 4], [0.0] * 2, terminal=True))
    with pytest.raises(
        TreeError, match="question q: the engine returned the routes of 0 tokens on the path to turn 0, 4"
    ):
        check_routed(tree)
    add_routes(tree, 0, 0, routes(0, 4))
    with pytest.raises(TreeError, match=r"routes of 4 tokens on the path to turn 1, 8 are needed for mismatch\.routes"):
        check_routed(tree)
    tree.turns[1].finish = "abort"
    check_routed(tree)


def test_routes_that_do_not_fit_are_refused() -> None:
    tree = example()
    with pytest.raises(TreeError, match="from token 3 on leave a gap behind the 0 that are known"):
        add_routes(tree, 0, 3, routes(0, 2))
    with pytest.raises(TreeError, match="routes of 8 tokens for a path of 7"):
        add_routes(tree, 0, 0, routes(0, 8))


def test_expert_numbers_take_no_more_bytes_than_they_need() -> None:
    assert [route_dtype(experts) for experts in (8, 128, 129, 512)] == [np.int8, np.int8, np.int16, np.int16]


def test_a_tree_without_routes_has_none_and_an_aborted_turn_is_unrouted() -> None:
    tree = random_tree(0)
    assert token_routes(tree, None) is token_routes(tree, tree.turns[0]) is None
    tree.prompt_routes = routes(0, len(tree.prompt_ids))
    assert numbers(token_routes(tree, tree.turns[0])) == [UNROUTED] * len(tree.turns[0])


class CountingEngine(EmbeddedEngine):
    """Counts the tokens whose routes it has returned."""

    returned = 0

    async def generate(
        self, prompt_ids: Sequence[int], *, seed: int, sampling: Sampling, session: str, routes_from: int = 0
    ) -> Completion:
        completion = await super().generate(
            prompt_ids, seed=seed, sampling=sampling, session=session, routes_from=routes_from
        )
        assert completion.routes is not None
        self.returned += len(completion.routes)
        return completion


def test_a_grown_tree_has_the_routers_routes_and_was_sent_hardly_more() -> None:
    """Trunks that start together each get the prompt's routes; nothing else is sent twice."""
    model = random_policy()
    engine = CountingEngine(random_policy(), max_batch=16, cache_tokens=4096, routes=True)
    engine.version = 0
    world = ScriptedEnvironment()
    sampled = expansion.build(
        config.InitializeThenExpand(name="initialize_then_expand", trunks=3, forks=2, merge_siblings=False),
        engine=engine,
        environment=world,
        sampling=Sampling(6, world.stop_ids, routes=True),
        task=config.Task(name="t", data=Path("unused"), max_turns=4, max_context_tokens=200),
    )
    tree = asyncio.run(sampled.grow(Question("q", "40 41 42 43", ()), seed=3, session="s"))
    check_routed(tree)
    for leaf in tree.terminals():
        found = np.concatenate([token_routes(tree, None), *(tree.turns[v].routes for v in tree.path(leaf))])  # type: ignore[list-item]
        expected = reference_routes(model, tree.path_ids(leaf)[:-1])
        assert torch.equal(torch.from_numpy(found[:-1].astype(int)).sort(-1).values, expected)
        assert (found[-1] == UNROUTED).all()
    routed = tree.token_count - len(tree.terminals())
    assert len(tree.turns) > 9
    assert routed <= engine.returned <= routed + 8 * len(tree.prompt_ids)  # forks of one-turn trunks start at the root
