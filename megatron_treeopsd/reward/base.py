"""The contract of a reward: one number in [0, 1] for a final answer."""

from __future__ import annotations

from abc import ABC, abstractmethod

from megatron_treeopsd.tree import Question, RolloutTree


class Reward(ABC):
    """Scores the final answer of a trajectory. Pure: the same question and prediction always score the same."""

    @abstractmethod
    def score(self, question: Question, prediction: str | None) -> float:
        """Score of `prediction`; 0 for None, which is a trajectory without an answer."""


def score_tree(reward: Reward, tree: RolloutTree) -> None:
    """Set `reward` on every terminal turn of `tree`, and on no other."""
    for index in tree.terminals():
        turn = tree.turns[index]
        turn.reward = reward.score(tree.question, turn.prediction)
