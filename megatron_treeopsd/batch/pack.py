"""From pieces of rollout trees to the tensors of one micro-batch. `PackedTrees` shows the layout with real ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_treeopsd.batch.packed import PackedTrees
from megatron_treeopsd.batch.pieces import Piece
from megatron_treeopsd.objective.base import TurnTable
from megatron_treeopsd.routes import token_routes
from megatron_treeopsd.tree import ROOT, RolloutTree, TreeError


@dataclass(frozen=True, slots=True)
class TrainedTree:
    """A tree and what training needs of each of its turns.

    Attributes:
        tree: the rollout.
        credit: float64 [n_turns].
        behaviour: for each turn float32 [L_v], log-probs of its sampled tokens under the sampling version.
        importance: for each turn float [L_v], what the gradient of each token's log-prob is multiplied with; None for
            one.

    Raises `TreeError` naming question and turn if their lengths are not those of the tree.
    """

    tree: RolloutTree
    credit: np.ndarray
    behaviour: Sequence[np.ndarray]
    importance: Sequence[np.ndarray] | None = None

    def __post_init__(self) -> None:
        name, turns = f"question {self.tree.question.id}", self.tree.turns
        if len(self.credit) != len(turns):
            raise TreeError(f"{name}: {len(self.credit)} credits for {len(turns)} turns")
        for what, given in (("behaviour log-probs", self.behaviour), ("importance weights", self.importance)):
            if given is None:
                continue
            if len(given) != len(turns):
                raise TreeError(f"{name}: {len(given)} lists of {what} for {len(turns)} turns")
            for index, (turn, values) in enumerate(zip(turns, given, strict=True)):
                if len(values) != len(turn.sampled_ids):
                    raise TreeError(
                        f"{name}: turn {index} has {len(turn.sampled_ids)} sampled tokens but {len(values)} {what}"
                    )


def pack(
    pieces: Sequence[Piece],
    trees: Sequence[TrainedTree],
    weights: Sequence[np.ndarray],
    *,
    dtype: torch.dtype = torch.float32,
) -> PackedTrees:
    """Pack pieces into one micro-batch. `weights[i]` are the loss weights [n_turns] of `trees[i]`.

    `dtype` is that of behaviour, credit and weight. Turns without sampled tokens are context only. Without pieces the
    result has one row that nothing is trained on, so that a rank without work can still take part in the forward pass.

    Raises `TreeError` naming the question if there is not one weight for each of its turns.
    """
    for item, given in zip(trees, weights, strict=True):
        if len(given) != len(item.tree.turns):
            raise TreeError(f"question {item.tree.question.id}: {len(given)} weights for {len(item.tree.turns)} turns")
    rows = _Rows()
    edges: list[tuple[int, np.ndarray]] = []
    origin: list[tuple[int, int]] = []
    sequence: list[int] = []
    sequences = 0
    for piece in pieces:
        tree = trees[piece.tree].tree
        ends: dict[int, np.ndarray] = {}
        for chain in piece.chains:
            rows.add_chain(tree, chain[-1], ends)
            trained = [turn for turn in chain if tree.turns[turn].sampled_ids]
            for turn in trained:
                path = ends[turn]
                first = len(path) - len(tree.turns[turn])
                count = len(tree.turns[turn].sampled_ids)
                edges.append((count, path[first - 1 : first - 1 + count]))
                origin.append((piece.tree, turn))
                sequence.append(sequences)
            sequences += bool(trained)
    if not pieces:
        rows.add_padding()

    def per_turn(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(np.asarray(values, dtype=np.float64)).to(dtype)

    owners = [trees[t] for t, _ in origin]
    turns = TurnTable(
        offsets=torch.from_numpy(np.cumsum([0] + [count for count, _ in edges])),
        behaviour=torch.tensor(_concatenate([trees[t].behaviour[v] for t, v in origin], np.float64)).to(dtype),
        credit=per_turn([trees[t].credit[v] for t, v in origin]),
        weight=per_turn([weights[t][v] for t, v in origin]),
        leaves=torch.tensor([owner.tree.leaf_count for owner in owners], dtype=torch.int64),
        peak=per_turn([np.abs(owner.credit).max() for owner in owners]),
        sequence=torch.tensor(sequence, dtype=torch.int64),
    )
    labels = [trees[t].tree.turns[v].sampled_ids for t, v in origin]
    return PackedTrees(
        ids=torch.from_numpy(_concatenate(rows.ids, np.int64)),
        positions=torch.from_numpy(_concatenate(rows.positions, np.int64)),
        query_offsets=torch.from_numpy(np.cumsum([0, *rows.queries])),
        key_rows=torch.from_numpy(_concatenate(rows.keys, np.int64)),
        key_offsets=torch.from_numpy(np.cumsum([0] + [len(keys) for keys in rows.keys])),
        edge_rows=torch.from_numpy(_concatenate([edge for _, edge in edges], np.int64)),
        edge_labels=torch.from_numpy(_concatenate(labels, np.int64)),
        turns=turns,
        routes=rows.packed_routes(),
        importance=_importance([(trees[t], v) for t, v in origin], dtype),
        origin=tuple(origin),
        questions=tuple(owner.tree.question.id for owner in owners),
    )


class _Rows:
    """The rows of a micro-batch while it grows, chain after chain."""

    def __init__(self) -> None:
        self.count = 0
        self.ids: list[Sequence[int]] = []
        self.positions: list[np.ndarray] = []
        self.queries: list[int] = []
        self.keys: list[np.ndarray] = []
        self.routes: list[np.ndarray | None] = []

    def add_chain(self, tree: RolloutTree, last: int, paths: dict[int, np.ndarray]) -> None:
        """Add the rows on the path to turn `last` that the piece lacks.

        `paths` maps each turn (and ROOT) that the piece already has to the rows from the prompt to its end, and is
        extended.
        """
        start = self.count
        route = [ROOT, *tree.path(last)]
        for before, turn in zip([None, *route], route, strict=False):
            if turn in paths:
                continue
            above = paths[before] if before is not None else np.empty(0, dtype=np.int64)
            ids = tree.prompt_ids if turn == ROOT else tree.turns[turn].sampled_ids + tree.turns[turn].observation_ids
            self.routes.append(token_routes(tree, None if turn == ROOT else tree.turns[turn]))
            paths[turn] = np.concatenate([above, np.arange(self.count, self.count + len(ids))])
            self.ids.append(ids)
            self.positions.append(np.arange(len(above), len(above) + len(ids)))
            self.count += len(ids)
        self.queries.append(self.count - start)
        self.keys.append(paths[last])

    def add_padding(self) -> None:
        self.ids.append([0])
        self.positions.append(np.zeros(1, dtype=np.int64))
        self.queries.append(1)
        self.keys.append(np.array([self.count]))
        self.count += 1

    def packed_routes(self) -> torch.Tensor | None:
        """Routes of all rows, if their trees have them."""
        known = [routes for routes in self.routes if routes is not None]
        if known and len(known) < len(self.routes):
            raise TreeError("some of the trees of a micro-batch have routes and some have none")
        return torch.from_numpy(np.concatenate(known)) if known else None


def _importance(turns: Sequence[tuple[TrainedTree, int]], dtype: torch.dtype) -> torch.Tensor | None:
    """Importance weights of the tokens of some turns; one where a tree has none, None if no tree has any."""
    if all(item.importance is None for item, _ in turns):
        return None
    parts = [
        np.ones(len(item.tree.turns[turn].sampled_ids)) if item.importance is None else item.importance[turn]
        for item, turn in turns
    ]
    return torch.tensor(_concatenate(parts, np.float64)).to(dtype)


def _concatenate(parts: Sequence[Sequence[int]] | Sequence[np.ndarray], dtype: type) -> np.ndarray:
    if not parts:
        return np.empty(0, dtype=dtype)
    return np.concatenate([np.asarray(part, dtype=dtype) for part in parts])
