"""Rows of a micro-batch shared by context-parallel ranks: together they are the micro-batch again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_batch import example, trained
from trees import random_tree, search_tree

from megatron_treeopsd.batch import context
from megatron_treeopsd.batch.context import RowShare, pad_rows, share_rows
from megatron_treeopsd.batch.pack import pack
from megatron_treeopsd.batch.packed import PackedTrees
from megatron_treeopsd.batch.pieces import cut
from megatron_treeopsd.tree import RolloutTree

pytestmark = pytest.mark.fast


def packed_trees(trees: list[RolloutTree]) -> PackedTrees:
    pieces = [piece for index, tree in enumerate(trees) for piece in cut(tree, index, 100_000)]
    return pack(pieces, [trained(tree) for tree in trees], [np.ones(len(tree.turns)) for tree in trees])


def shares(packed: PackedTrees, ranks: int, multiple: int = 1) -> list[RowShare]:
    return [share_rows(packed, ranks=ranks, rank=rank, multiple=multiple) for rank in range(ranks)]


def test_the_example_of_the_docstring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "LEAST_ROWS", 2)
    first, second = shares(packed_trees([example()]), 2)
    assert first.packed.ids.tolist() == [1, 7, 5, 9, 3, 4]
    assert second.packed.ids.tolist() == [8, 6, 9, 3, 2, 0]
    assert second.packed.positions.tolist() == [3, 4, 5, 7, 8, 0]
    assert second.packed.query_offsets.tolist() == [0, 3, 5, 6]
    assert second.packed.key_rows.tolist() == [0, 1, 2, 6, 7, 8, 0, 1, 2, 6, 7, 8, 3, 9, 10, 11]
    assert second.packed.key_offsets.tolist() == [0, 6, 15, 16]
    assert second.edges is not None
    assert second.edges.tolist() == [2, 6]
    assert second.packed.edge_rows.tolist() == [0, 3]
    assert second.packed.edge_labels.tolist() == [6, 2]


def visible(packed: PackedTrees, everywhere: torch.Tensor) -> list[list[int]]:
    """The token ids that each row sees, itself last, by looking its keys up in `everywhere`."""
    out = []
    for chain in range(packed.query_offsets.numel() - 1):
        path = packed.key_rows[packed.key_offsets[chain] : packed.key_offsets[chain + 1]]
        queries = int(packed.query_offsets[chain + 1] - packed.query_offsets[chain])
        out += [everywhere[path[: len(path) - queries + i + 1]].tolist() for i in range(queries)]
    return out


@pytest.mark.parametrize("multiple", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_every_row_sees_what_it_saw_and_every_edge_is_owned_once(seed: int, ranks: int, multiple: int) -> None:
    packed = packed_trees([random_tree(10 * seed + i, max_length=12) for i in range(2)])
    parts = shares(packed, ranks, multiple)
    assert len({part.packed.token_count for part in parts}) == 1
    assert parts[0].packed.token_count % multiple == 0
    everywhere = torch.cat([part.packed.ids for part in parts])
    seen = [row for part in parts for row in visible(part.packed, everywhere)]
    padded = pad_rows(packed, everywhere.numel())
    whole = visible(padded, padded.ids)
    assert sorted(seen) == sorted(whole)
    for part in parts:
        mine = visible(part.packed, everywhere)
        assert part.packed.positions.tolist() == [len(row) - 1 for row in mine]
        assert part.edges is not None
        parents = packed.edge_rows[part.edges].tolist()
        assert [mine[row] for row in part.packed.edge_rows.tolist()] == [whole[row] for row in parents]
        assert torch.equal(part.packed.edge_labels, packed.edge_labels[part.edges])
        assert part.packed.turns is packed.turns
    owned = torch.cat([part.edges for part in parts])  # type: ignore[misc]
    assert sorted(owned.tolist()) == list(range(packed.edge_labels.numel()))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_have_equal_rows_and_about_equal_pairs(ranks: int) -> None:
    for trees in ([search_tree(0)], [search_tree(seed, tokens=200 + 150 * seed) for seed in range(4)]):
        packed = packed_trees(trees)
        pairs = [part.packed.pair_count for part in shares(packed, ranks)]
        assert max(pairs) / np.mean(pairs) <= 1.03
        assert sum(pairs) <= 1.01 * packed.pair_count


def test_keys_are_not_gathered_many_times() -> None:
    """Cutting chains into blocks repeats their paths; a rank still gathers less than it would without sharing."""
    packed = packed_trees([search_tree(0)])
    assert all(part.packed.key_rows.numel() < 0.75 * packed.key_rows.numel() for part in shares(packed, 2))


def test_one_rank_has_everything() -> None:
    packed = packed_trees([example()])
    (whole,) = shares(packed, 1)
    assert whole.packed is packed
    assert whole.edges is None
    assert shares(packed, 1, multiple=2)[0].packed.token_count == 12


def test_a_micro_batch_without_work_is_shared_too() -> None:
    for part in shares(pack([], [], []), 4, multiple=2):
        assert part.packed.token_count == 2
        assert part.edges is not None
        assert part.edges.numel() == 0
