"""Tree credit: standardised leaf rewards averaged up the tree, child by child (ALGORITHMS.md §1.2).

    V(leaf) = A(leaf)        V(v) = sum over children c of w_c V(c)        C_v = V(v)  or  V(v) - V(parent of v)

The weights of siblings sum to one, so every value lies between the smallest and the largest advantage below it. A
turn with one child takes over its child's value unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_treeopsd.credit.outcome import leaf_advantages, leaves_below
from megatron_treeopsd.tree import ROOT, RolloutTree, TreeError

Backup = Literal["likelihood", "uniform", "surprisal", "leaves"]
Mode = Literal["pointwise", "listwise"]

_EXPONENT = {"likelihood": 1.0, "uniform": 0.0, "surprisal": -1.0}
"""tau_w of ALGORITHMS.md §1.2."""


@dataclass(frozen=True, slots=True)
class TreeBackup:
    """Credit of a turn from the leaves below it; listwise compares it with its siblings."""

    backup: Backup = "likelihood"
    mode: Mode = "pointwise"

    def __call__(self, tree: RolloutTree) -> np.ndarray:
        """float64 [n_turns]. Exact zeros if all leaves have the same reward.

        Raises `TreeError` for a malformed tree, a reward that is missing or not finite, or log-probs that are not
        finite.
        """
        advantages = leaf_advantages(tree, "mean_std")
        value = backed_up_values(tree, advantages, sibling_weights(tree, self.backup))
        if self.mode == "pointwise":
            return value[:-1]
        return value[:-1] - value[_parents(tree)]


def sibling_weights(tree: RolloutTree, backup: Backup) -> np.ndarray:
    """float64 [n_turns]: w_c of each turn among the children of its parent; every family sums to one.

    `likelihood`, `uniform`, `surprisal`: w_c ~ mu_c exp(tau lambda_c) with tau = 1, 0, -1, mu_c the multiplicity and
    lambda_c the mean behaviour log-prob of the turn's sampled tokens. `leaves`: w_c ~ number of leaves below, which
    counts multiplicity already.
    """
    if backup == "leaves":
        weights = leaves_below(tree)
    elif backup in _EXPONENT:
        multiplicity = np.array([turn.multiplicity for turn in tree.turns], dtype=np.float64)
        weights = multiplicity * _relative_likelihoods(tree, multiplicity, _EXPONENT[backup])
    else:
        raise ValueError(f"credit.backup={backup!r} is unknown; allowed: {', '.join(_EXPONENT)}, leaves")
    return weights / _family_sums(tree, weights)


def backed_up_values(tree: RolloutTree, advantages: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """float64 [n_turns + 1]: V of each turn; the last entry is V of the root, so that index `ROOT` finds it.

    `advantages` [n_turns] holds A at terminal turns and zero elsewhere; `weights` [n_turns] is `sibling_weights`.
    """
    value = np.append(advantages, 0.0)
    for index in reversed(range(len(tree.turns))):  # parents precede children: no recursion, however deep the tree
        value[tree.turns[index].parent] += weights[index] * value[index]
    return value


def _relative_likelihoods(tree: RolloutTree, multiplicity: np.ndarray, exponent: float) -> np.ndarray:
    """[n_turns]: exp(exponent * lambda) up to a factor that siblings share, the largest of a family being one."""
    scores = exponent * _mean_logprobs(tree, multiplicity)
    best = np.full(len(tree.turns) + 1, -np.inf)
    np.maximum.at(best, _parents(tree), scores)
    return np.exp(scores - best[_parents(tree)])


def _mean_logprobs(tree: RolloutTree, multiplicity: np.ndarray) -> np.ndarray:
    """[n_turns]: lambda; a turn without sampled tokens gets the mean over its siblings' draws (0 if none has any)."""
    sampled = np.array([bool(turn.sampled_logprobs) for turn in tree.turns], dtype=bool)
    lambdas = np.array([turn.mean_logprob if turn.sampled_logprobs else 0.0 for turn in tree.turns], dtype=np.float64)
    for index in np.flatnonzero(~np.isfinite(lambdas)):
        raise TreeError(
            f"question {tree.question.id}: the log-probs of turn {index} have the mean {lambdas[index]}; "
            "the engine must report a finite log-prob for every token it sampled"
        )
    draws = np.where(sampled, multiplicity, 0.0)
    family_mean = _family_sums(tree, draws * lambdas) / np.maximum(_family_sums(tree, draws), 1.0)
    return np.where(sampled, lambdas, family_mean)


def _family_sums(tree: RolloutTree, amounts: np.ndarray) -> np.ndarray:
    """[n_turns]: for each turn, the sum of `amounts` over it and its siblings."""
    sums = np.zeros(len(tree.turns) + 1)
    np.add.at(sums, _parents(tree), amounts)
    return sums[_parents(tree)]


def _parents(tree: RolloutTree) -> np.ndarray:
    """int64 [n_turns]: parent indices; `ROOT` indexes the last entry of an array of length n_turns + 1."""
    assert ROOT == -1
    return np.array([turn.parent for turn in tree.turns], dtype=np.int64)
