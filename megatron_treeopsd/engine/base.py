"""The contract between rollout and whoever samples tokens. Only token ids cross it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from megatron_treeopsd.engine.nap import NapCounters

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class EngineError(RuntimeError):
    """The engine could not do what was asked; the message says what and which request."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one turn is sampled.

    Attributes:
        max_new_tokens: limit of sampled tokens, stop token included.
        stop_ids: token ids that end the turn; the stop token is part of the turn.
        temperature: softmax temperature; 0 is greedy. Log-probabilities are reported at this temperature
            (greedy: at temperature 1).
        routes: whether the caller will ask for `Completion.routes`.
    """

    max_new_tokens: int
    stop_ids: frozenset[int]
    temperature: float = 1.0
    routes: bool = False


@dataclass(frozen=True, slots=True)
class Completion:
    """What one request returned: sampled ids, their log-probs in nats, how it ended, and what the cache saved.

    `routes`, if asked for, are int8/int16 [tokens, layers, experts a token]: the experts of all tokens from the first
    one asked for to the last but one, which is all that the engine has computed; see `routes.py`.
    """

    ids: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length", "abort"]
    cached_tokens: int
    version: int
    routes: np.ndarray | None = None


@dataclass(slots=True)
class EngineCounters:
    """Tokens since the last `reset`. prompt = cached + computed."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    requests: int = 0

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    def reset(self) -> None:
        """Start counting at zero."""
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = self.requests = 0


@dataclass(slots=True)
class Engine(ABC):
    """Samples turns for one weight version at a time.

    One request is one sample with its own seed: its result depends on prompt, seed and weights only, never on what
    else is in the batch.
    """

    version: int = -1
    counters: EngineCounters = field(default_factory=EngineCounters)
    naps: NapCounters = field(default_factory=NapCounters)

    @abstractmethod
    async def generate(
        self, prompt_ids: Sequence[int], *, seed: int, sampling: Sampling, session: str, routes_from: int = 0
    ) -> Completion:
        """Sample one turn behind `prompt_ids`. Requests of one `session` (tree) may share a cached prefix.

        With `sampling.routes` the experts of the tokens from position `routes_from` on are returned too. Raises
        `EngineError` if the engine was not built for it or does not return them.
        """

    @abstractmethod
    async def score(self, prefix_ids: Sequence[int], continuation_ids: Sequence[int], *, session: str) -> list[float]:
        """Log-probabilities (nats, temperature 1) of `continuation_ids` behind `prefix_ids`, nothing sampled."""

    @abstractmethod
    def publish(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Take new weights under Hugging Face names, all or nothing, and forget every cached prefix. Wakes the engine.

        Raises `EngineError` naming the tensors if a name is unknown, missing, or of the wrong shape; the old weights
        then stay in use.
        """

    def open(self, session: str, *, tokens: int) -> None:
        """The tree `session` begins and will have at most `tokens` unique tokens. Who says so lets the engine plan."""

    @abstractmethod
    def release(self, session: str) -> None:
        """The tree `session` is finished, or given up: its cache may go. Must follow the last request, come what may.

        Sessions that the engine does not know are ignored.
        """

    @abstractmethod
    def abort(self, session: str) -> None:
        """Cut the tree `session` short: its requests return what they have sampled, and `finish` "abort".

        A turn has one token at least. That goes for requests that wait, and until `release` for those that are still
        to come, too: they sample that one token.
        """

    def sleep(self) -> None:
        """Give memory back while training runs; the next `publish` wakes the engine. Nothing can be sampled between.

        Counted in `naps`. No request may be waiting or running.
        """

    def close(self) -> None:
        """Stop and free everything."""
