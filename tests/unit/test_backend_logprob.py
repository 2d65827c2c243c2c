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


@pytest.mark.parametrize("chunk_elements", [1 << 24, 44], ids=["whole", "4 rows"])
@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_temperature_and_entropy(chunk_elements: int, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob, "CHUNK_ELEMENTS", chunk_elements)
    hidden, weight, labels, upstream = problem(10, torch.float64)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    values, entropies = token_logprobs(h, w, labels, temperature=temperature, entropy=True)
    values.backward(upstream)
    x, y = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = (x @ y.t() / temperature).log_softmax(-1)
    expected.gather(1, labels[:, None])[:, 0].backward(upstream)
    assert entropies is not None
    assert not entropies.requires_grad
    torch.testing.assert_close(values, expected.gather(1, labels[:, None])[:, 0], atol=1e-13, rtol=1e-12)
    torch.testing.assert_close(entropies, -(expected.exp() * expected).sum(-1), atol=1e-13, rtol=1e-12)
    torch.testing.assert_close(h.grad, x.grad, atol=1e-13, rtol=1e-12)
    torch.testing.assert_close(w.grad, y.grad, atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("chunk_elements", [1 << 24, 20], ids=["whole", "4 rows"])
def test_a_divided_vocabulary(chunk_elements: int) -> None:
    """Two ranks hold 5 and 6 of 11 words and exchange their statistics: first each writes its own, then reads both."""
    hidden, weight, labels, upstream = problem(10, torch.float64)
    whole_hidden, whole_weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    expected, entropies = token_logprobs(whole_hidden, whole_weight, labels, temperature=0.7, entropy=True)
    expected.backward(upstream)
    statistics: dict[int, torch.Tensor] = {}
    options = {"temperature": 0.7, "entropy": True, "chunk_elements": chunk_elements}
    grads = []
    for reading in (False, True):
        for first, part in ((0, weight[:5]), (5, weight[5:])):

            def gather(own: torch.Tensor, first: int = first, reading: bool = reading) -> torch.Tensor:
                if not reading:
                    assert own.shape == (4, 10)  # three numbers a row, and one more for the entropy
                    statistics[first] = own.clone()
                    return own[None]
                return torch.stack((statistics[0], statistics[5]))

            h, w = hidden.clone().requires_grad_(), part.clone().requires_grad_()
            values, found = logprob._TokenLogProbs.apply(h, w, labels, first, gather, options, True)
            if reading:
                torch.testing.assert_close(values, expected, atol=1e-13, rtol=1e-12)
                torch.testing.assert_close(found, entropies, atol=1e-13, rtol=1e-12)
                values.backward(upstream)
                grads.append((h.grad, w.grad))
    torch.testing.assert_close(grads[0][0] + grads[1][0], whole_hidden.grad, atol=1e-13, rtol=1e-12)
    torch.testing.assert_close(torch.cat((grads[0][1], grads[1][1])), whole_weight.grad, atol=1e-13, rtol=1e-12)


def test_a_second_backward_pass_is_the_same() -> None:
    """The kept chunk is overwritten by the first one."""
    hidden, weight, labels, upstream = problem(10, torch.float64)
    hidden.requires_grad_()
    values, _ = token_logprobs(hidden, weight.requires_grad_(), labels)
    first = torch.autograd.grad(values, (hidden, weight), upstream, retain_graph=True)
    second = torch.autograd.grad(values, (hidden, weight), upstream)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, atol=1e-13, rtol=1e-12)


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
