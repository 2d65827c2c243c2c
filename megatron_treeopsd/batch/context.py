"""Context parallelism: dividing the rows of one micro-batch over ranks that each see the keys of all.

Rows are divided in blocks, equally many for each rank, such that all ranks have about the same number of query-key
pairs. A rank computes its own rows; keys and values of all rows are gathered in every layer. An edge belongs to the
rank that has its parent row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from megatron_treeopsd.batch.packed import PackedTrees
from megatron_treeopsd.routes import UNROUTED

BLOCKS = 8
"""Blocks of rows of one rank. More of them balance better, and gather the keys of a path more often."""

LEAST_ROWS = 16
"""A micro-batch so small that its blocks would have fewer rows is divided into fewer blocks."""


@dataclass(frozen=True, slots=True)
class RowShare:
    """What one rank computes of a micro-batch.

    Two ranks, in blocks of three rows, share the 11 rows of the example in `PackedTrees` and one row of padding:

        rank 0    rows 0 1 2 | 6 7 8
        rank 1    rows 3 4 5 | 9 10 11      the rows of both in this order: 0 1 2 6 7 8 3 4 5 9 10 11

        rank 1    ids            8  6  9 | 3  2 | 0
                  positions      3  4  5 | 7  8 | 0
                  query_offsets  [0, 3, 5, 6]
                  key_rows       0 1 2 6 7 8 | 0 1 2 6 7 8 3 9 10 | 11      (rows 0..5, rows 0..6 9 10, the padding)
                  edge_rows      0 3         the edges 2 and 6 of the micro-batch: from rows 3 and 9
                  edge_labels    6 2

    Attributes:
        packed: the rank's rows. Its `key_rows` point into the rows of all ranks, rank after rank; its turn table is
            that of the whole micro-batch.
        edges: int64, which edges of the micro-batch the rank's edges are; None for all of them.
    """

    packed: PackedTrees
    edges: Tensor | None


def share_rows(packed: PackedTrees, *, ranks: int, rank: int, multiple: int = 1) -> RowShare:
    """Rank `rank`'s share. Every rank gets the same number of rows, a multiple of `multiple`."""
    if ranks == 1:
        return RowShare(pad_rows(packed, multiple), None)
    blocks = max(1, min(BLOCKS, packed.token_count // (ranks * LEAST_ROWS)))
    packed = pad_rows(packed, ranks * blocks * multiple)
    size = packed.token_count // (ranks * blocks)
    owner = _owners(packed, size, ranks)

    rows_by_rank = [(owner == r).repeat_interleave(size).nonzero()[:, 0] for r in range(ranks)]
    place = torch.empty_like(packed.ids)
    place[torch.cat(rows_by_rank)] = torch.arange(packed.token_count, device=place.device)
    rows = rows_by_rank[rank]
    paths, queries = [], []
    for count, path in _runs(packed, rows):
        queries.append(count)
        paths.append(place[path])

    mine = torch.zeros_like(packed.ids, dtype=torch.bool).index_fill_(0, rows, True)
    edges = mine[packed.edge_rows].nonzero()[:, 0]
    return RowShare(
        replace(
            packed,
            ids=packed.ids[rows],
            positions=packed.positions[rows],
            query_offsets=_offsets(queries, place),
            key_rows=torch.cat(paths),
            key_offsets=_offsets([path.numel() for path in paths], place),
            edge_rows=place[packed.edge_rows[edges]] - rank * rows.numel(),
            edge_labels=packed.edge_labels[edges],
            routes=None if packed.routes is None else packed.routes[rows],
        ),
        edges,
    )


def _owners(packed: PackedTrees, size: int, ranks: int) -> Tensor:
    """int64 [blocks]: the rank of each block. Costliest block first to the least loaded rank that has room."""
    pairs = (packed.positions + 1).view(-1, size).sum(1)
    room = [pairs.numel() // ranks] * ranks
    load = [0] * ranks
    owner = torch.empty_like(pairs)
    costs = pairs.tolist()
    for block in sorted(range(len(costs)), key=lambda block: -costs[block]):
        rank = min((r for r in range(ranks) if room[r]), key=load.__getitem__)
        owner[block] = rank
        room[rank] -= 1
        load[rank] += costs[block]
    return owner


def _runs(packed: PackedTrees, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The chains cut down to `rows`, which ascend: consecutive rows of one chain, and the path to the last of them."""
    query_offsets, key_offsets = packed.query_offsets.tolist(), packed.key_offsets.tolist()
    bounds = torch.searchsorted(rows, packed.query_offsets).tolist()
    for chain, (start, stop) in enumerate(pairwise(bounds)):
        here = rows[start:stop]
        gaps = (here.diff() > 1).nonzero()[:, 0] + 1
        for run in here.tensor_split(gaps.tolist()):
            if run.numel():
                behind = query_offsets[chain + 1] - 1 - int(run[-1])
                yield run.numel(), packed.key_rows[key_offsets[chain] : key_offsets[chain + 1] - behind]


def _offsets(counts: list[int], like: Tensor) -> Tensor:
    return like.new_tensor([0, *counts]).cumsum(0)


def pad_rows(packed: PackedTrees, multiple: int) -> PackedTrees:
    """Add rows until their number is a positive multiple of `multiple`.

    The added rows form a chain of their own, which no other row attends to and no edge reads.
    """
    rows = packed.token_count
    missing = max(multiple, -(-rows // multiple) * multiple) - rows
    if missing == 0:
        return packed
    new = torch.arange(rows, rows + missing, device=packed.ids.device)
    routes = packed.routes
    if routes is not None:
        routes = torch.cat((routes, routes.new_full((missing, *routes.shape[1:]), UNROUTED)))
    return replace(
        packed,
        routes=routes,
        ids=torch.cat((packed.ids, torch.zeros_like(new))),
        positions=torch.cat((packed.positions, new - rows)),
        query_offsets=torch.cat((packed.query_offsets, new[-1:] + 1)),
        key_rows=torch.cat((packed.key_rows, new)),
        key_offsets=torch.cat((packed.key_offsets, packed.key_offsets[-1:] + missing)),
    )
