"""What every turn weighs in the loss of its mini-batch (ALGORITHMS.md §1.3, batch aggregation)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_treeopsd.config import Update
from megatron_treeopsd.tree import ROOT, RolloutTree


def turn_multiplicities(tree: RolloutTree, rule: str) -> np.ndarray:
    """float64 [n_turns]: omega_v, how often a turn counts.

    `multiplicity`: draws that gave exactly this turn; `leaves`: trajectories below it (what flattened training on
    leaf sequences does); `one`: each unique turn once.
    """
    if rule == "one":
        return np.ones(len(tree.turns))
    counts = np.array([turn.multiplicity for turn in tree.turns], dtype=np.float64)
    if rule == "multiplicity":
        return counts
    if rule != "leaves":
        raise ValueError(f"update.turn_weight={rule!r} is unknown; allowed: multiplicity, leaves, one")
    below = np.where([turn.terminal for turn in tree.turns], counts, 0.0)
    for index in reversed(range(len(tree.turns))):
        if tree.turns[index].parent != ROOT:
            below[tree.turns[index].parent] += below[index]
    return below


def loss_weights(trees: Sequence[RolloutTree], update: Update) -> list[np.ndarray]:
    """float64 [n_turns] for each tree of one mini-batch: W_v of `TurnTable`. They sum to one over the mini-batch.

    With f_v the mean loss over the tokens of a turn, sum_v W_v f_v is

        turn_mean       the omega-weighted mean over turns
        token_mean      the omega-weighted mean over tokens (DAPO)
        sequence_mean   the mean over trajectories of the mean over their tokens (GRPO)

    Turns without sampled tokens weigh nothing. All zeros if nothing is trained at all.
    """
    weights = []
    for tree in trees:
        lengths = np.array([len(turn.sampled_ids) for turn in tree.turns], dtype=np.float64)
        if update.aggregation == "turn_mean":
            share = (lengths > 0).astype(np.float64)
        elif update.aggregation == "token_mean":
            share = lengths
        else:
            chains = np.array([turn.chain for turn in tree.turns], dtype=np.int64)
            total = np.bincount(chains, weights=lengths) if len(chains) else np.zeros(1)
            share = lengths / np.maximum(total[chains], 1.0)
        weights.append(share * turn_multiplicities(tree, update.turn_weight))
    total_weight = sum(float(weight.sum()) for weight in weights)
    return [weight / total_weight if total_weight else weight for weight in weights]
