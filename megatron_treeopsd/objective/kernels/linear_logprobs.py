"""Log-probs of hidden states through the vocabulary projection, in chunks of rows: the logits are never all there.

forward, a chunk:   hidden @ weight.T ─► row_statistics                                              ┐ one buffer
between:            one gather of three numbers a row, combine_ranks ─► log-probs, normalizers       │ of chunk
backward, a chunk:  hidden @ weight.T ─► write_gradient, in place ─► gradients of hidden and weight  ┘ size
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_treeopsd.objective.kernels.token_logprobs import combine_ranks, row_statistics, write_gradient

Gather = Callable[[Tensor], Tensor]
"""[kinds, R] of this rank to [ranks, kinds, R] of all ranks in their order: the one collective."""


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    first: int = 0,
    gather: Gather | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk_elements: int,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden @ weight.T / temperature) at the labels, and the entropy of each row in nats if wanted.

    hidden [E, H]; weight [V / ranks, H], the tokens from `first` on; labels int64 [E] in the whole vocabulary;
    `gather` over the ranks that share the vocabulary, None for one that is not divided. Returns [E] in float32
    (float64 for float64 input). The entropy has no gradient. That of `hidden` is this rank's share, to be summed over
    the ranks by the caller.

    Memory beyond inputs, outputs and gradients: one buffer of `chunk_elements` logits in the type of `hidden`, three
    (four) numbers a row. Logits that fit into one chunk are kept for the backward pass, others are computed again.
    """
    options = (first, gather, temperature, entropy, chunk_elements, torch.is_grad_enabled())
    logprobs, entropies = _LinearLogProbs.apply(hidden, weight, labels, options)
    return logprobs, entropies if entropy else None


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        options: tuple[int, Gather | None, float, bool, int, bool],
    ) -> tuple[Tensor, Tensor | None]:
        first, gather, temperature, entropy, chunk_elements, training = options
        ctx.chunk_rows = max(1, chunk_elements // weight.shape[0])
        ctx.first, ctx.temperature = first, temperature
        parts = []
        logits = None
        for rows, logits in _chunks(hidden, weight, ctx.chunk_rows):
            parts.append(row_statistics(logits, labels[rows], first=first, temperature=temperature, entropy=entropy))
        if not parts:
            parts.append(row_statistics(hidden @ weight.t(), labels, entropy=entropy))
        statistics = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        combined = combine_ranks(statistics[None] if gather is None else gather(statistics))
        logprobs, normalizers = combined[0], combined[1]
        ctx.kept = logits if training and len(parts) == 1 else None
        ctx.save_for_backward(hidden, weight, labels, normalizers)
        entropies = combined[2] if entropy else None
        if entropies is not None:
            ctx.mark_non_differentiable(entropies)
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if grad is None:
            return None, None, None, None
        hidden, weight, labels, normalizers = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=normalizers.dtype)
        # Kept logits are overwritten below, so a second backward pass computes them again.
        kept, ctx.kept = ctx.kept, None
        chunks = _chunks(hidden, weight, ctx.chunk_rows) if kept is None else [(slice(None), kept)]
        for rows, logits in chunks:
            write_gradient(
                logits, labels[rows], normalizers[rows], grad[rows], first=ctx.first, temperature=ctx.temperature
            )
            torch.mm(logits, weight, out=grad_hidden[rows])
            _add_product(grad_weight, logits.t(), hidden[rows])
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _chunks(hidden: Tensor, weight: Tensor, chunk_rows: int) -> Iterator[tuple[slice, Tensor]]:
    """Rows and their logits, chunk after chunk, in one buffer."""
    count = hidden.shape[0]
    buffer = hidden.new_empty((min(chunk_rows, count), weight.shape[0]))
    for start in range(0, count, chunk_rows):
        rows = slice(start, min(start + chunk_rows, count))
        yield rows, torch.mm(hidden[rows], weight.t(), out=buffer[: rows.stop - start])


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, accumulated in the type of `total` and without a temporary where the device can."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.device.type == "cuda":
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right
