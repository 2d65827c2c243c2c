"""Tree attention by flash attention over sequences of different lengths: the kernel of a GPU.

Chains are what such a kernel calls sequences: queries are the rows as they stand, keys the gathered paths, and the
causal mask is aligned to the bottom right, which is "the whole path in front of a row, and itself". One call for a
micro-batch, no padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_treeopsd.batch.packed import PackedTrees

Varlen = Callable[[Tensor, Tensor, Tensor, "VarlenPlan", float], Tensor]
"""(query [T, heads, dim], keys and values [K, groups, dim], plan, scale) -> [T, heads, dim]."""


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    """Where chains begin.

    Attributes:
        key_rows: int64 [K].
        query_offsets, key_offsets: int32 [C+1].
        max_queries, max_keys: of any chain.
    """

    key_rows: Tensor
    query_offsets: Tensor
    key_offsets: Tensor
    max_queries: int
    max_keys: int


def plan_varlen(packed: PackedTrees, _: torch.dtype) -> VarlenPlan:
    queries, keys = packed.query_offsets.diff(), packed.key_offsets.diff()
    return VarlenPlan(
        key_rows=packed.key_rows,
        query_offsets=packed.query_offsets.to(torch.int32),
        key_offsets=packed.key_offsets.to(torch.int32),
        max_queries=int(queries.max()),
        max_keys=int(keys.max()),
    )


def varlen_attention(
    function: Varlen, query: Tensor, keys: Tensor, values: Tensor, plan: VarlenPlan, scale: float
) -> Tensor:
    """query [T, heads, dim], keys and values [plan.key_rows, groups, dim]; returns [T, heads * dim]."""
    return function(query, keys, values, plan, scale).flatten(1)


def torch_varlen(query: Tensor, keys: Tensor, values: Tensor, plan: VarlenPlan, scale: float) -> Tensor:
    """The flash attention that torch brings along."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(
        query,
        keys,
        values,
        plan.query_offsets,
        plan.key_offsets,
        plan.max_queries,
        plan.max_keys,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=True,
    )


def flash_varlen(module: str) -> Varlen:
    """The function of an installed package: "flash_attn_interface" (FlashAttention 3) or "flash_attn" (2)."""
    from importlib import import_module

    function = import_module(module).flash_attn_varlen_func

    def attend(query: Tensor, keys: Tensor, values: Tensor, plan: VarlenPlan, scale: float) -> Tensor:
        out = function(
            query,
            keys,
            values,
            cu_seqlens_q=plan.query_offsets,
            cu_seqlens_k=plan.key_offsets,
            max_seqlen_q=plan.max_queries,
            max_seqlen_k=plan.max_keys,
            softmax_scale=scale,
            causal=True,
        )
        return out[0] if isinstance(out, tuple) else out  # some releases return the normalisers too

    return attend
