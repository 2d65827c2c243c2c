"""Cutting trees into pieces that fit a micro-batch, and sharing the pieces out evenly.

A piece owns some turns of one tree and carries their ancestors as untrained context. A tree that fits the token
budget is one piece. A larger one is cut between chains, walked depth first, so that each new piece duplicates only
the path to the first chain it owns; every turn is owned by exactly one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def tree_chains(tree: RolloutTree) -> list[tuple[int, ...]]:
    """The turns of each rollout chain, depth first: a trunk, then what forks from it, then the next trunk."""
    members: dict[int, list[int]] = {}
    for index, turn in enumerate(tree.turns):
        members.setdefault(turn.chain, []).append(index)
    for chain, turns in members.items():
        for before, after in pairwise(turns):
            if tree.turns[after].parent != before:
                raise TreeError(f"question {tree.question.id}: the turns {turns} of chain {chain} are not one path")
    forks: dict[int, list[int]] = {}
    for chain, turns in members.items():
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
    """Cut a tree into pieces of at most `budget` tokens.

    Raises `TreeError` naming question and turn if a single path does not fit.
    """
    pieces: list[Piece] = []
    chains: list[tuple[int, ...]] = []
    present: set[int] = set()
    tokens = pairs = 0
    depths = tree.turn_depths()
    for chain in tree_chains(tree):
        end = depths[chain[-1]] + len(tree.turns[chain[-1]])
        if end > budget:
            raise TreeError(
                f"question {tree.question.id}: the path to turn {chain[-1]} has {end} tokens, "
                f"more than packing.micro_batch_tokens={budget}"
            )
        path = tree.path(chain[-1])
        fresh = _new_tokens(tree, path, present, bool(chains))
        if chains and tokens + fresh > budget:
            pieces.append(Piece(index, tuple(chains), tokens, pairs))
            chains, present, tokens, pairs = [], set(), 0, 0
            fresh = end
        chains.append(chain)
        present.update(path)
        tokens += fresh
        pairs += fresh * (2 * end - fresh + 1) // 2
    if chains:
        pieces.append(Piece(index, tuple(chains), tokens, pairs))
    return pieces


def _new_tokens(tree: RolloutTree, path: Sequence[int], present: set[int], prompt_present: bool) -> int:
    new = sum(len(tree.turns[turn]) for turn in path if turn not in present)
    return new + (0 if prompt_present else len(tree.prompt_ids))


def share_out(
    pieces: Sequence[Piece], *, ranks: int, budget: int, pair_cost: float = 1 / 1024
) -> list[list[list[Piece]]]:
    """Distribute pieces over data-parallel ranks and micro-batches: result[rank][micro_batch] is a list of pieces.

    Longest piece first to the least loaded rank; the load of a piece is its tokens plus `pair_cost` for each
    query-key pair. Within a rank, micro-batches are filled first-fit up to `budget` tokens. Every rank gets the same
    number of micro-batches (expert parallelism needs all ranks in every forward pass), the last ones possibly empty.
    """
    loads = [0.0] * ranks
    micro: list[list[list[Piece]]] = [[] for _ in range(ranks)]
    fill: list[list[int]] = [[] for _ in range(ranks)]
    for piece in sorted(pieces, key=lambda p: (-(p.tokens + pair_cost * p.pairs), p.tree, p.chains)):
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        loads[rank] += piece.tokens + pair_cost * piece.pairs
        for slot, used in enumerate(fill[rank]):
            if used + piece.tokens <= budget:
                micro[rank][slot].append(piece)
                fill[rank][slot] += piece.tokens
                break
        else:
            micro[rank].append([piece])
            fill[rank].append(piece.tokens)
    count = max(1, *(len(slots) for slots in micro))
    for slots in micro:
        slots += [[] for _ in range(count - len(slots))]
    return micro
