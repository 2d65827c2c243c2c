"""Word overlap after normalisation, against the closest accepted answer."""

from __future__ import annotations

from collections import Counter

from megatron_treeopsd.reward.base import Reward
from megatron_treeopsd.reward.normalise import normalise
from megatron_treeopsd.tree import Question


class F1(Reward):
    """Greatest harmonic mean of precision and recall of words over the accepted answers (SQuAD)."""

    def score(self, question: Question, prediction: str | None) -> float:
        if prediction is None:
            return 0.0
        predicted = Counter(normalise(prediction).split())
        return max((_f1(predicted, Counter(normalise(answer).split())) for answer in question.answers), default=0.0)


def _f1(predicted: Counter[str], accepted: Counter[str]) -> float:
    common = (predicted & accepted).total()
    if common == 0:  # also where one of the two is empty
        return 0.0
    precision, recall = common / predicted.total(), common / accepted.total()
    return 2 * precision * recall / (precision + recall)
