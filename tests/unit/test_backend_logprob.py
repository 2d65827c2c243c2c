"""Token log-probs against `log_softmax`, in chunks and whole."""

from __future__ import annotations

import pytest
import torch

from megatron_treeopsd.backend import logprob
from megatron_treeopsd.backend.logprob import token_logprobs

pytestmark = pytest.mark.fast


def problem(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.randn(rows, 6, dtype=dtype)
    weight = torch.randn(11, 6, dtype=dtype)
    return (
        hidden,
        weight,
        torch.randint(0, 11, (rows,)),
        torch.randn(rows, dtype=torch.promote_types(dtype, torch.float32)),
    )


@pytest.mark.parametrize("chunk_elements", [1 << 24, 44, 1], ids=["whole", "4 rows", "1 row"])
def test_value_and_gradient(chunk_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob, "CHUNK_ELEMENTS", chunk_elements)
    hidden, weight, labels, upstream = problem(10, torch.float64)
    results = []
    for compute in (
        lambda h, w: token_logprobs(h, w, labels)[0],
        lambda h, w: (h @ w.t()).log_softmax(-1).gather(1, labels[:, None])[:, 0],
    ):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        values = compute(h, w)
        values.backward(upstream)
        results.append((values.detach(), h.grad, w.grad))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-13, rtol=1e-12)


def test_large_logits_do_not_overflow() -> None:
    values, _ = token_logprobs(torch.full((1, 1), 1e4), torch.tensor([[1.0], [0.5]]), torch.tensor([1]))
    assert values.tolist() == [-5000.0]


def test_low_precision_input_gives_float32() -> None:
    hidden, weight, labels, _ = problem(5, torch.bfloat16)
    values, _ = token_logprobs(hidden, weight, labels)
    assert values.dtype == torch.float32
    expected = (hidden.double() @ weight.double().t()).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(values.double(), expected, atol=0.1, rtol=0.05)


def test_no_rows() -> None:
    weight = torch.randn(11, 6, requires_grad=True)
    hidden = torch.randn(0, 6, requires_grad=True)
    values, _ = token_logprobs(hidden, weight, torch.empty(0, dtype=torch.int64))
    (values.sum() * 0).backward()
    assert values.shape == (0,)
    assert weight.grad is not None
    assert not weight.grad.any()
