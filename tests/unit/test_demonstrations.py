"""The scripted agent, and what becomes of its trajectories."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from factbook_data import questions, recipe, search_environment, task

from megatron_treeopsd import config, reward
from megatron_treeopsd.environment.base import Environment, Outcome
from megatron_treeopsd.environment.factbook.demonstrator import Demonstrator
from megatron_treeopsd.environment.factbook.questions import Hop, chain_of
from megatron_treeopsd.environment.factbook.world import Facts
from megatron_treeopsd.environment.retrieval.base import Passage
from megatron_treeopsd.expansion.demonstrations import DemonstrationsExpansion
from megatron_treeopsd.tree import Question, RolloutTree

pytestmark = pytest.mark.fast

NAMES = ("factbook", "factbook_long")
FACTS = Facts.index(
    {
        "Switzerland": {"capital": "Bern", "export partner": "Germany"},
        "Germany": {"capital": "Berlin", "currency": "euros"},
    }
)
CHAIN = (
    Hop("inverse", "capital", "Bern", "Switzerland"),
    Hop("forward", "export partner", "Switzerland", "Germany"),
    Hop("forward", "currency", "Germany", "euros"),
)
CLEAN = ("capital Bern", "export partner Switzerland", "currency Germany")


def settings(**changes: Any) -> config.Demonstrations:
    return config.Demonstrations(name="demonstrations", **changes)


def first_fact(query: str) -> list[Passage]:
    return [Passage("x", "Chad", "The anthem is The Chadian."), Passage("y", "Germany", "The currency is euros.")]


def play(seed: int = 0, *, noise: float = 1.0, max_turns: int = 5, search: Any = first_fact, **changes: Any) -> Any:
    agent = Demonstrator(FACTS, search, settings(**changes))
    return agent.play(CHAIN, noise=noise, max_turns=max_turns, draw=random.Random(seed))


# --------------------------------------------------------------------------------------------------------------- agent
@pytest.mark.parametrize("changes", [{"noise": 0.0, "correct_hop": 0.0}, {"correct_hop": 1.0, "early_stop": 0.0}])
def test_an_agent_that_does_not_err_walks_the_chain(changes: dict[str, float]) -> None:
    for seed in range(20):
        demonstration = play(seed, **changes)
        assert (demonstration.queries, demonstration.answer) == (CLEAN, "euros")


def test_an_agent_that_notices_every_error_searches_until_its_turns_are_over() -> None:
    for seed in range(20):
        demonstration = play(seed, correct_hop=0.0, retry=1.0, max_turns=9)
        assert len(demonstration.queries) == 8
        # it never leaves the first hop, and answers with what it takes from the first passage at last
        assert {query.split()[-1] for query in demonstration.queries} <= {"Bern", "capital"}
        assert demonstration.answer == "Chad"


def test_an_agent_that_notices_nothing_takes_the_first_passage() -> None:
    for seed in range(20):
        demonstration = play(seed, correct_hop=0.0, retry=0.0, early_stop=0.0)
        assert len(demonstration.queries) == 3
        assert demonstration.queries[0] in {"Bern", "capital"} or demonstration.queries[0].endswith(" Bern")
        # an inverse hop takes the title, a forward hop the value that is stated
        assert "Chad" in demonstration.queries[1] or demonstration.queries[1] == "export partner"
        assert demonstration.answer == "The Chadian"


def test_an_agent_that_finds_nothing_keeps_what_it_has() -> None:
    assert play(correct_hop=0.0, retry=0.0, early_stop=0.0, search=lambda query: []).answer == "Bern"


def test_stopping_early_and_short_budgets() -> None:
    assert play(correct_hop=1.0, early_stop=1.0) == play(noise=0.0, max_turns=2)
    assert play(correct_hop=1.0, early_stop=1.0).answer == "Switzerland"
    assert play(noise=0.0, max_turns=1).queries == ()


def test_how_often_queries_are_faulty_and_of_which_kind() -> None:
    """First queries against the shares of the settings: 42 % right, of the rest 30, 30 and 40 % of each kind."""
    kinds: Counter[str] = Counter()
    for seed in range(4000):
        query = play(seed, correct_hop=0.42).queries[0]
        named = {"Bern": "entity", "capital": "field", "capital Bern": "right", "export partner Bern": "next"}
        kinds[named.get(query, "wrong")] += 1
    share = {kind: count / 4000 for kind, count in kinds.items()}
    other = 0.58 * 0.4 * 0.4 / 15  # one of fifteen fields, drawn by chance
    assert share["right"] == pytest.approx(0.42 + other, abs=0.025)
    assert share["entity"] == pytest.approx(0.58 * 0.3, abs=0.025)
    assert share["field"] == pytest.approx(0.58 * 0.3, abs=0.025)
    assert share["next"] == pytest.approx(0.58 * 0.4 * 0.6 + other, abs=0.025)


# ----------------------------------------------------------------------------------------------------------- expansion
@cache
def expansion(name: str, progress: float, **changes: Any) -> DemonstrationsExpansion:
    section = recipe(name).expansion.model_copy(update=changes)
    assert isinstance(section, config.Demonstrations)
    built = DemonstrationsExpansion(section, environment=search_environment(name), task=task(name))
    built.set_progress(progress)
    return built


def grow(built: DemonstrationsExpansion, question: Question, seed: int) -> RolloutTree:
    return asyncio.run(built.grow(question, seed=seed, session="s"))


def scored(built: DemonstrationsExpansion, name: str, count: int) -> list[RolloutTree]:
    sample = random.Random(0).sample(questions(name, "train"), count)
    trees = [grow(built, question, seed) for seed, question in enumerate(sample)]
    for tree in trees:
        reward.score_tree(reward.build(config.Reward()), tree)
    return trees


@pytest.mark.parametrize("name", NAMES)
def test_clean_demonstrations_are_right_and_within_all_budgets(name: str) -> None:
    budgets = task(name)
    for tree in scored(expansion(name, 0.0), name, 150):
        assert tree.leaf_rewards().tolist() == [1.0]
        check_form(tree, budgets)
        assert len(tree.turns) == tree.question.metadata["hops"] + 1


@pytest.mark.parametrize("name", NAMES)
def test_noisy_demonstrations_are_well_formed_and_often_wrong(name: str) -> None:
    trees = scored(expansion(name, 1.0), name, 200)
    for tree in trees:
        check_form(tree, task(name))
    right = np.mean([tree.leaf_rewards()[0] for tree in trees])
    assert 0.2 < right < 0.55 if name == "factbook" else 0.4 < right < 0.75


def check_form(tree: RolloutTree, budgets: config.Task) -> None:
    tree.check()
    assert len(tree.turns) <= budgets.max_turns
    assert tree.token_count <= budgets.max_context_tokens
    assert [turn.parent for turn in tree.turns] == list(range(-1, len(tree.turns) - 1))
    assert [turn.action for turn in tree.turns] == ["search"] * (len(tree.turns) - 1) + ["answer"]
    tags = search_environment("factbook").tokenizer.convert_tokens_to_ids
    for turn in tree.turns:
        assert len(turn.sampled_ids) <= budgets.max_turn_tokens
        assert len(turn.observation_ids) <= budgets.max_observation_tokens
        assert turn.sampled_logprobs == [0.0] * len(turn.sampled_ids)
        kind = "answer" if turn.terminal else "search"
        assert (turn.sampled_ids[0], turn.sampled_ids[-1]) == (tags(f"<{kind}>"), tags(f"</{kind}>"))
        if not turn.terminal:
            assert turn.observation_ids[0] == tags("<information>")
            assert turn.observation_ids[-1] == tags("</information>")


def test_unshuffled_demonstrations_are_what_the_environment_answers() -> None:
    built = expansion("factbook", 1.0, symbol_shuffle=0.0)
    environment = search_environment("factbook")
    for tree in scored(built, "factbook", 20):
        assert tree.prompt_ids == environment.prompt(tree.question)
        for turn in tree.turns:
            outcome = environment.step(tree.question, None, turn.sampled_ids, last=False)
            assert outcome == Outcome(turn.observation_ids, turn.terminal, turn.action, turn.prediction)


def test_shuffling_renames_content_words_consistently_and_nothing_else() -> None:
    plain_trees = scored(expansion("factbook", 1.0, symbol_shuffle=0.0), "factbook", 60)
    shuffled_trees = scored(expansion("factbook", 1.0, symbol_shuffle=1.0), "factbook", 60)
    tokenizer = search_environment("factbook").tokenizer
    structure = {*range(13), *tokenizer("what is the country whose of ? | . export partner highest point")["input_ids"]}
    for before, after in zip(plain_trees, shuffled_trees, strict=True):
        assert [len(turn) for turn in before.turns] == [len(turn) for turn in after.turns]
        assert [turn.prediction for turn in before.turns] == [turn.prediction for turn in after.turns]
        last = len(before.turns) - 1
        pairs = set(zip(before.path_ids(last), after.path_ids(last), strict=True))
        assert len(pairs) == len({old for old, _ in pairs}) == len({new for _, new in pairs})
        assert all(old == new for old, new in pairs if old in structure)
        assert all(new not in structure for old, new in pairs if old not in structure)
        renamed = [
            old != new for old, new in pairs if tokenizer.decode([old]) in {"kuwait", "germany", "china", "euros"}
        ]
        assert all(renamed)
        assert before.path_ids(last) != after.path_ids(last)


def test_share_of_shuffled_demonstrations() -> None:
    environment = search_environment("factbook")

    def share(progress: float, symbol_shuffle: float) -> float:
        trees = scored(expansion("factbook", progress, symbol_shuffle=symbol_shuffle), "factbook", 150)
        return float(np.mean([tree.prompt_ids != environment.prompt(tree.question) for tree in trees]))

    assert share(1.0, 0.5) == pytest.approx(0.5, abs=0.1)
    assert share(0.0, 0.5) == pytest.approx(0.8, abs=0.1)
    assert share(0.0, 0.0) == 0.0


def test_the_seed_alone_decides() -> None:
    first, second = expansion("factbook", 1.0), DemonstrationsExpansion(
        settings(), environment=search_environment("factbook"), task=task("factbook")
    )  # fmt: skip
    second.set_progress(1.0)
    sample = questions("factbook", "train")[:8]
    trees = [grow(first, question, seed) for seed, question in enumerate(sample)]
    np.random.seed(0)
    random.seed(0)
    again = [grow(second, question, seed) for seed, question in reversed(list(enumerate(sample)))]
    assert again[::-1] == trees
    assert any(grow(first, question, seed + 100) != trees[seed] for seed, question in enumerate(sample))


def test_curriculum() -> None:
    built = expansion("factbook", 0.0, curriculum=0.3)
    assert built.question_weights(0.0) == {1: 1.0}
    assert built.question_weights(0.29) == {1: 1.0}
    assert built.question_weights(0.3) == {1: 0.4, 2: 0.6}
    assert built.question_weights(0.6) is None
    assert built.question_weights(1.0) is None
    assert expansion("factbook_long", 0.0).question_weights(0.31) == {3: 0.4, 4: 0.6}
    assert expansion("factbook", 0.0, curriculum=0.0).question_weights(0.0) is None
    assert not built.needs_engine


def test_noise_begins_after_the_curriculum() -> None:
    sample = [question for question in questions("factbook", "train") if question.metadata["hops"] == 3][:40]
    built = expansion("factbook", 0.0, curriculum=0.2, correct_hop=0.1)
    shares = []
    for progress in (0.0, 0.39, 0.4):
        built.set_progress(progress)
        trees = [grow(built, question, seed) for seed, question in enumerate(sample)]
        shares.append(np.mean([len(tree.turns) == 4 and correct(tree) for tree in trees]))
    assert shares[0] == shares[1] == 1.0
    assert shares[2] < 0.5


def correct(tree: RolloutTree) -> bool:
    return reward.build(config.Reward()).score(tree.question, tree.turns[-1].prediction) == 1.0


def test_queries_of_clean_demonstrations_follow_the_chain() -> None:
    tokenizer = search_environment("factbook").tokenizer
    for tree in scored(expansion("factbook", 0.0, symbol_shuffle=0.0), "factbook", 20):
        searches = [tokenizer.decode(turn.sampled_ids[1:-1]) for turn in tree.turns[:-1]]
        encoded = [search_environment("factbook").encode(hop.query) for hop in chain_of(tree.question)]
        assert searches == [tokenizer.decode(ids) for ids in encoded]
        assert all(before != after for before, after in pairwise(searches))


def test_what_is_refused() -> None:
    class Other(Environment):
        stop_ids = frozenset({1})

        def prompt(self, question: Question) -> list[int]:
            return [1]

        def step(self, question: Question, state: Any, sampled_ids: Any, *, last: bool) -> Outcome:
            return Outcome([], True, "answer")

    with pytest.raises(config.RecipeError, match=r"expansion\.name=demonstrations needs task\.environment=search"):
        DemonstrationsExpansion(settings(), environment=Other(), task=task("factbook"))
    tight = DemonstrationsExpansion(
        settings(), environment=search_environment("factbook"), task=task("factbook", max_turn_tokens=3)
    )
    with pytest.raises(ValueError, match=r"question factbook-train-00000: .* more than task\.max_turn_tokens=3"):
        grow(tight, questions("factbook", "train")[0], 0)
