"""Token log-probabilities from hidden states, vocabulary-parallel, without ever keeping all logits.

hidden [E, H], weight [V/tp, H], labels [E] ─► chunks of rows: logits ─► log softmax at the label ─► [E] float32
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24
"""Logits held at a time (64 MiB in float32)."""


def token_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """log softmax(hidden @ weight.T)[label], temperature 1.

    hidden [E, H]; weight [V / tp, H], this rank's slice of the vocabulary; labels int64 [E] in the whole vocabulary;
    `group` the tensor-parallel group, or None for an undivided vocabulary. Returns [E] in float32 (float64 for
    float64 input), equal on all ranks of the group.

    The gradient of `hidden` is this rank's share: the caller sums it over the group (Megatron's gather from a
    sequence-parallel region does). Rows are processed in chunks of `CHUNK_ELEMENTS` logits. If all rows fit into one
    chunk their probabilities are kept for the backward pass, else each chunk is computed again; the extra memory is
    one chunk either way.
    """
    return _TokenLogProbs.apply(hidden, weight, labels, group, torch.is_grad_enabled())


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, group: dist.ProcessGroup | None, training: bool
    ) -> Tensor:
        first = 0 if group is None else group.rank() * weight.shape[0]
        chunk = max(1, CHUNK_ELEMENTS // weight.shape[0])
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(labels.shape, dtype=dtype, device=hidden.device)
        normalizers = torch.empty_like(logprobs)
        kept = None
        for start in range(0, labels.numel(), chunk):
            rows = slice(start, start + chunk)
            logits = (hidden[rows] @ weight.t()).to(dtype)
            highest = logits.amax(-1)
            if group is not None:
                dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
            mine, column = _columns(labels[rows], first, weight.shape[0])
            at_label = logits.gather(1, column[:, None])[:, 0].masked_fill_(~mine, 0)
            exponentials = logits.sub_(highest[:, None]).exp_()
            total = exponentials.sum(-1)
            if group is not None:
                sums = torch.stack((total, at_label))
                dist.all_reduce(sums, group=group)
                total, at_label = sums
            normalizers[rows] = total.log() + highest
            logprobs[rows] = at_label - normalizers[rows]
            if training and labels.numel() <= chunk:
                kept = exponentials.div_(total[:, None])
        ctx.group, ctx.first, ctx.chunk = group, first, chunk
        ctx.save_for_backward(hidden, weight, labels, normalizers, kept)
        return logprobs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:  # type: ignore[override]
        hidden, weight, labels, normalizers, kept = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=grad.dtype)
        for start in range(0, labels.numel(), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            # d logprob / d logits = onehot(label) - softmax
            if kept is None:
                logits = (hidden[rows] @ weight.t()).to(grad.dtype)
                grad_logits = logits.sub_(normalizers[rows, None]).exp_().mul_(-grad[rows, None])
            else:
                grad_logits = kept * -grad[rows, None]
            mine, column = _columns(labels[rows], ctx.first, weight.shape[0])
            grad_logits.scatter_add_(1, column[:, None], (grad[rows] * mine)[:, None])
            grad_logits = grad_logits.to(hidden.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[rows])
            grad_weight += grad_logits.t() @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _columns(labels: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Which labels lie in this rank's slice of the vocabulary, and their columns in it (0 for the others)."""
    column = labels - first
    mine = (column >= 0) & (column < count)
    return mine, column * mine
