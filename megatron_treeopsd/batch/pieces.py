"""Cutting trees into pieces that fit a micro-batch.

A piece owns some rollout chains of one tree, with all their turns, and carries the ancestors of those turns as
untrained context. Every turn is owned by exactly one piece.

The rule: chains are listed depth first, the deepest fork of a chain first, and the list is cut where the sum of tokens
over all pieces is smallest. Each further piece repeats the path to the deepest fork in it, so shallow forks, whose
context is short, are the ones that are cut off. Among all ways to cut that list this one is the best; tests compare it
with the best of all ways to group the chains.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from megatron_treeopsd.tree import ROOT, RolloutTree, TreeError


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one tree.

    Attributes:
        tree: index of the tree in the list that is packed.
        chains: for each chain of the piece, the turn indices that it owns, parents first; each chain continues the
            prompt, an earlier chain of the piece, or context.
        tokens: rows of the piece, context included.
        pairs: query-key pairs of its attention.
    """

    tree: int
    chains: tuple[tuple[int, ...], ...]
    tokens: int
    pairs: int


def count_pairs(before: int, rows: int) -> int:
    """Query-key pairs of `rows` consecutive rows, each of which sees itself and all in front of it, `before` at first.

    Of the only branch of the example in `megatron_treeopsd.tree`, two rows behind seven: 8 + 9 = 17.
    """
    return rows * (2 * before + rows + 1) // 2


def tree_chains(tree: RolloutTree) -> list[tuple[int, ...]]:
    """The turns of each rollout chain, depth first: a trunk, then what forks from it, deepest fork first.

    Raises `TreeError` naming the question if the turns of a chain are not one path.
    """
    members: dict[int, list[int]] = {}
    for index, turn in enumerate(tree.turns):
        members.setdefault(turn.chain, []).append(index)
    for chain, turns in members.items():
        for before, after in pairwise(turns):
            if tree.turns[after].parent != before:
                raise TreeError(f"question {tree.question.id}: the turns {turns} of chain {chain} are not one path")
    depths = tree.turn_depths()
    forks: dict[int, list[int]] = {}
    for chain, turns in sorted(members.items(), key=lambda item: -depths[item[1][0]]):
        parent = tree.turns[turns[0]].parent
        forks.setdefault(ROOT if parent == ROOT else tree.turns[parent].chain, []).append(chain)
    order: list[tuple[int, ...]] = []
    stack = forks.get(ROOT, [])[::-1]
    while stack:
        chain = stack.pop()
        order.append(tuple(members[chain]))
        stack += forks.get(chain, [])[::-1]
    return order


def cut(tree: RolloutTree, index: int, budget: int) -> list[Piece]:
    """Cut a tree into pieces of at most `budget` tokens, by the rule above. `index` becomes `Piece.tree`.

    A tree that fits is one piece, one without turns none. Raises `TreeError` naming question and turn if a path does
    not fit, or if there is no prompt in front of a turn.
    """
    _check(tree, budget)
    chains = tree_chains(tree)
    best: list[tuple[int, list[Piece]]] = [(0, [])]  # tokens and pieces of chains[start:], last start first
    for start in reversed(range(len(chains))):
        options = []
        for stop, tokens, pairs in _grow(tree, chains, start, budget):
            rest_tokens, rest = best[len(chains) - stop]
            options.append((tokens + rest_tokens, [Piece(index, tuple(chains[start:stop]), tokens, pairs), *rest]))
        best.append(min(options, key=lambda option: (option[0], len(option[1]))))
    return best[-1][1]


def _grow(tree: RolloutTree, chains: list[tuple[int, ...]], start: int, budget: int) -> Iterator[tuple[int, int, int]]:
    """(stop, tokens, pairs) of the piece chains[start:stop], for every stop at which it fits."""
    present: set[int] = set()
    tokens = len(tree.prompt_ids)
    pairs = count_pairs(0, tokens)
    for stop in range(start, len(chains)):
        path = tree.path(chains[stop][-1])
        fresh = sum(len(tree.turns[turn]) for turn in path if turn not in present)
        known = len(tree.prompt_ids) + sum(len(tree.turns[turn]) for turn in path if turn in present)
        tokens += fresh
        if tokens > budget:
            return
        pairs += count_pairs(known, fresh)
        present.update(path)
        yield stop + 1, tokens, pairs


def _check(tree: RolloutTree, budget: int) -> None:
    if tree.turns and not tree.prompt_ids:
        raise TreeError(f"question {tree.question.id}: turn 0 has no prompt in front of it, so nothing predicts it")
    for index, (turn, depth) in enumerate(zip(tree.turns, tree.turn_depths(), strict=True)):
        if depth + len(turn) > budget:
            raise TreeError(
                f"question {tree.question.id}: turn {index} has {len(turn)} tokens behind {depth} others, so its path "
                f"of {depth + len(turn)} does not fit packing.micro_batch_tokens={budget}; raise it, or lower "
                "task.max_context_tokens"
            )
