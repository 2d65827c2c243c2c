"""From the ranks' parts to full Hugging Face tensors, in one order on every rank and in bounded memory.

Each rank announces what it holds; from that all ranks of one model copy derive the same plan. Consecutive weights with
the same owners form a bucket, each owner broadcasts its shards of a bucket as one block of bytes, and every rank joins
them. Copies of the model (data parallelism) do this side by side, without traffic between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_treeopsd.weights.families import weights_of
from megatron_treeopsd.weights.place import held
from megatron_treeopsd.weights.rules import Shape, Weight, WeightsError, join, listing
from megatron_treeopsd.weights.writer import TensorInfo

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

BUCKET_BYTES = 128 * 2**20
_ALIGN = 16  # bytes; a block is viewed in the tensors' own dtypes


@dataclass(frozen=True, slots=True)
class _Planned:
    """A weight, the global rank that holds each tensor-parallel shard of it, and what one shard looks like."""

    weight: Weight
    owners: tuple[int, ...]
    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def parts(self) -> int:
        return self.weight.parts(len(self.owners))


def stream(model: nn.Module, hf_config: PreTrainedConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor) of the whole model; collective over all ranks.

    Names and order are the same on every rank and in every layout: that of a forward pass, experts one by one under
    their checkpoint names. Tensors are in the model's dtype on its device; at most one bucket (`BUCKET_BYTES`, or one
    weight if larger) is held besides the model. A tensor may share memory with the model: copy it to keep it.

    Raises `WeightsError` on every rank if any weight is held by no rank.
    """
    yield from Stream(model, hf_config)


class Stream:
    """The plan of a stream: `tensors` in order, and iteration (collective) over their contents."""

    def __init__(self, model: nn.Module, hf_config: PreTrainedConfig) -> None:
        from megatron.core import parallel_state as state  # here, as in `Place.of`

        weights = weights_of(hf_config)
        parts = held(model, weights)
        self._device = next(model.parameters()).device
        self._groups = {
            "dense": state.get_model_parallel_group(),
            "expert": state.get_expert_tensor_model_pipeline_parallel_group(),
        }
        sizes = {
            "dense": state.get_tensor_model_parallel_world_size(),
            "expert": state.get_expert_tensor_parallel_world_size(),
        }
        self._local = {(part.weight.key, part.rank): part.parameter.detach() for part in parts if not part.copy}
        announced: dict[str, dict[tuple[str, int], tuple[int, Shape, torch.dtype]]] = {}
        for kind, group in self._groups.items():
            mine = {(p.weight.key, p.rank): p.parameter for p in parts if not p.copy and _kind(p.weight) == kind}
            announced[kind] = _announce(mine, group)
        self._plan: list[_Planned] = []
        missing = []
        for weight in weights:
            found = announced[_kind(weight)]
            shards = [(weight.key, rank) for rank in range(sizes[_kind(weight)])]
            if any(shard not in found for shard in shards):
                missing.append(weight.key)
                continue
            owners = tuple(found[shard][0] for shard in shards)
            self._plan.append(_Planned(weight, owners, *found[shards[0]][1:]))
        if missing:
            raise WeightsError(f"these weights are held by no rank, or not in all parts:{listing(missing)}")

    @property
    def tensors(self) -> list[TensorInfo]:
        """What iteration will yield."""
        return [
            TensorInfo(name, shape, item.dtype)
            for item in self._plan
            for name, shape in zip(item.weight.hf, item.weight.shapes, strict=True)
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in self._buckets():
            shards = self._exchange(bucket)
            while bucket:
                item = bucket.pop(0)
                yield from zip(item.weight.hf, join(item.weight, shards.pop(0)), strict=True)

    def _buckets(self) -> Iterator[list[_Planned]]:
        bucket: list[_Planned] = []
        size = 0
        for item in self._plan:
            nbytes = item.nbytes * item.parts
            same = bucket and (bucket[0].owners, _kind(bucket[0].weight)) == (item.owners, _kind(item.weight))
            if bucket and (not same or size + nbytes > BUCKET_BYTES):
                yield bucket
                bucket, size = [], 0
            bucket.append(item)
            size += nbytes
        yield bucket

    def _exchange(self, bucket: list[_Planned]) -> list[list[Tensor]]:
        """The shards of each weight of the bucket, in shard order."""
        group = self._groups[_kind(bucket[0].weight)]
        if group.size() == 1:
            return [[self._local[item.weight.key, 0]] for item in bucket]
        shards: list[list[Tensor]] = [[] for _ in bucket]
        for part, owner in enumerate(bucket[0].owners):
            items = [(item, into) for item, into in zip(bucket, shards, strict=True) if part < item.parts]
            offsets = list(accumulate((-(-item.nbytes // _ALIGN) * _ALIGN for item, _ in items), initial=0))
            block = torch.empty(offsets[-1], dtype=torch.uint8, device=self._device)
            for (item, into), offset in zip(items, offsets, strict=False):
                view = block[offset : offset + item.nbytes].view(item.dtype).view(item.shape)
                if owner == dist.get_rank():
                    view.copy_(self._local[item.weight.key, part])
                into.append(view)
            dist.broadcast(block, src=owner, group=group)
        return shards


def _kind(weight: Weight) -> str:
    return "dense" if weight.expert is None else "expert"


def _announce(
    mine: Mapping[tuple[str, int], Tensor], group: dist.ProcessGroup
) -> dict[tuple[str, int], tuple[int, Shape, torch.dtype]]:
    """(key, shard) -> (global rank, shape, dtype) over all ranks of `group`; the first rank that holds it counts."""
    listed = [(key, shard, tuple(tensor.shape), tensor.dtype) for (key, shard), tensor in mine.items()]
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, listed, group=group)
    found: dict[tuple[str, int], tuple[int, Shape, torch.dtype]] = {}
    for rank, entries in zip(dist.get_process_group_ranks(group), everyone, strict=True):
        for key, shard, shape, dtype in entries:
            found.setdefault((key, shard), (rank, shape, dtype))
    return found
