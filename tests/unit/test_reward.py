"""Rewards: Search-R1's normalisation, aliases, empty answers, and trees."""

from __future__ import annotations

import pytest

from megatron_treeopsd import config, reward
from megatron_treeopsd.reward.normalise import normalise
from megatron_treeopsd.tree import ROOT, Question, RolloutTree, Turn

pytestmark = pytest.mark.fast


def question(*answers: str) -> Question:
    return Question("q", "What?", answers)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("U.S.A.", "usa"),
        ("The A-Team", "ateam"),
        ("1,000", "1000"),
        ("a", ""),
        ("  An  apple\nof the Eye ", "apple of eye"),
        ("Theory", "theory"),
        ("café", "café"),
    ],
)
def test_normalisation(text: str, expected: str) -> None:
    assert normalise(text) == expected


@pytest.mark.parametrize(
    ("answers", "prediction", "score"),
    [
        (("Bern",), "the bern!", 1.0),
        (("Kyiv", "Kiev"), "kiev", 1.0),
        (("Kyiv", "Kiev"), "kiev city", 0.0),
        (("Bern",), None, 0.0),
        (("Bern",), "", 0.0),
        (("The",), "", 0.0),
        (("...",), "a", 0.0),
        (("The", "Bern"), "Bern", 1.0),
        ((), "Bern", 0.0),
    ],
)
def test_exact_match(answers: tuple[str, ...], prediction: str | None, score: float) -> None:
    assert reward.build(config.Reward()).score(question(*answers), prediction) == score


@pytest.mark.parametrize(
    ("answers", "prediction", "score"),
    [
        (("Swiss francs",), "swiss francs", 1.0),
        (("Swiss francs",), "francs", 2 / 3),  # precision 1, recall 1/2
        (("Swiss francs",), "old swiss money", 2 / 5),  # precision 1/3, recall 1/2
        (("x", "Swiss francs"), "francs", 2 / 3),
        (("new york new york",), "new york", 2 / 3),  # words count as often as they occur
        (("Bern",), "Basel", 0.0),
        (("The",), "", 0.0),
        (("Bern",), None, 0.0),
        ((), "Bern", 0.0),
    ],
)
def test_f1(answers: tuple[str, ...], prediction: str | None, score: float) -> None:
    assert reward.build(config.Reward(name="f1")).score(question(*answers), prediction) == pytest.approx(score)


def test_score_tree_sets_terminal_turns_only() -> None:
    turns = [
        Turn(ROOT, [1], [0.0], [2]),
        Turn(0, [3], [0.0], terminal=True, prediction="Bern"),
        Turn(0, [4], [0.0], terminal=True, prediction="Basel"),
        Turn(ROOT, [5], [0.0], terminal=True),
    ]
    tree = RolloutTree(question("Bern"), [0], turns)
    reward.score_tree(reward.build(config.Reward()), tree)
    assert [turn.reward for turn in tree.turns] == [None, 1.0, 0.0, 0.0]
    assert tree.leaf_rewards().tolist() == [1.0, 0.0, 0.0]
