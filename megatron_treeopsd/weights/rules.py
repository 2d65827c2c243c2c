"""What one Megatron parameter is made of, and the two pure functions that everything else here is built on.

    Hugging Face  q_proj [H*d, h]  k_proj [G*d, h]  v_proj [G*d, h]
                      │ rows of this rank's query groups   (the slice of tensor-parallel rank r)
    Megatron      linear_qkv.weight  [q of group 0 | k of group 0 | v of group 0 | q of group 1 | ...]

A family (`qwen3.py`, `qwen3_moe.py`) is a list of `Weight`, one for each parameter of the whole model; `shard` cuts a
rank's part out of the Hugging Face tensors, `join` puts the parts of all ranks back together. They are inverse bit
for bit, and neither knows where tensors come from or go to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Shape = tuple[int, ...]
Read = Callable[[str, int, int, int], Tensor]
"""(Hugging Face name, dimension, start, stop) -> that slice of the tensor."""


class WeightsError(ValueError):
    """Weights that do not fit: the message lists names or shapes and says what to do."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter of the whole Megatron model and the Hugging Face tensors that it consists of.

    Attributes:
        megatron: its names, with global layer and expert numbers. The first is the local layer spec's and serves as
            the key; others are those of the Transformer Engine spec, and of copies (the head of a tied model).
        hf: names in a Hugging Face checkpoint (one expert per name), in the order in which they are fused.
        shapes: shapes of the `hf` tensors.
        split: the dimension that tensor parallelism splits; None: every rank holds all of it.
        query_groups: number of groups by which the fused tensors are interleaved (query, key, value); None: the
            rank's parts are stacked one after the other (gate, up).
        layer: global layer number; "first" or "last" for what the first or the last pipeline stage owns.
        expert: global expert number; such a weight is split by expert tensor parallelism instead.
        vocabulary: rows are padded to the layout; padding is zero and not part of a Hugging Face checkpoint.
    """

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    shapes: tuple[Shape, ...]
    layer: int | Literal["first", "last"]
    split: int | None = None
    query_groups: int | None = None
    expert: int | None = None
    vocabulary: bool = False

    @property
    def key(self) -> str:
        """Name of the parameter whatever the layer spec and the layout."""
        return self.megatron[0]

    def parts(self, size: int) -> int:
        """Different shards among `size` tensor-parallel ranks."""
        return 1 if self.split is None else size

    def shard_shape(self, size: int) -> Shape:
        """Shape of the Megatron parameter on one of `size` tensor-parallel ranks, vocabulary padding not counted.

        Raises `WeightsError` if the layout does not divide it.
        """
        self._check(size)
        rows = sum(shape[0] for shape in self.shapes)
        shape = [rows, *self.shapes[0][1:]]
        if self.split is not None:
            shape[self.split] = -(-shape[self.split] // size)
        return tuple(shape)

    def fits(self, shape: Sequence[int], size: int) -> bool:
        """Whether a Megatron parameter of this local shape can hold the weight."""
        expected = self.shard_shape(size)
        if self.vocabulary:
            return shape[0] >= expected[0] and tuple(shape[1:]) == expected[1:]
        return tuple(shape) == expected

    def _check(self, size: int) -> None:
        if self.split is None or self.vocabulary:
            return
        lengths = [shape[self.split] for shape in self.shapes]
        if self.query_groups is not None and self.query_groups % size:
            raise WeightsError(
                f"{self.key}: {self.query_groups} key/value heads cannot be divided over tensor parallel {size}; "
                f"choose a tensor parallel size that divides {self.query_groups}"
            )
        if any(length % size for length in lengths):
            kind = "expert tensor parallel" if self.expert is not None else "tensor parallel"
            raise WeightsError(f"{self.key}: dimension {self.split} of {lengths} cannot be divided over {kind} {size}")


def shard(weight: Weight, read: Read, *, rank: int, size: int, shape: Sequence[int]) -> Tensor:
    """The Megatron parameter of tensor-parallel rank `rank` of `size`, as a new tensor of local `shape`.

    Only the slices that the rank owns are read.
    """
    if weight.vocabulary:
        rows, total = shape[0], weight.shapes[0][0]
        start, stop = min(rank * rows, total), min((rank + 1) * rows, total)
        part = read(weight.hf[0], 0, start, stop)
        return torch.nn.functional.pad(part, (0, 0, 0, rows - (stop - start)))
    dim = weight.split or 0
    parts = []
    for name, full in zip(weight.hf, weight.shapes, strict=True):
        length = full[dim] // weight.parts(size)
        start = rank * length if weight.split is not None else 0
        parts.append(read(name, dim, start, start + length))
    return _fuse(weight, parts, size)


def join(weight: Weight, shards: Sequence[Tensor]) -> list[Tensor]:
    """The full Hugging Face tensors, in the order of `weight.hf`, from the shards of all tensor-parallel ranks.

    `shards` holds `weight.parts(size)` tensors in rank order. The result may share memory with them.
    """
    size = len(shards)
    pieces = [_unfuse(weight, local, size) for local in shards]
    if weight.split is None or size == 1:
        full = pieces[0]
    else:
        full = [torch.cat(column, dim=weight.split) for column in zip(*pieces, strict=True)]
    if weight.vocabulary:
        full = [full[0][: weight.shapes[0][0]]]
    return full


def _fuse(weight: Weight, parts: Sequence[Tensor], size: int) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    groups = weight.query_groups // size if weight.query_groups else 1
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)


def _unfuse(weight: Weight, local: Tensor, size: int) -> list[Tensor]:
    if len(weight.hf) == 1:
        return [local]
    groups = weight.query_groups // size if weight.query_groups else 1
    rows = [shape[0] // size // groups for shape in weight.shapes]
    return [part.flatten(0, 1) for part in local.unflatten(0, (groups, -1)).split(rows, dim=1)]


def listing(names: Iterable[str], limit: int = 40) -> str:
    """Names for an error message, one a line, the count of the rest behind."""
    names = sorted(names)
    rest = [f"... and {len(names) - limit} more"] if len(names) > limit else []
    return "".join(f"\n  {name}" for name in [*names[:limit], *rest])
