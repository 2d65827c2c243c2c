"""`PackedTrees`: the one form in which rollouts reach the model. Every unique token is one row."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from megatron_treeopsd.objective.base import TurnTable


@dataclass(frozen=True, slots=True)
class PackedTrees:
    """One micro-batch of (sub)trees. T rows (unique tokens), C chains, K gathered keys, E trained edges.

    Every leaf path is a chain: its queries are the rows that no earlier chain owns, its keys are its whole path
    (heavy-path decomposition, PERFORMANCE.md §B). Queries attend to keys under a bottom-right aligned causal mask:
    query i of a chain with q queries and k keys sees keys 0 .. k-q+i.

    The tree of `megatron_treeopsd.tree` (prompt [1, 7], turn [5, 8, 6]+[9, 9], answers [3, 4] and [3, 2]) packs to

        row            0  1  2  3  4  5  6  7  8  9  10
        ids            1  7  5  8  6  9  9  3  4  3  2
        positions      0  1  2  3  4  5  6  7  8  7  8
        query_offsets  [0, 9, 11]
        key_rows       0..8 | 0 1 2 3 4 5 6 9 10            key_offsets [0, 9, 18]
        edge_rows      1 2 3 | 6 7 | 6 9                    the row whose hidden state predicts the label
        edge_labels    5 8 6 | 3 4 | 3 2
        turns.offsets  [0, 3, 5, 7]

    Rows 6 -> 7 and 6 -> 9 are the two edges of the fork: one hidden state, two labels.

    Attributes:
        ids, positions: int64 [T]; positions are depths in the tree.
        query_offsets: int64 [C+1]; the queries of chain c are the rows query_offsets[c]:query_offsets[c+1].
        key_rows: int64 [K]; the rows of each chain's path, chain after chain.
        key_offsets: int64 [C+1] into `key_rows`.
        edge_rows, edge_labels: int64 [E].
        turns: the turn table over the E edges.
        routes: int8/int16 [T, layers, experts a token], where each row went in the engine, `UNROUTED` (negative) where
            that is not known; None without router replay.
        importance: float [E], what the gradient of each edge's log-prob is multiplied with; None for one.
        origin: for each turn, (index of its tree in the list that was packed, index of the turn in that tree).
        questions: for each turn, the id of its question; for messages.
    """

    ids: Tensor
    positions: Tensor
    query_offsets: Tensor
    key_rows: Tensor
    key_offsets: Tensor
    edge_rows: Tensor
    edge_labels: Tensor
    turns: TurnTable
    routes: Tensor | None = None
    importance: Tensor | None = None
    origin: tuple[tuple[int, int], ...] = ()
    questions: tuple[str, ...] = ()

    @property
    def token_count(self) -> int:
        return self.ids.numel()

    @property
    def pair_count(self) -> int:
        """Query-key pairs of the causal attention, the measure of its cost."""
        queries, keys = self.query_offsets.diff(), self.key_offsets.diff()
        return int((queries * (2 * keys - queries + 1) // 2).sum())

    def name(self, turn: int) -> str:
        """What a message should call turn `turn` of the turn table."""
        return f"question {self.questions[turn]} turn {self.origin[turn][1]}"

    def to(self, device: torch.device) -> PackedTrees:
        moved: dict[str, Any] = {
            f.name: value.to(device)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), (Tensor, TurnTable))
        }
        return replace(self, **moved)
