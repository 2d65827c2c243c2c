"""What a final answer is worth, one file for each way to score it."""

from __future__ import annotations

from megatron_treeopsd import config
from megatron_treeopsd.reward.base import Reward, score_tree
from megatron_treeopsd.reward.exact_match import ExactMatch
from megatron_treeopsd.reward.f1 import F1

__all__ = ["Reward", "build", "score_tree"]


def build(section: config.Reward) -> Reward:
    """The reward that the recipe names."""
    return {"exact_match": ExactMatch, "f1": F1}[section.name]()
