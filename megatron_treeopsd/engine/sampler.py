"""Inverse-CDF sampling whose result depends on the request alone, not on the batch it happens to be in.

The n-th token of a request draws the uniform number `uniform(seed, n)`: a counter-based generator has no state that
another request could advance.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_CHUNK_VALUES = 1 << 17
"""Logits handled at once: keeps the float64 temporaries of a chunk (1 MiB) inside the CPU's cache."""


def uniform(seeds: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1), one for each (seed, count) pair.

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): output number `count` of the generator that starts at the
    scrambled seed, so that neighbouring seeds do not give shifted copies of one stream.

    Args:
        seeds: uint64 [n].
        counts: index of the token inside its request, int [n].

    Returns:
        float64 [n], multiples of 2**-53.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        state = _scramble(seeds) + (counts.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        return (_scramble(state) >> np.uint64(11)) * 2.0**-53


def sample(logits: Tensor, *, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token for each row.

    Args:
        logits: float [n, vocab].
        temperatures: float32 [n]; 0 takes the most likely token.
        uniforms: float64 [n] in [0, 1).

    Returns:
        ids int64 [n] and their log-probabilities, float64 [n] in nats, at the row's temperature (greedy rows: 1).
    """
    chunk = max(1, _CHUNK_VALUES // logits.shape[1])
    parts = [
        _sample_chunk(part, temperature, u)
        for part, temperature, u in zip(
            logits.split(chunk), temperatures.split(chunk), uniforms.split(chunk), strict=True
        )
    ]
    return torch.cat([ids for ids, _ in parts]), torch.cat([logprobs for _, logprobs in parts])


def log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities (float64 [n], nats, temperature 1) of `ids` int64 [n] under `logits` [n, vocab]."""
    chunk = max(1, _CHUNK_VALUES // logits.shape[1])
    return torch.cat(
        [
            part.double().log_softmax(-1).gather(1, index[:, None])[:, 0]
            for part, index in zip(logits.split(chunk), ids.split(chunk), strict=True)
        ]
    )


def _sample_chunk(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    greedy = temperatures == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperatures)[:, None]
    scaled -= scaled.amax(-1, keepdim=True)
    cumulative = scaled.exp().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Strictly below the total, so that rounding can never reach past the last token with mass.
    threshold = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(cumulative, threshold, right=True)
    if bool(greedy.any()):
        ids = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), ids)
    logprobs = scaled.gather(1, ids).double() - total.log()
    return ids[:, 0], logprobs[:, 0]


def _scramble(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
