"""The steps of giving SGLang a complete set of weights, each of them checked.

score      put something computed with the old weights into the cache
load       give the weights, by whatever transport
flush      empty the cache
score      the same again: nothing of it may come from the cache
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_treeopsd.engine.base import EngineError
from megatron_treeopsd.engine.staging import StagedWeights
from megatron_treeopsd.engine.transport import Call, Transport

_PRIMER = 16
"""Tokens of the request that shows whether the cache was emptied."""


def hand_over(
    call: Call,
    weights: StagedWeights,
    *,
    transport: Transport,
    version: int,
    vocabulary: int,
    asleep: Sequence[str] = (),
    wake: Callable[[Sequence[str]], None] = lambda tags: None,
) -> None:
    """Make the engine serve `weights` as `version`.

    Args:
        call: asks the engine for something by name and waits for the answer (see `sglang_worker.Worker`).
        vocabulary: token ids that exist.
        asleep: memory that the engine has given back. That of the weights is taken again before they come, and that of
            the cache, which is empty then, when they are there; the old weights, which are gone, are not scored.
        wake: takes memory again, by what `asleep` calls it.

    Raises:
        EngineError: if a step was refused, or did not do what it should. What the engine serves is then undefined.
    """
    primer = {"ids": [i % vocabulary for i in range(1, _PRIMER + 1)], "start": _PRIMER - 1}
    if asleep:
        wake([tag for tag in asleep if tag == "weights"])
    else:
        call("score", **primer)
    transport.load(call, weights, version=version)
    if asleep:
        wake([tag for tag in asleep if tag != "weights"])
    call("flush")
    cached = call("score", **primer)["cached_tokens"]
    if cached:
        raise EngineError(f"the cache was not emptied: {cached} tokens of the old weights are still in it")
