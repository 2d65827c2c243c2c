"""Token log-probs from logits, and the gradient of the logits: each logit is read once, then read and written once.

    logits [R, V / ranks] ─► row_statistics ─► [3, R] ─► gather over ranks ─► combine_ranks ─► log-probs, normalizers
                                                                                               │
    logits [R, V / ranks] ◄── write_gradient (in place): (onehot - softmax) coefficient / T ◄──┘

Three numbers stand for a row of one rank's part of the vocabulary: the largest logit m, the sum of exp(logit - m) and
the label's logit (0 where another rank has the label). A fourth, the sum of exp(logit - m)(logit - m), gives the
entropy. All are of logits divided by the temperature, in float32 (float64 for float64 logits). Gathered and combined in
the order of the ranks, they give every rank the same log-probs to the last bit.

What is not finite ends as in `torch.log_softmax`: NaN or +inf among the logits of a row makes its log-prob NaN, -inf is
a token of probability zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FORWARD = {"BLOCK": 4096, "num_warps": 8}
GRADIENT = {"BLOCK": 4096, "num_warps": 8}
COMBINE = {"BLOCK": 256, "num_warps": 4}


def row_statistics(
    logits: Tensor, labels: Tensor, *, first: int = 0, temperature: float = 1.0, entropy: bool = False
) -> Tensor:
    """[3, R], or [4, R] with `entropy`: what one rank knows of each row.

    logits [R, V] with unit stride in a row, the columns of the tokens first .. first + V - 1; labels int64 [R] in the
    whole vocabulary.
    """
    rows, vocabulary = logits.shape
    statistics = logits.new_empty((4 if entropy else 3, rows), dtype=torch.promote_types(logits.dtype, torch.float32))
    if rows:
        row_statistics_kernel[(rows,)](
            logits, labels.contiguous(), statistics, rows, vocabulary, logits.stride(0), first,
            INVERSE_TEMPERATURE=1.0 / temperature, ENTROPY=entropy, **FORWARD,
        )  # fmt: skip
    return statistics


def combine_ranks(statistics: Tensor) -> Tensor:
    """[2, R], or [3, R] with entropy: log-probs, normalizers (log sum exp) and entropies in nats of each row.

    statistics [ranks, 3 or 4, R]: `row_statistics` of all ranks in their order.
    """
    ranks, kinds, rows = statistics.shape
    combined = statistics.new_empty((kinds - 1, rows))
    if rows:
        combine_ranks_kernel[(triton.cdiv(rows, COMBINE["BLOCK"]),)](
            statistics.contiguous(), combined, ranks, rows, ENTROPY=kinds == 4, **COMBINE
        )
    return combined


def write_gradient(
    logits: Tensor,
    labels: Tensor,
    normalizers: Tensor,
    coefficient: Tensor,
    *,
    first: int = 0,
    temperature: float = 1.0,
) -> None:
    """Overwrite logits [R, V] by the gradient of sum_r coefficient_r log-prob_r with respect to them.

    normalizers [R] from `combine_ranks`, coefficient [R] the gradient of each log-prob; the rest as for
    `row_statistics`. Nothing of the size of the logits is allocated.
    """
    rows, vocabulary = logits.shape
    if rows:
        write_gradient_kernel[(rows, triton.cdiv(vocabulary, GRADIENT["BLOCK"]))](
            logits, labels.contiguous(), normalizers.contiguous(), coefficient.contiguous(), vocabulary,
            logits.stride(0), first,
            INVERSE_TEMPERATURE=1.0 / temperature, **GRADIENT,
        )  # fmt: skip


@triton.jit
def row_statistics_kernel(
    logits: tl.tensor,
    labels: tl.tensor,
    statistics: tl.tensor,
    rows: tl.tensor,
    vocabulary: tl.tensor,
    stride: tl.tensor,
    first: tl.tensor,
    INVERSE_TEMPERATURE: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid: (rows,). Every lane keeps its own maximum and sums, so the loop has no barrier and one exp a logit."""
    real: tl.constexpr = statistics.dtype.element_ty
    # Below every finite logit, and finite itself: exp(-inf - LOWEST) is 0 where -inf - -inf would be NaN.
    lowest: tl.constexpr = -3.0e38 if real == tl.float32 else -1.0e308
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    lane = tl.arange(0, BLOCK)

    highest = tl.full((BLOCK,), lowest, real)
    total = tl.zeros((BLOCK,), real)
    slope = tl.zeros((BLOCK,), real)
    for start in range(0, vocabulary, BLOCK):
        column = start + lane
        logit = tl.load(logits + column, mask=column < vocabulary, other=float("-inf")).to(real) * INVERSE_TEMPERATURE
        rise = logit - highest
        # exp of the smaller minus the larger: what rescales the old sum, or what is added to it
        factor = tl.exp(-tl.abs(rise))
        higher = rise > 0.0
        if ENTROPY:
            added = tl.where(factor > 0.0, factor * rise, 0.0)
            slope = tl.where(higher, factor * slope - total * added, slope + added)
        total = tl.where(higher, total * factor + 1.0, total + factor)
        highest = tl.where(higher, logit, highest)

    peak = tl.max(highest, 0)
    factor = tl.exp(highest - peak)
    tl.store(statistics + row, peak)
    tl.store(statistics + rows + row, tl.sum(total * factor, 0))
    label = tl.load(labels + row) - first
    mine = (label >= 0) & (label < vocabulary)
    at_label = tl.load(logits + label, mask=mine, other=0.0).to(real) * INVERSE_TEMPERATURE
    tl.store(statistics + 2 * rows + row, at_label)
    if ENTROPY:
        added = tl.where(factor > 0.0, factor * (slope + total * (highest - peak)), 0.0)
        tl.store(statistics + 3 * rows + row, tl.sum(added, 0))


