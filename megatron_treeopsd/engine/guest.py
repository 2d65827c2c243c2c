"""The engine of a training process that has none of its own: another process samples for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from megatron_treeopsd.engine.base import Completion, Engine, EngineError, Sampling

if TYPE_CHECKING:
    from torch import Tensor

_NOTHING = "this training process has no engine of its own (engine.ranks_per_engine); it cannot sample"


class GuestEngine(Engine):
    """Takes part in the collective that streams weights, and samples nothing."""

    async def generate(
        self, prompt_ids: Sequence[int], *, seed: int, sampling: Sampling, session: str, routes_from: int = 0
    ) -> Completion:
        """Not here."""
        raise EngineError(_NOTHING)

    async def score(self, prefix_ids: Sequence[int], continuation_ids: Sequence[int], *, session: str) -> list[float]:
        """Not here."""
        raise EngineError(_NOTHING)

    def publish(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Walk through the stream, because its other ranks wait for this one's parts."""
        deque(weights, maxlen=0)
        self.version = version

    def release(self, session: str) -> None:
        """Nothing is held."""

    def abort(self, session: str) -> None:
        """Nothing is running."""
