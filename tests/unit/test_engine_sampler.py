"""Sampling: the generator, the inverse CDF and the reported log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_treeopsd.engine.sampler import log_probabilities, sample, uniform

pytestmark = pytest.mark.fast


def splitmix64(state: int, outputs: int) -> list[int]:
    """The published generator with Python's own integers."""
    out = []
    for _ in range(outputs):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        out.append(z ^ (z >> 31))
    return out


def scramble(z: int) -> int:
    """SplitMix64's output function alone: the generator's first output minus one step of its state."""
    return splitmix64((z - 0x9E3779B97F4A7C15) % 2**64, 1)[0]


def test_the_generator_is_splitmix64_from_a_scrambled_seed() -> None:
    assert splitmix64(1234567, 2) == [6457827717110365317, 3203168211198807973]  # the published test values
    for seed in (0, 1, 2**63 + 5, 2**64 - 1):
        expected = [value / 2**64 for value in splitmix64(scramble(seed), 5)]
        got = uniform(np.full(5, seed, dtype=np.uint64), np.arange(5))
        assert np.allclose(got, expected, rtol=0, atol=2**-52)


def test_uniform_numbers_are_uniform_and_not_correlated() -> None:
    seeds, counts = np.meshgrid(np.arange(400, dtype=np.uint64), np.arange(50))
    u = uniform(seeds.ravel(), counts.ravel()).reshape(seeds.shape)
    assert (u >= 0).all()
    assert (u < 1).all()
    histogram = np.histogram(u, bins=20, range=(0, 1))[0]
    chi_square = float(((histogram - 1000.0) ** 2 / 1000.0).sum())
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001
    for shift in ((0, 1), (1, 0), (1, 1)):
        a, b = u[shift[0] :, shift[1] :].ravel(), u[: u.shape[0] - shift[0], : u.shape[1] - shift[1]].ravel()
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.03


def test_the_inverse_cdf_against_hand_computed_intervals() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().repeat(6, 1)
    uniforms = torch.tensor([0.0, 0.0999, 0.1001, 0.2999, 0.6001, 1 - 2**-53], dtype=torch.float64)
    ids, logprobs = sample(logits, temperatures=torch.ones(6), uniforms=uniforms)
    assert ids.tolist() == [0, 0, 1, 1, 3, 3]
    assert logprobs.tolist() == pytest.approx(np.log([0.1, 0.1, 0.2, 0.2, 0.4, 0.4]).tolist(), abs=1e-6)


def test_temperature_and_greedy_rows_in_one_batch() -> None:
    logits = torch.randn(3, 50) * 3
    temperatures = torch.tensor([0.5, 0.0, 2.0])
    ids, logprobs = sample(logits, temperatures=temperatures, uniforms=torch.full((3,), 0.37, dtype=torch.float64))
    assert ids[1] == logits[1].argmax()
    for row, temperature in enumerate((0.5, 1.0, 2.0)):
        expected = (logits[row].double() / temperature).log_softmax(-1)
        assert logprobs[row].item() == pytest.approx(expected[ids[row]].item(), abs=1e-6)
        if row != 1:
            below = expected.exp().cumsum(-1)
            assert int((below <= 0.37).sum()) == ids[row]


def test_tokens_without_mass_are_never_drawn() -> None:
    logits = torch.full((4, 10), -200.0)
    logits[:, 3] = 0.0
    uniforms = torch.tensor([0.0, 0.5, 1 - 2**-53, 1 - 2**-53], dtype=torch.float64)
    ids, logprobs = sample(logits, temperatures=torch.ones(4), uniforms=uniforms)
    assert ids.tolist() == [3, 3, 3, 3]
    assert logprobs.tolist() == [0.0] * 4


def test_large_batches_are_cut_into_chunks_without_a_trace() -> None:
    logits = torch.randn(300, 2000)
    uniforms = torch.rand(300, dtype=torch.float64)
    ids, logprobs = sample(logits, temperatures=torch.ones(300), uniforms=uniforms)
    one, lp = sample(logits[217:218], temperatures=torch.ones(1), uniforms=uniforms[217:218])
    assert (ids[217], logprobs[217]) == (one[0], lp[0])
    assert torch.allclose(log_probabilities(logits, ids), logprobs, atol=1e-6)
