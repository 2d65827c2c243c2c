"""Where each weight lies among the global tensors of a `torch_dist` checkpoint, and how a layout cuts them.

A global tensor has no tensor-parallel ranks in it; layers, and the experts of a layer, are stacked in front:

    decoder.layers.mlp.experts.experts.linear_fc1.weight   [layers, experts, gate rows + up rows, hidden]
                                                           └─── lead ──────┘ └── rows ─────────┘
    rows of linear_qkv      q of group 0 | k of group 0 | v of group 0 | q of group 1 | ...
    rows of an embedding    the vocabulary, then zeros up to a multiple of the layout

So a weight's rows are runs of rows of Hugging Face tensors (`runs`), and a tensor-parallel rank's part is one or two
rectangles of them (`regions`). Key names are those of Megatron's Transformer Engine spec, as its own checkpoints have
them; a weight that the local spec asks for under another name is listed under both (`keys`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_treeopsd.weights.rules import Shape, Weight

_LAYER = re.compile(r"(?<=^decoder\.layers)\.\d+(?=\.)")
_LOCAL_EXPERT = re.compile(r"\.experts\.local_experts\.\d+\.(?=linear_fc)")
_GROUPED_EXPERT = re.compile(r"\.experts\.(?P<layer>linear_fc[12])\.weight\d+$")
ReadRows = Callable[[str, int, int], Tensor]
"""(Hugging Face name, first row, last row) -> those rows."""


@dataclass(frozen=True, slots=True)
class Run:
    """Rows `at` .. `at + rows` of a global tensor are rows `start` .. of the `hf`-th Hugging Face tensor."""

    at: int
    hf: int
    start: int
    rows: int


@functools.lru_cache(maxsize=64)
def runs(weight: Weight) -> tuple[Run, ...]:
    """What a weight's rows consist of, from the first to the last; vocabulary padding is in no run."""
    groups = weight.query_groups or 1
    sizes = [shape[0] // groups for shape in weight.shapes]
    found: list[Run] = []
    at = 0
    for group in range(groups):
        for hf, rows in enumerate(sizes):
            found.append(Run(at, hf, group * rows, rows))
            at += rows
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Region:
    """Rows and columns of a weight in global coordinates. One-dimensional weights have one column."""

    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def empty(self) -> bool:
        return self.rows[0] >= self.rows[1] or self.columns[0] >= self.columns[1]

    def meet(self, other: Region) -> Region:
        return Region(
            (max(self.rows[0], other.rows[0]), min(self.rows[1], other.rows[1])),
            (max(self.columns[0], other.columns[0]), min(self.columns[1], other.columns[1])),
        )

    def within(self, outer: Region) -> tuple[slice, slice]:
        """The slices that select it from a matrix that holds `outer`."""
        row, column = outer.rows[0], outer.columns[0]
        return (
            slice(self.rows[0] - row, self.rows[1] - row),
            slice(self.columns[0] - column, self.columns[1] - column),
        )


@dataclass(frozen=True, slots=True)
class Slot:
    """A weight's place in its global tensor.

    Attributes:
        weight: what is there.
        keys: the names of the global tensor, at least one.
        lead, lead_shape: layer and expert number, and how many of each there are; () for what is in no layer.
        rows: of the weight, vocabulary padding included.
        tail: the other dimensions of the weight: one, or none for a vector.
    """

    weight: Weight
    keys: tuple[str, ...]
    lead: tuple[int, ...]
    lead_shape: tuple[int, ...]
    rows: int
    tail: Shape

    @property
    def shape(self) -> Shape:
        """Of the global tensor."""
        return (*self.lead_shape, self.rows, *self.tail)

    @property
    def whole(self) -> Region:
        return Region((0, self.rows), (0, self.tail[0] if self.tail else 1))

    def box(self, region: Region) -> tuple[Shape, Shape]:
        """Offsets and sizes of a region in the global tensor."""
        (row, row_end), (column, column_end) = region.rows, region.columns
        offsets, sizes = (*self.lead, row), (*(1 for _ in self.lead), row_end - row)
        return (*offsets, column)[: len(self.shape)], (*sizes, column_end - column)[: len(self.shape)]


def slots(weights: Sequence[Weight], *, vocabulary_multiple: int = 1) -> list[Slot]:
    """The places of all weights of a model, as Megatron saves it.

    vocabulary_multiple: what the rows of embedding and head are padded to a multiple of.
    """
    layers = _stacked_layers(weights)
    experts = 1 + max((weight.expert for weight in weights if weight.expert is not None), default=-1)
    return [slot(weight, layers=layers, experts=experts, vocabulary_multiple=vocabulary_multiple) for weight in weights]


def slot(weight: Weight, *, layers: int | None, experts: int, vocabulary_multiple: int = 1) -> Slot:
    """The place of one weight.

    layers: number of layers that are stacked; None if each layer has tensors of its own. experts: of one layer.
    """
    rows = sum(shape[0] for shape in weight.shapes)
    if weight.vocabulary:
        rows = -(-rows // vocabulary_multiple) * vocabulary_multiple
    lead: list[tuple[int, int]] = []
    if isinstance(weight.layer, int) and layers is not None:
        lead.append((weight.layer, layers))
    if weight.expert is not None:
        lead.append((weight.expert, experts))
    # Megatron saves a tied head as the embedding that it is, and never under a name of its own.
    names = weight.megatron[:1] if weight.vocabulary else reversed(weight.megatron)
    keys = dict.fromkeys(_key(name, stacked=layers is not None) for name in names)
    return Slot(weight, tuple(keys), tuple(i for i, _ in lead), tuple(n for _, n in lead), rows, weight.shapes[0][1:])


def _stacked_layers(weights: Sequence[Weight]) -> int | None:
    """The number of layers if they are alike: only then Megatron stacks them."""
    shapes: dict[int, set[tuple[str, tuple[Shape, ...]]]] = {}
    for weight in weights:
        if isinstance(weight.layer, int):
            shapes.setdefault(weight.layer, set()).add((_LAYER.sub("", weight.key), weight.shapes))
    return len(shapes) if len(set(map(frozenset, shapes.values()))) == 1 else None


def alternatives(weight: Weight, *, layers: int, experts: int) -> Iterator[list[Slot]]:
    """The places where Megatron may have put a weight, by its version and settings; together they hold all of it.

    Layers and experts stacked; layers apart; all apart, gate and up too (`singleton_local_shards`).
    """
    yield [slot(weight, layers=layers, experts=experts)]
    yield [slot(weight, layers=None, experts=experts)]
    name = re.sub(r"\.local_experts\.", ".experts.", weight.key)
    two = len(weight.hf) == 2
    parts = [
        replace(weight, megatron=(f"{name}{suffix}",), hf=(hf,), shapes=(shape,), expert=None)
        for hf, shape, suffix in zip(weight.hf, weight.shapes, ("_w", "_v"), strict=True)
    ] if two else [replace(weight, megatron=(name,), expert=None)]  # fmt: skip
    yield [slot(part, layers=None, experts=0) for part in parts]


def _key(name: str, *, stacked: bool) -> str:
    """Global tensor of a parameter.

    >>> _key("decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight", stacked=True)
    'decoder.layers.mlp.experts.experts.linear_fc1.weight'
    """
    if stacked:
        name = _LAYER.sub("", name)
    name = _LOCAL_EXPERT.sub(".experts.experts.", name)
    return _GROUPED_EXPERT.sub(r".experts.experts.\g<layer>.weight", name)


def regions(place: Slot, size: int) -> Iterator[tuple[int, Region]]:
    """(tensor-parallel rank, rectangle) of each part into which `size` ranks cut a weight, by rows, then by rank.

    Raises `WeightsError` if the layout does not divide it.
    """
    weight, whole = place.weight, place.whole
    weight.shard_shape(size)
    if weight.split is None:
        yield 0, whole
        return
    if weight.split == 1:
        width = whole.columns[1] // size
        yield from ((rank, Region(whole.rows, (rank * width, (rank + 1) * width))) for rank in range(size))
        return
    # Gate and up are cut each by itself; whole query groups, and padded vocabularies, by their joint rows.
    stacked = [place.rows] if weight.query_groups or weight.vocabulary else [shape[0] for shape in weight.shapes]
    start = 0
    for rows in stacked:
        height = rows // size
        for rank in range(size):
            yield rank, Region((start + rank * height, start + (rank + 1) * height), whole.columns)
        start += rows


def pieces(place: Slot, size: int, itemsize: int, max_bytes: int) -> Iterator[tuple[int, Region]]:
    """`regions`, cut into row blocks whose whole rows take at most `max_bytes` (or one row, if that is more).

    What shares rows comes together, so that a reader finds them in the cache.
    """
    step = max(1, max_bytes // (place.whole.columns[1] * itemsize))
    blocks = [
        (first, rank, Region((first, min(first + step, region.rows[1])), region.columns))
        for rank, region in regions(place, size)
        for first in range(*region.rows, step)
    ]
    for _, rank, region in sorted(blocks, key=lambda block: block[:2]):
        yield rank, region


def segments(place: Slot, rows: tuple[int, int]) -> Iterator[tuple[str, int, int]]:
    """(Hugging Face name, first row, last row) of what follows each other in a range of rows, without the padding."""
    first, last = rows
    for run in runs(place.weight):
        start, stop = max(run.at, first), min(run.at + run.rows, last)
        if start < stop:
            yield place.weight.hf[run.hf], run.start + start - run.at, run.start + stop - run.at


def fill(place: Slot, region: Region, read: ReadRows, dtype: torch.dtype) -> Tensor:
    """The elements of a region, put together from Hugging Face tensors, as a matrix of `dtype`; padding is zero."""
    (first, last), (left, right) = region.rows, region.columns
    matrix = torch.empty((last - first, right - left), dtype=dtype)
    at = 0
    for name, start, stop in segments(place, region.rows):
        part = read(name, start, stop).view(stop - start, -1)
        matrix[at : at + stop - start] = part[:, left:right]
        at += stop - start
    matrix[at:] = 0
    return matrix