@triton.jit
def combine_ranks_kernel(
    statistics: tl.tensor,
    combined: tl.tensor,
    ranks: tl.tensor,
    rows: tl.tensor,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid: (ceil(rows / BLOCK),)."""
    kinds: tl.constexpr = 4 if ENTROPY else 3
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = row < rows
    statistics += row

    peak = tl.load(statistics, mask=here, other=0.0)
    for rank in range(1, ranks):
        highest = tl.load(statistics + rank * kinds * rows, mask=here, other=0.0)
        peak = tl.where(highest > peak, highest, peak)
    total = tl.zeros_like(peak)
    at_label = tl.zeros_like(peak)
    slope = tl.zeros_like(peak)
    for rank in range(ranks):
        part = statistics + rank * kinds * rows
        fall = tl.load(part, mask=here, other=0.0) - peak
        factor = tl.exp(fall)
        sums = tl.load(part + rows, mask=here, other=1.0)
        total += factor * sums
        at_label += tl.load(part + 2 * rows, mask=here, other=0.0)
        if ENTROPY:
            slope += tl.where(
                factor > 0.0, factor * (tl.load(part + 3 * rows, mask=here, other=0.0) + sums * fall), 0.0
            )
    normalizer = peak + tl.log(total)
    tl.store(combined + row, at_label - normalizer, mask=here)
    tl.store(combined + rows + row, normalizer, mask=here)
    if ENTROPY:
        tl.store(combined + 2 * rows + row, tl.log(total) - slope / total, mask=here)


@triton.jit
def write_gradient_kernel(
    logits: tl.tensor,
    labels: tl.tensor,
    normalizers: tl.tensor,
    coefficient: tl.tensor,
    vocabulary: tl.tensor,
    stride: tl.tensor,
    first: tl.tensor,
    INVERSE_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid: (rows, ceil(vocabulary / BLOCK))."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < vocabulary
    normalizer = tl.load(normalizers + row)
    upstream = tl.load(coefficient + row).to(normalizer.dtype) * INVERSE_TEMPERATURE
    label = tl.load(labels + row) - first
    logit = tl.load(logits + column, mask=here, other=float("-inf")).to(normalizer.dtype) * INVERSE_TEMPERATURE
    probability = tl.exp(logit - normalizer)
    gradient = upstream * (tl.where(column == label, 1.0, 0.0) - probability)
    tl.store(logits + column, gradient, mask=here)
