"""Tree attention: every chain's queries attend to the whole path in front of them, no token is computed twice.

    q, k, v [T, heads, dim] ─► rotate by depth ─► gather the keys of every chain's path ─► attention, bottom-right
    causal, chain by chain ─► rows [T, heads * dim]

Exact, not an approximation: a key that several chains share receives the sum of their gradients (PERFORMANCE.md §B).
No T x T mask exists; masks are as large as the gathered queries times their own path.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_treeopsd.batch.packed import PackedTrees

MASK_ELEMENTS = 1 << 22
"""A chain whose mask would be larger is cut into consecutive pieces of queries."""


@dataclass(frozen=True, slots=True)
class ChainGroup:
    """`chains` chains of similar lengths, padded to one shape and attended in one call.

    Attributes:
        chains, queries, keys: shape of the group after padding.
        mask: bool [chains, 1, queries, keys], True where a query sees a key; None if plain causal.
    """

    chains: int
    queries: int
    keys: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Which rows attend to which, in the form that the padded kernel wants; one for all layers of a micro-batch.

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

    @property
    def starts_its_path(self) -> bool:
        """Nothing stands before the first query: plain causal attention, which needs no mask."""
        return self.queries == self.path.numel()

    @property
    def size_class(self) -> tuple[int, int, bool]:
        """Runs of one class are padded to one shape."""
        return (self.queries + 15) // 16, (self.path.numel() + 31) // 32, self.starts_its_path


def plan_attention(packed: PackedTrees) -> AttentionPlan:
    """Group chains of similar lengths, so that a few calls do all of them with little padding.

    Padded queries are copies of a row, padded keys copies of row 0; masks hide the latter from real queries, and the
    outputs of the former are never read.
    """
    classes: dict[tuple[int, int, bool], list[_Run]] = defaultdict(list)
    for run in _runs(packed):
        classes[run.size_class].append(run)
    query_rows, key_rows, groups = [], [], []
    places = torch.empty_like(packed.ids)
    offset = 0
    for runs in classes.values():
        paths = torch.nn.utils.rnn.pad_sequence([run.path for run in runs], batch_first=True)
        first = places.new_tensor([run.first for run in runs])[:, None]
        length = places.new_tensor([run.queries for run in runs])[:, None]
        query = torch.arange(max(run.queries for run in runs), device=places.device)
        rows = first + torch.minimum(query, length - 1)
        real = query < length
        places[rows[real]] = offset + torch.arange(rows.numel(), device=places.device).view_as(rows)[real]
        mask = None
        if not runs[0].starts_its_path:
            before = places.new_tensor([run.path.numel() for run in runs])[:, None] - length
            last_visible = (before + query)[:, None, :, None]
            mask = torch.arange(paths.shape[1], device=places.device) <= last_visible
        query_rows.append(rows.flatten())
        key_rows.append(paths.flatten())
        groups.append(ChainGroup(len(runs), rows.shape[1], paths.shape[1], mask))
        offset += rows.numel()
    return AttentionPlan(torch.cat(query_rows), torch.cat(key_rows), places, tuple(groups))


def _runs(packed: PackedTrees) -> Iterator[_Run]:
    """The chains, cut where their masks would be too large."""
    query_offsets, key_offsets = packed.query_offsets.tolist(), packed.key_offsets.tolist()
    for chain, (first, end) in enumerate(pairwise(query_offsets)):
        path = packed.key_rows[key_offsets[chain] : key_offsets[chain + 1]]
        before = path.numel() - (end - first)
        piece = end - first if before == 0 else max(1, MASK_ELEMENTS // path.numel())
        for start in range(first, end, piece):
            stop = min(start + piece, end)
            yield _Run(start, stop - start, path[: before + stop - first])


def padded_attention(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """Tree attention by torch's `scaled_dot_product_attention`, on any device.

    query [T, heads, dim], key and value [T, groups, dim], rotated; returns [T, heads * dim].
    """
    _, heads, width = query.shape
    queries = GatherRows.apply(query, plan.query_rows)
    keys = GatherRows.apply(key, plan.key_rows)
    values = GatherRows.apply(value, plan.key_rows)
    query_sizes = [group.chains * group.queries for group in plan.groups]
    key_sizes = [group.chains * group.keys for group in plan.groups]
    outputs = []
    for group, q, k, v in zip(
        plan.groups, queries.split(query_sizes), keys.split(key_sizes), values.split(key_sizes), strict=True
    ):
        attended = F.scaled_dot_product_attention(
            q.view(group.chains, group.queries, heads, width).transpose(1, 2),
            k.view(group.chains, group.keys, -1, width).transpose(1, 2),
            v.view(group.chains, group.keys, -1, width).transpose(1, 2),
            attn_mask=group.mask,
            is_causal=group.mask is None,
            scale=scale,
            enable_gqa=key.shape[1] != heads,
        )
        outputs.append(attended.transpose(1, 2).reshape(-1, heads * width))
    return GatherRows.apply(torch.cat(outputs), plan.places)


class GatherRows(torch.autograd.Function):
    """`source.index_select(0, rows)` whose gradient is summed in at least float32: rows may be read many times."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = source.shape
        return source.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (rows,) = ctx.saved_tensors
        total = grad.new_zeros(ctx.shape, dtype=torch.promote_types(grad.dtype, torch.float32))
        total.index_add_(0, rows, grad.to(total.dtype))
        return total.to(grad.dtype), None


class Rotate(torch.autograd.Function):
    """Rotary embedding of [T, heads, dim] by a table of `rotary_table`; the gradient is the inverse rotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, -1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), -1)
    return (x * cos).addcmul_(swapped, sin, value=direction)


def rotary_table(positions: Tensor, *, dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, dim] of every row's rotation, for pairs (i, i + dim / 2); sin is negative in the first half.

    Angles are computed in at least float32.
    """
    wide = torch.promote_types(dtype, torch.float32)
    frequencies = 1.0 / base ** (torch.arange(0, dim, 2, device=positions.device).to(wide) / dim)
    angles = positions.to(wide)[:, None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


@dataclass
class TreeSequence(PackedSeqParams):
    """What Megatron's layers hand through to `TreeAttention`: one flat sequence of rows, and who attends to whom."""

    plan: Any = None
    cos: Tensor | None = None
    sin: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """A way to compute tree attention: `plan` once per micro-batch, `attend` once per layer.

    The seam for kernels of other devices. A varlen kernel (bottom-right causal, as FlashAttention has it) needs
    cumulative query and key lengths and `GatherRows` of keys and values, no padding.
    """

    plan: Callable[[PackedTrees], Any]
    attend: Callable[[Tensor, Tensor, Tensor, Any, float], Tensor]


PADDED = AttentionKernel(plan_attention, padded_attention)


class TreeAttention(torch.nn.Module):
    """Megatron core attention over a `TreeSequence`. Rotary embedding included: Megatron's own counts rows, not depth.

    Megatron builds it by keyword; arguments it has no use for are accepted and ignored.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        kernel: AttentionKernel,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: TreeSequence,
        **_: Any,
    ) -> Tensor:
        """query [T, heads, dim], key and value [T, groups, dim]; returns [T, heads * dim]."""
        query = Rotate.apply(query, packed_seq_params.cos, packed_seq_params.sin)
        key = Rotate.apply(key, packed_seq_params.cos, packed_seq_params.sin)
        return self.kernel.attend(query, key, value, packed_seq_params.plan, self.scale)
