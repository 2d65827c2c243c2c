"""Kernels of token log-probs against float64 `log_softmax`. Run by test_kernels.py, in Triton's interpreter."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_treeopsd.objective.kernels.linear_logprobs import linear_logprobs
from megatron_treeopsd.objective.kernels.token_logprobs import (
    FORWARD,
    combine_ranks,
    row_statistics,
    write_gradient,
)

VOCABULARY = FORWARD["BLOCK"] + 905
CUTS = {1: [0, VOCABULARY], 3: [0, 1500, 1503, VOCABULARY]}
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-5}


def expected(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies in float64 of the numbers that are there, however imprecise their type."""
    logprobs = (logits.double() / temperature).log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).where(logprobs > -math.inf, logprobs.isnan() * math.nan).nansum(-1)
    return logprobs.gather(1, labels[:, None])[:, 0], entropies


def over_ranks(logits: Tensor, labels: Tensor, ranks: int, *, temperature: float = 1.0, entropy: bool = True) -> Tensor:
    cuts = CUTS[ranks]
    return combine_ranks(
        torch.stack(
            [
                row_statistics(logits[:, a:b], labels, first=a, temperature=temperature, entropy=entropy)
                for a, b in pairwise(cuts)
            ]
        )
    )


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradient(dtype: torch.dtype, temperature: float, ranks: int) -> None:
    logits = (4 * torch.randn(6, VOCABULARY, dtype=torch.float64)).to(dtype)
    labels = torch.tensor([0, 1499, 1501, 1503, FORWARD["BLOCK"], VOCABULARY - 1])
    logprobs, normalizers, entropies = over_ranks(logits, labels, ranks, temperature=temperature)
    exact, exact_entropies = expected(logits, labels, temperature)
    assert logprobs.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(logprobs.double(), exact, rtol=TOLERANCE[dtype], atol=0)
    torch.testing.assert_close(entropies.double(), exact_entropies, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])

    upstream = torch.randn(6, dtype=torch.float64)
    leaf = logits.double().requires_grad_()
    expected(leaf, labels, temperature)[0].backward(upstream)
    for a, b in pairwise(CUTS[ranks]):
        part = logits[:, a:b].clone()
        write_gradient(part, labels, normalizers, upstream.to(logprobs.dtype), first=a, temperature=temperature)
        # The interpreter cuts a bfloat16 off where a GPU rounds it: one unit in the last place.
        rounding = 2**-7 if dtype == torch.bfloat16 else TOLERANCE[dtype]
        torch.testing.assert_close(part.double(), leaf.grad[:, a:b], rtol=rounding, atol=TOLERANCE[dtype])


