"""Tree attention by torch's scaled dot product attention: the kernel of the CPU, and of float32 on a GPU.

Short runs of queries are grouped by size, so that a few calls do all of them with little padding; their masks are at
most `LONG` rows high. Longer runs are attended on their own and without a mask: what stands in front of the queries in
one call, the queries themselves in another, merged by their log-sum-exp (PERFORMANCE.md §B). So no memory grows with
queries times keys. (Only on the CPU: a GPU's kernels are called differently, so there all runs are grouped.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_treeopsd.backend.rows import GatherRows
from megatron_treeopsd.batch.packed import PackedTrees

STRIP = 128
"""Queries of one call where no mask is used. The CPU kernel computes all of a causal square, half of it for nothing."""

LONG = 64
"""Queries from which on a run is attended on its own: what a mask would hide of their square costs more than a call."""


@dataclass(frozen=True, slots=True)
class ChainGroup:
    """`chains` runs of similar lengths, padded to one shape and attended in one call.

    Attributes:
        chains, queries, keys: shape of the group after padding.
        mask: [chains, 1, queries, keys], 0 where a query sees a key and -inf elsewhere. None if nothing is hidden but
            what comes later: then the queries are the end of the keys.
    """

    chains: int
    queries: int
    keys: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Which rows attend to which; one plan for all layers of a micro-batch.

    Attributes:
        query_rows: int64 [sum of chains*queries], row of every padded query, group after group.
        key_rows: int64 [sum of chains*keys], row of every padded key.
        places: int64 [T], where each row's output stands among the padded queries.
        groups: the calls to make.
    """

    query_rows: Tensor
    key_rows: Tensor
    places: Tensor
    groups: tuple[ChainGroup, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive rows `first` .. `first + queries` that attend to `path`, of which they are the end."""

    first: int
    queries: int
    path: Tensor

    def size_class(self, mergeable: bool) -> tuple[int, ...]:
        """Runs of one class are padded to one shape."""
        keys = self.path.numel()
        if self.queries == keys:  # plain causal attention, which needs no mask
            return 0, (keys + 15) // 16
        if mergeable and self.queries >= LONG:
            return 1, self.first
        return 2, (self.queries + 15) // 16, (keys + 31) // 32


def plan_attention(packed: PackedTrees, dtype: torch.dtype) -> AttentionPlan:
    """Group the chains of a micro-batch. `dtype` is that of queries and keys.

    Padded queries are copies of a row, padded keys copies of row 0; masks hide the latter from real queries, and the
    outputs of the former are never read.
    """
    classes: dict[tuple[int, ...], list[_Run]] = defaultdict(list)
    mergeable = packed.ids.device.type == "cpu"
    for run in _runs(packed):
        classes[run.size_class(mergeable)].append(run)
    query_rows, key_rows, groups = [], [], []
    places = torch.empty_like(packed.ids)
    offset = 0
    for (kind, *_), runs in classes.items():
        paths = torch.nn.utils.rnn.pad_sequence([run.path for run in runs], batch_first=True)
        first = places.new_tensor([run.first for run in runs])[:, None]
        length = places.new_tensor([run.queries for run in runs])[:, None]
        query = torch.arange(max(run.queries for run in runs), device=places.device)
        rows = first + torch.minimum(query, length - 1)
        real = query < length
        places[rows[real]] = offset + torch.arange(rows.numel(), device=places.device).view_as(rows)[real]
        mask = None
        if kind == 2:
            before = places.new_tensor([run.path.numel() for run in runs])[:, None] - length
            hidden = torch.arange(paths.shape[1], device=places.device) > (before + query)[:, None, :, None]
            mask = torch.zeros(hidden.shape, dtype=dtype, device=places.device).masked_fill_(hidden, -torch.inf)
        query_rows.append(rows.flatten())
        key_rows.append(paths.flatten())
        groups.append(ChainGroup(len(runs), rows.shape[1], paths.shape[1], mask))
        offset += rows.numel()
    return AttentionPlan(torch.cat(query_rows), torch.cat(key_rows), places, tuple(groups))


def _runs(packed: PackedTrees) -> Iterator[_Run]:
    key_offsets = packed.key_offsets.tolist()
    for chain, (first, end) in enumerate(pairwise(packed.query_offsets.tolist())):
        if end > first:
            yield _Run(first, end - first, packed.key_rows[key_offsets[chain] : key_offsets[chain + 1]])


def sdpa_attention(query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """query [T, heads, dim], keys and values [plan.key_rows, groups, dim]; returns [T, heads * dim]."""
    _, heads, width = query.shape
    queries = GatherRows.apply(query, plan.query_rows)
    query_sizes = [group.chains * group.queries for group in plan.groups]
    key_sizes = [group.chains * group.keys for group in plan.groups]
    outputs = []
    for group, q, k, v in zip(
        plan.groups, queries.split(query_sizes), keys.split(key_sizes), values.split(key_sizes), strict=True
    ):
        q = q.unflatten(0, (group.chains, group.queries)).transpose(1, 2)
        k, v = (x.unflatten(0, (group.chains, group.keys)).transpose(1, 2) for x in (k, v))
        if group.mask is None and (group.queries < group.keys or _in_strips(q)):
            attended = _EndOfPath.apply(q, k, v, scale)
        else:
            attended = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=group.mask,
                is_causal=group.mask is None,
                scale=scale,
                enable_gqa=k.shape[1] != heads,
            )
        outputs.append(attended.transpose(1, 2).reshape(-1, heads * width))
    return GatherRows.apply(torch.cat(outputs), plan.places)


def _in_strips(q: Tensor) -> bool:
    """Whether plain causal attention is worth more than one call."""
    return q.device.type == "cpu" and q.shape[2] > 2 * STRIP


class _EndOfPath(torch.autograd.Function):
    """Queries [n, heads, q, dim] that are the end of keys and values [n, groups, k, dim]: bottom-right causal.

    Strip after strip of `STRIP` queries. Softmax over two parts of the keys is the mean of the parts' results, weighted
    by their shares of the normaliser; the backward pass of a part needs the whole result and the whole normaliser.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        outputs, log_sums = [], []
        for rows, front, end in _strips(q, k):
            part = q[:, :, rows]
            output, log_sum = flash(part, k[:, :, end], v[:, :, end], is_causal=True, scale=scale)
            if front.stop:
                ahead, ahead_sum = flash(part, k[:, :, front], v[:, :, front], is_causal=False, scale=scale)
                share = torch.sigmoid(ahead_sum - log_sum)[..., None]
                output = torch.lerp(output, ahead, share.to(output.dtype))
                log_sum = torch.logaddexp(ahead_sum, log_sum)
            outputs.append(output)
            log_sums.append(log_sum)
        merged, log_sum = torch.cat(outputs, 2), torch.cat(log_sums, 2)
        ctx.save_for_backward(q, k, v, merged, log_sum)
        ctx.scale = scale
        return merged

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        q, k, v, merged, log_sum = ctx.saved_tensors
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
        for rows, *parts in _strips(q, k):
            given = (x[:, :, rows] for x in (grad, q, merged, log_sum))
            g, part, output, sums = given
            for keys, causal in zip(parts, (False, True), strict=True):
                if keys.start == keys.stop:
                    continue
                grads = flash(g, part, k[:, :, keys], v[:, :, keys], output, sums, 0.0, causal, scale=ctx.scale)
                for total, where, value in zip((grad_q, grad_k, grad_v), (rows, keys, keys), grads, strict=True):
                    total[:, :, where] += value
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None


def _strips(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """(queries, keys in front of them, their own keys) of each strip."""
    before = k.shape[2] - q.shape[2]
    for start in range(0, q.shape[2], STRIP):
        stop = min(start + STRIP, q.shape[2])
        yield slice(start, stop), slice(0, before + start), slice(before + start, before + stop)
