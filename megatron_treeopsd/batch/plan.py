"""Which rank trains which pieces in which micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_treeopsd.batch.balance import balance
from megatron_treeopsd.batch.pieces import Piece, count_pairs, cut
from megatron_treeopsd.tree import RolloutTree

MOST_IMBALANCE = 1.05
"""Largest load over mean load, in tokens and in query-key pairs, up to which trees are not cut further."""


def plan_micro_batches(trees: Sequence[RolloutTree], *, ranks: int, budget: int) -> list[list[list[Piece]]]:
    """result[rank][micro_batch]: the pieces of a micro-batch, at most `budget` tokens, balanced by tokens and pairs.

    Trees are kept whole where they can be. One over the budget is cut; and where few or very unequal trees would leave
    some data-parallel ranks with less to do than others, trees are cut further, as long as that lowers the largest load
    although context is repeated.

    Every rank gets equally many micro-batches, since expert parallelism needs all ranks in every forward pass; the last
    ones may be empty. Raises `TreeError` if a path is longer than the budget (see `cut`).
    """
    shares, load = _share(trees, ranks, budget)
    longest = max((max(_path_lengths(tree)) for tree in trees if tree.turns), default=0)
    finer = budget // 2
    while ranks > 1 and load > MOST_IMBALANCE and finer >= longest:
        candidate, lower = _share(trees, ranks, finer)
        if lower < load:
            shares, load = candidate, lower
        finer //= 2
    planned = [fill(pieces, budget) for pieces in shares]
    count = max(1, *(len(micro_batches) for micro_batches in planned))
    return [micro_batches + [[] for _ in range(count - len(micro_batches))] for micro_batches in planned]


def fill(pieces: Sequence[Piece], budget: int) -> list[list[Piece]]:
    """Pieces to micro-batches of at most `budget` tokens: largest first, each into the first one with room.

    Micro-batches come out fullest first, so that ranks which wait for each other have like work at the same time.
    """
    micro_batches: list[list[Piece]] = []
    used: list[int] = []
    for piece in sorted(pieces, key=lambda piece: (-piece.tokens, piece.tree, piece.chains)):
        slot = next((i for i, tokens in enumerate(used) if tokens + piece.tokens <= budget), len(used))
        if slot == len(used):
            micro_batches.append([])
            used.append(0)
        micro_batches[slot].append(piece)
        used[slot] += piece.tokens
    order = sorted(range(len(used)), key=lambda slot: -used[slot])
    return [micro_batches[slot] for slot in order]


def _share(trees: Sequence[RolloutTree], ranks: int, budget: int) -> tuple[list[list[Piece]], float]:
    """Each rank's pieces, and the largest load of any rank in tokens or pairs over the mean that uncut trees give."""
    pieces = [piece for index, tree in enumerate(trees) for piece in cut(tree, index, budget)]
    if not pieces:
        return [[] for _ in range(ranks)], 0.0
    costs = np.array([(piece.tokens, piece.pairs) for piece in pieces], dtype=np.float64)
    owner = balance(costs, ranks)
    uncut = np.array([_uncut_costs(tree) for tree in trees], dtype=np.float64).sum(0)
    loads = np.stack([costs[owner == rank].sum(0) for rank in range(ranks)])
    shares = [[piece for piece, its in zip(pieces, owner, strict=True) if its == rank] for rank in range(ranks)]
    return shares, float((loads / (uncut / ranks)).max())


def _uncut_costs(tree: RolloutTree) -> tuple[int, int]:
    """Tokens and query-key pairs of the whole tree."""
    pairs = sum(count_pairs(depth, len(turn)) for depth, turn in zip(tree.turn_depths(), tree.turns, strict=True))
    return tree.token_count, count_pairs(0, len(tree.prompt_ids)) + pairs


def _path_lengths(tree: RolloutTree) -> list[int]:
    """Tokens from the start of the prompt to the end of each turn."""
    return [depth + len(turn) for depth, turn in zip(tree.turn_depths(), tree.turns, strict=True)]