@settings(max_examples=15)
@given(
    rows=st.integers(1, 3),
    vocabulary=st.integers(1, 2 * FORWARD["BLOCK"] + 1),
    spread=st.sampled_from([0.0, 1.0, 30.0, 1e4]),
    offset=st.sampled_from([0.0, -1e6, 1e6]),
    seed=st.integers(0, 2**16),
)
def test_random_shapes_and_sizes_of_logits(rows: int, vocabulary: int, spread: float, offset: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64) + offset
    labels = torch.randint(0, vocabulary, (rows,), generator=generator)
    logprobs, _, entropies = combine_ranks(row_statistics(logits, labels, entropy=True)[None])
    exact, exact_entropies = expected(logits, labels, 1.0)
    # Log-probs are differences of numbers as large as the logits.
    torch.testing.assert_close(logprobs, exact, rtol=1e-12, atol=1e-15 * (abs(offset) + spread + 1))
    torch.testing.assert_close(entropies, exact_entropies, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_logits_that_are_not_finite(dtype: torch.dtype, ranks: int) -> None:
    """As `log_softmax`: rows with a masked token, one token left, nothing left, NaN, +inf, +inf twice."""
    logits = torch.randn(6, VOCABULARY, dtype=dtype)
    logits[0, 7] = -math.inf
    logits[1] = -math.inf
    logits[1, 1502] = 3.0
    logits[2] = -math.inf
    logits[3, 1] = math.nan
    logits[4, 2] = math.inf
    logits[5, [2, 4000]] = math.inf
    for labels in (torch.tensor([7, 1502, 0, 5, 5, 5]), torch.tensor([8, 3, 1, 1, 2, 2])):
        logprobs, _, entropies = over_ranks(logits, labels, ranks)
        exact, exact_entropies = expected(logits, labels, 1.0)
        torch.testing.assert_close(logprobs.double(), exact, rtol=1e-5, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(entropies[:2].double(), exact_entropies[:2], rtol=1e-5, atol=1e-6)
        assert entropies[2:].isnan().all()


def test_rows_of_a_wider_table() -> None:
    table = torch.randn(4, 90, dtype=torch.float64)
    logits, labels = table[:, 10:60], torch.tensor([0, 49, 3, 7])
    before = table.clone()
    logprobs, normalizers = combine_ranks(row_statistics(logits, labels)[None])
    torch.testing.assert_close(logprobs, expected(logits, labels, 1.0)[0])
    write_gradient(logits, labels, normalizers, torch.ones(4, dtype=torch.float64))
    assert torch.equal(table[:, :10], before[:, :10])
    assert torch.equal(table[:, 60:], before[:, 60:])


# ----------------------------------------------------------------------------------- through the projection, in chunks
def projection(rows: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.randn(rows, 6, dtype=dtype, requires_grad=True),
        torch.randn(11, 6, dtype=dtype, requires_grad=True),
        torch.randint(0, 11, (rows,)),
        torch.randn(rows, dtype=torch.promote_types(dtype, torch.float32)),
    )


@pytest.mark.parametrize("chunk_elements", [1 << 20, 44, 1], ids=["whole", "4 rows", "1 row"])
def test_projection_in_chunks(chunk_elements: int) -> None:
    hidden, weight, labels, upstream = projection(10)
    exact, exact_entropies = expected(hidden @ weight.t(), labels, 0.8)
    gradients = torch.autograd.grad(exact, (hidden, weight), upstream)
    logprobs, entropies = linear_logprobs(
        hidden, weight, labels, temperature=0.8, entropy=True, chunk_elements=chunk_elements
    )
    torch.testing.assert_close(logprobs, exact, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(entropies, exact_entropies, rtol=1e-13, atol=1e-14)
    for retain in (True, False):  # the second time from logits that are computed again
        ours = torch.autograd.grad(logprobs, (hidden, weight), upstream, retain_graph=retain)
        torch.testing.assert_close(ours, gradients, rtol=1e-12, atol=1e-13)


def test_a_gradient_that_is_one_number_for_all_rows() -> None:
    """That of a sum is a view with stride zero."""
    hidden, weight, labels, _ = projection(6)
    exact = torch.autograd.grad(expected(hidden @ weight.t(), labels, 1.0)[0].sum(), (hidden, weight))
    for chunk_elements in (1 << 20, 22):
        logprobs, _ = linear_logprobs(hidden, weight, labels, chunk_elements=chunk_elements)
        ours = torch.autograd.grad(logprobs.sum(), (hidden, weight))
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("chunk_elements", [1 << 20, 8])
def test_a_divided_vocabulary(chunk_elements: int) -> None:
    """Three ranks with 4, 1 and 6 tokens: the same log-probs to the last bit, and gradients that add up."""
    hidden, weight, labels, upstream = projection(7)
    exact = expected(hidden @ weight.t(), labels, 1.0)[0]
    gradients = torch.autograd.grad(exact, (hidden, weight), upstream)
    cuts = [0, 4, 5, 11]
    slices = [weight.detach()[a:b].clone().requires_grad_() for a, b in pairwise(cuts)]
    known = [
        row_statistics((hidden @ part.t()).detach(), labels, first=first)
        for first, part in zip(cuts, slices, strict=False)
    ]

    def gather(mine: Tensor, rank: int) -> Tensor:
        torch.testing.assert_close(mine, known[rank], rtol=1e-14, atol=1e-14)
        return torch.stack(known)

    results = []
    for rank, (first, part) in enumerate(zip(cuts, slices, strict=False)):
        logprobs, none = linear_logprobs(
            hidden, part, labels, first=first, gather=partial(gather, rank=rank), chunk_elements=chunk_elements
        )
        assert none is None
        results.append((logprobs.detach(), *torch.autograd.grad(logprobs, (hidden, part), upstream)))
    torch.testing.assert_close(results[0][0], exact, rtol=1e-13, atol=1e-14)
    assert all(torch.equal(results[0][0], other[0]) for other in results[1:])
    torch.testing.assert_close(sum(result[1] for result in results), gradients[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(torch.cat([result[2] for result in results]), gradients[1], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("chunk_elements", [1 << 20, 22])
def test_low_precision_weights(chunk_elements: int) -> None:
    hidden, weight, labels, upstream = projection(9, torch.bfloat16)
    logprobs, _ = linear_logprobs(hidden, weight, labels, chunk_elements=chunk_elements)
    logprobs.backward(upstream)
    assert logprobs.dtype == torch.float32
    logits = hidden @ weight.t()  # in bfloat16, as the projection computes them
    torch.testing.assert_close(logprobs.double(), expected(logits, labels, 1.0)[0], rtol=1e-5, atol=1e-6)
    leaves = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected(leaves[0] @ leaves[1].t(), labels, 1.0)[0].backward(upstream)
    for ours, exact in zip((hidden, weight), leaves, strict=True):
        torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=0.05, atol=0.05)


def test_no_rows() -> None:
    hidden, weight, labels, _ = projection(0)
    logprobs, _ = linear_logprobs(hidden, weight, labels, chunk_elements=44)
    (logprobs.sum() * 0).backward()
    assert logprobs.shape == (0,)
    assert not weight.grad.any()


def test_without_gradient_nothing_is_kept() -> None:
    hidden, weight, labels, _ = projection(3)
    with torch.no_grad():
        logprobs, _ = linear_logprobs(hidden, weight, labels, chunk_elements=1 << 20)
    assert logprobs.grad_fn is None
