"""Exact match after normalisation, against any accepted answer."""

from __future__ import annotations

from megatron_treeopsd.reward.base import Reward
from megatron_treeopsd.reward.normalise import normalise
from megatron_treeopsd.tree import Question


class ExactMatch(Reward):
    """1 if the prediction equals one of the accepted answers, else 0.

    An accepted answer of which normalisation leaves nothing ("A", "...") matches nothing: it would equal every empty
    prediction.
    """

    def score(self, question: Question, prediction: str | None) -> float:
        if prediction is None:
            return 0.0
        accepted = {normalise(answer) for answer in question.answers} - {""}
        return float(normalise(prediction) in accepted)
