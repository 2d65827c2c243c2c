"""Reading rows that several readers share, on one rank or across the context-parallel ranks that hold them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class GatherRows(torch.autograd.Function):
    """`source.index_select(0, rows)`, where `rows` may name a row many times: its gradients are summed in float32.

    With a `group`, every rank holds equally many rows, and `rows` counts through those of all ranks in turn. Each rank
    gets the sum of the gradients that any rank has for its rows, which stays in float32 (float64) to the end.
    """

    @staticmethod
    def forward(ctx: Any, source: Tensor, rows: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape, ctx.group = source.shape, group
        if group is not None:
            everywhere = source.new_empty((group.size() * source.shape[0], *source.shape[1:]))
            dist.all_gather_into_tensor(everywhere, source.contiguous(), group=group)
            source = everywhere
        return source.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (rows,) = ctx.saved_tensors
        own, *rest = ctx.shape
        ranks = 1 if ctx.group is None else ctx.group.size()
        total = grad.new_zeros((ranks * own, *rest), dtype=torch.promote_types(grad.dtype, torch.float32))
        total.index_add_(0, rows, grad.to(total.dtype))
        if ctx.group is not None:
            everywhere, total = total, total.new_empty(ctx.shape)
            dist.reduce_scatter_tensor(total, everywhere, group=ctx.group)
        return total.to(grad.dtype), None, None


class JoinEdges(torch.autograd.Function):
    """Values of the edges of all ranks of a group, [count] on each, from those of its own, which stand at `edges`.

    Every rank then computes the same loss from them, and keeps the gradient of its own edges: nothing is counted twice.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, edges: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(edges)
        joined = values.new_zeros(count).index_copy_(0, edges, values)
        dist.all_reduce(joined, group=group)
        return joined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (edges,) = ctx.saved_tensors
        return grad.index_select(0, edges), None, None, None
