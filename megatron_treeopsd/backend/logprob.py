"""Token log-probabilities from hidden states, vocabulary-parallel, without ever keeping all logits.

hidden [E, H], weight [V/tp, H], labels [E] ─► chunks of rows: logits ─► three numbers a row ─► gather over ranks ─► [E]
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_treeopsd.objective import kernels

CHUNK_ELEMENTS = 1 << 24
"""Logits held at a time (64 MiB in float32)."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden @ weight.T / temperature) at the labels, and the entropy of each row in nats if wanted.

    hidden [E, H]; weight [V / tp, H], this rank's slice of the vocabulary; labels int64 [E] in the whole vocabulary;
    `group` the tensor-parallel group, or None for an undivided vocabulary. Returns [E] in float32 (float64 for
    float64 input), equal on all ranks of the group. The entropy has no gradient.

    The gradient of `hidden` is this rank's share: the caller sums it over the group (Megatron's gather from a
    sequence-parallel region does). Rows are processed in chunks of `CHUNK_ELEMENTS` logits, and ranks exchange three
    numbers a row (four with entropy), once. If all rows fit into one chunk it is kept for the backward pass, else each
    chunk is computed again; the extra memory is one chunk either way.
    """
    first = 0 if group is None else group.rank() * weight.shape[0]
    gather = partial(_gather, group) if group is not None else None
    options = {"temperature": temperature, "entropy": entropy, "chunk_elements": CHUNK_ELEMENTS}
    if kernels.choose(hidden.device).kernels:
        from megatron_treeopsd.objective.kernels.linear_logprobs import linear_logprobs

        return linear_logprobs(hidden, weight, labels, first=first, gather=gather, **options)  # type: ignore[arg-type]
    logprobs, entropies = _TokenLogProbs.apply(hidden, weight, labels, first, gather, options, torch.is_grad_enabled())
    return logprobs, entropies if entropy else None


def _gather(group: dist.ProcessGroup, statistics: Tensor) -> Tensor:
    """[kinds, R] of each rank to [ranks, kinds, R]."""
    kinds, rows = statistics.shape
    everywhere = statistics.new_empty((group.size() * kinds, rows))
    dist.all_gather_into_tensor(everywhere, statistics, group=group)
    return everywhere.view(group.size(), kinds, rows)


class _TokenLogProbs(torch.autograd.Function):
    """In torch operations, for every device that has no kernels."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, first: int, gather: Any, options: Any, training: bool
    ) -> tuple[Tensor, Tensor | None]:
        temperature, entropy = options["temperature"], options["entropy"]
        chunk = max(1, options["chunk_elements"] // weight.shape[0])
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        statistics = torch.empty((4 if entropy else 3, labels.numel()), dtype=dtype, device=hidden.device)
        kept = None
        for start in range(0, labels.numel(), chunk):
            rows = slice(start, start + chunk)
            logits = _logits(hidden[rows], weight, temperature, dtype)
            mine, column = _columns(labels[rows], first, weight.shape[0])
            highest, total, at_label = statistics[:3, rows]
            at_label[:] = logits.gather(1, column[:, None])[:, 0].masked_fill_(~mine, 0)
            highest[:] = logits.amax(-1)
            below = logits.sub_(highest[:, None])
            if entropy:
                statistics[3, rows] = (below.exp() * below).sum(-1)
            kept = below.exp_()
            total[:] = kept.sum(-1)
        logprobs, normalizers, entropies = _combine(statistics[None] if gather is None else gather(statistics))
        ctx.first, ctx.chunk, ctx.temperature = first, chunk, temperature
        ctx.kept = kept if training and labels.numel() <= chunk else None
        ctx.save_for_backward(hidden, weight, labels, normalizers, statistics[0])
        if entropies is not None:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, labels, normalizers, highest = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=grad.dtype)
        kept, ctx.kept = ctx.kept, None  # overwritten below; a second backward pass computes it again
        scaled = grad / ctx.temperature
        for start in range(0, labels.numel(), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            # d logprob / d logits = (onehot(label) - softmax) / temperature
            if kept is None:
                logits = _logits(hidden[rows], weight, ctx.temperature, grad.dtype)
                exponentials = logits.sub_(highest[rows, None]).exp_()
            else:
                exponentials = kept
            grad_logits = exponentials.mul_((-scaled[rows] * (highest[rows] - normalizers[rows]).exp())[:, None])
            mine, column = _columns(labels[rows], ctx.first, weight.shape[0])
            grad_logits.scatter_add_(1, column[:, None], (scaled[rows] * mine)[:, None])
            grad_logits = grad_logits.to(hidden.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[rows])
            grad_weight += grad_logits.t() @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    logits = (hidden @ weight.t()).to(dtype)
    return logits if temperature == 1 else logits.mul_(1 / temperature)


def _combine(statistics: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probs, normalizers and entropies (if four kinds) from the statistics [ranks, kinds, R] of all ranks."""
    highest, total, at_label, *slope = statistics.unbind(1)
    peak = highest.amax(0)
    factor = (highest - peak).exp()
    whole = (total * factor).sum(0)
    normalizers = whole.log() + peak
    # sum of p l = sum over ranks of sum exp(l - m) ((l - m) + m), in units of the whole
    entropies = normalizers - (factor * (slope[0] + highest * total)).sum(0) / whole if slope else None
    return at_label.sum(0) - normalizers, normalizers, entropies


def _columns(labels: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Which labels lie in this rank's slice of the vocabulary, and their columns in it (0 for the others)."""
    column = labels - first
    mine = (column >= 0) & (column < count)
    return mine, column * mine
