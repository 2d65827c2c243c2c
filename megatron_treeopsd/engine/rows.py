"""The requests that run together, one row each, with their state in arrays so that a token costs no Python per row."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_treeopsd.engine.base import Sampling
from megatron_treeopsd.engine.prefix_cache import Match, Node
from megatron_treeopsd.engine.sampler import sample, uniform


@dataclass(slots=True, eq=False)
class Request:
    """One call of `generate`, or of `score` if `sampling` is None.

    Attributes:
        ids: token ids whose keys and values the request needs.
        seed: modulo 2**64.
        scored: for `score`, the continuation whose log-probabilities are wanted; all but its last token end `ids`.
        match: what was cached when the request was admitted.
        pinned: the cache edge that the running request keeps alive.
        routes_from: position of the first token whose routes are returned, if the sampling asks for them.
    """

    ids: list[int]
    session: str
    future: asyncio.Future[Any]
    seed: int = 0
    sampling: Sampling | None = None
    scored: list[int] | None = None
    match: Match | None = None
    pinned: Node | None = None
    routes_from: int = 0


class Rows:
    """State of the running requests, rows 0 to n-1 without gaps.

    Attributes:
        requests: the request of each row.
        length: int64 [capacity], tokens of the row that have keys and values.
        token: int64 [capacity], the last sampled token, which has none yet.
        count: int64 [capacity], tokens sampled so far.
    """

    def __init__(self, capacity: int, *, vocabulary: int) -> None:
        self.capacity = capacity
        self.requests: list[Request] = []
        self.length = np.zeros(capacity, dtype=np.int64)
        self.token = np.zeros(capacity, dtype=np.int64)
        self.count = np.zeros(capacity, dtype=np.int64)
        self._limit = np.zeros(capacity, dtype=np.int64)
        self._seed = np.zeros(capacity, dtype=np.uint64)
        self._temperature = np.zeros(capacity, dtype=np.float32)
        self._stop_set = np.zeros(capacity, dtype=np.int64)
        self._ids = np.zeros((capacity, 64), dtype=np.int64)
        self._logprobs = np.zeros((capacity, 64), dtype=np.float64)
        self._stop_sets: dict[frozenset[int], int] = {}
        self._stops = np.zeros((0, vocabulary), dtype=bool)

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request, *, limit: int) -> int:
        """Take a request into the next row and return the row. `limit`: most tokens to sample; 0 for `score`."""
        row = len(self.requests)
        self.requests.append(request)
        self.length[row] = len(request.ids)
        self.count[row] = 0
        self._limit[row] = limit
        if request.sampling is not None:
            self._seed[row] = request.seed
            self._temperature[row] = request.sampling.temperature
            self._stop_set[row] = self._stop_index(request.sampling.stop_ids)
            if limit > self._ids.shape[1]:
                grow = ((0, 0), (0, max(limit, 2 * self._ids.shape[1]) - self._ids.shape[1]))
                self._ids, self._logprobs = np.pad(self._ids, grow), np.pad(self._logprobs, grow)
        return row

    def sample(self, logits: Tensor) -> np.ndarray:
        """Sample the next token of rows 0 to n-1 from `logits` [n, vocab]; returns the rows that are finished."""
        n = len(logits)
        ids, logprobs = sample(
            logits,
            temperatures=torch.from_numpy(self._temperature[:n]),
            uniforms=torch.from_numpy(uniform(self._seed[:n], self.count[:n])),
        )
        tokens = ids.numpy()
        where = (np.arange(n), self.count[:n])
        self._ids[where] = tokens
        self._logprobs[where] = logprobs.numpy()
        self.token[:n] = tokens
        self.count[:n] += 1
        return np.flatnonzero(self._stops[self._stop_set[:n], tokens] | (self.count[:n] >= self._limit[:n]))

    def sampled(self, row: int) -> tuple[list[int], list[float], bool]:
        """Token ids and log-probabilities of a row so far, and whether the last one is a stop token."""
        count = self.count[row]
        stopped = bool(self._stops[self._stop_set[row], self.token[row]])
        return self._ids[row, :count].tolist(), self._logprobs[row, :count].tolist(), stopped

    def cut(self, row: int) -> None:
        """Let the next token be the row's last."""
        self._limit[row] = 0

    def remove(self, row: int) -> int:
        """Drop a row; the last row takes its place. Returns the number of the row that moved (`row` itself if none)."""
        last = len(self.requests) - 1
        request = self.requests.pop()
        if row != last:
            self.requests[row] = request
            for array in (self.length, self.token, self.count, self._limit, self._seed, self._temperature,
                          self._stop_set, self._ids, self._logprobs):  # fmt: skip
                array[row] = array[last]
        return last

    def _stop_index(self, stop_ids: frozenset[int]) -> int:
        index = self._stop_sets.get(stop_ids)
        if index is None:
            index = self._stop_sets[stop_ids] = len(self._stop_sets)
            self._stops = np.vstack([self._stops, np.zeros((1, self._stops.shape[1]), dtype=bool)])
            self._stops[index, list(stop_ids)] = True
        return index
