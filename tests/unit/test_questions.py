"""Which questions a step draws: the same for a seed and step, every question once a pass, shares of hops."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron_treeopsd.questions import QuestionSource, stable_seed
from megatron_treeopsd.tree import Question

pytestmark = pytest.mark.fast

QUESTIONS = [Question(str(i), "text", ("answer",), {"hops": i % 3 + 1}) for i in range(30)]


def ids(source: QuestionSource, step: int, hop_weights: dict[int, float] | None = None) -> list[str]:
    return [question.id for question in source.draw(step, 4, hop_weights)]


def test_seeds_are_the_same_in_every_process() -> None:
    assert stable_seed("rollout", 1, 0) == 4669223015601077372
    assert len({stable_seed("a", 1), stable_seed("a", 2), stable_seed("a1"), stable_seed("b", 1)}) == 4


@pytest.mark.parametrize("hop_weights", [None, {1: 0.5, 3: 0.5}])
def test_a_draw_depends_on_seed_and_step_only(hop_weights: dict[int, float] | None) -> None:
    """A run that is resumed draws what it would have drawn."""
    source = QuestionSource(QUESTIONS, seed=1)
    forward = [ids(source, step, hop_weights) for step in range(20)]
    assert forward == [ids(QuestionSource(QUESTIONS, seed=1), step, hop_weights) for step in range(20)]
    assert forward[::-1] == [ids(source, step, hop_weights) for step in reversed(range(20))]
    assert forward != [ids(QuestionSource(QUESTIONS, seed=2), step, hop_weights) for step in range(20)]


def test_without_shares_every_question_comes_once_a_pass() -> None:
    source = QuestionSource(QUESTIONS, seed=1)
    drawn = [question for step in range(15) for question in ids(source, step)]
    first, second = drawn[:30], drawn[30:]
    assert sorted(first) == sorted(second) == sorted(question.id for question in QUESTIONS)
    assert first != second


def test_shares_of_hops() -> None:
    drawn = [
        q for step in range(500) for q in QuestionSource(QUESTIONS, seed=1).draw(step, 4, {1: 1.0, 2: 3.0, 3: 0.0})
    ]
    counts = Counter(question.metadata["hops"] for question in drawn)
    assert counts[3] == 0
    assert counts[2] / counts.total() == pytest.approx(0.75, abs=0.03)


def test_a_share_of_questions_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match=r"questions of \[4\] hops; there are \[1, 2, 3\]"):
        QuestionSource(QUESTIONS, seed=1).draw(0, 4, {4: 1.0})


def test_no_questions() -> None:
    with pytest.raises(ValueError, match="no questions"):
        QuestionSource([], seed=1)
