"""Outcome credit: one advantage for each trajectory of a question, given to all of its turns (ALGORITHMS.md §3).

A turn that several trajectories share gets the mean of their advantages, each trajectory counted once. This is also
the gradient of training on flattened trajectories, where the shared turn would appear once in each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_treeopsd.tree import ROOT, RolloutTree, TreeError

Baseline = Literal["mean_std", "mean", "leave_one_out", "none"]

EPSILON = 1e-6
"""Added to the standard deviation of rewards (ALGORITHMS.md §1.2)."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Credit C_v = mean advantage of the trajectories through turn v."""

    baseline: Baseline = "mean_std"

    def __call__(self, tree: RolloutTree) -> np.ndarray:
        """float64 [n_turns]. Raises `TreeError` for a malformed tree or a reward that is missing or not finite."""
        advantage = leaf_advantages(tree, self.baseline)
        draws = np.array([turn.multiplicity for turn in tree.turns], dtype=np.float64)
        return _sum_upwards(tree, advantage * draws) / leaves_below(tree)


def advantages(rewards: np.ndarray, baseline: Baseline) -> np.ndarray:
    """float64 [n]: advantages of the n trajectories of one question.

    `mean_std`: (R - mean) / (population std + 1e-6), at most sqrt(n-1) in size (Samuelson; ALGORITHMS.md §1.2).
    `mean`: R - mean. `leave_one_out`: R minus the mean of the other trajectories = n/(n-1) (R - mean).
    `none`: R itself. All but `none` give exact zeros if all rewards are equal, which includes n = 1.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if baseline == "none":
        return rewards.copy()
    if rewards.size == 0 or np.ptp(rewards) == 0:  # the rounded mean of equal rewards may differ from them
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    if baseline == "mean":
        return centred
    if baseline == "leave_one_out":
        return centred * (rewards.size / (rewards.size - 1))
    if baseline == "mean_std":
        return centred / (rewards.std() + EPSILON)
    raise ValueError(f"credit.baseline={baseline!r} is unknown; allowed: mean_std, mean, leave_one_out, none")


def leaf_advantages(tree: RolloutTree, baseline: Baseline) -> np.ndarray:
    """float64 [n_turns]: the advantage of each terminal turn, zero on all others.

    Merged trajectories count as often as they were drawn. Raises `TreeError` naming the question (and turn) if the
    tree is malformed or a reward is missing or not finite.
    """
    tree.check()
    rewards = tree.leaf_rewards()
    if not np.isfinite(rewards).all():
        raise TreeError(f"question {tree.question.id}: rewards must be finite numbers, got {rewards.tolist()}")
    terminals = tree.terminals()
    first_draw = np.cumsum([0] + [tree.turns[index].multiplicity for index in terminals])[:-1]
    out = np.zeros(len(tree.turns))
    out[terminals] = advantages(rewards, baseline)[first_draw]
    return out


def leaves_below(tree: RolloutTree) -> np.ndarray:
    """float64 [n_turns]: number of trajectories that pass through each turn, merged ones counted as drawn."""
    return _sum_upwards(tree, np.array([turn.multiplicity * float(turn.terminal) for turn in tree.turns]))


def _sum_upwards(tree: RolloutTree, amounts: np.ndarray) -> np.ndarray:
    """[n_turns]: for each turn, the sum of `amounts` over itself and everything below it."""
    out = amounts.copy()
    for index in reversed(range(len(tree.turns))):  # parents precede children, so children are complete here
        parent = tree.turns[index].parent
        if parent != ROOT:
            out[parent] += out[index]
    return out
