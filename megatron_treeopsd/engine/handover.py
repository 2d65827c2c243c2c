"""The steps of giving SGLang a complete set of weights, each of them checked.

score      put something computed with the old weights into the cache
begin      open the update
update     one request a bucket; SGLang says how much of it it took
end        close the update
flush      empty the cache
score      the same again: nothing of it may come from the cache
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_treeopsd.engine.base import EngineError
from megatron_treeopsd.engine.staging import StagedWeights

_PRIMER = 16
"""Tokens of the request that shows whether the cache was emptied."""


def hand_over(call: Callable[..., Any], weights: StagedWeights, *, version: int, vocabulary: int) -> None:
    """Make the engine serve `weights` as `version`.

    Args:
        call: asks the engine for something by name and waits for the answer (see `sglang_worker.Worker`).
        vocabulary: token ids that exist.

    Raises:
        EngineError: if a step was refused, or did not do what it should. What the engine serves is then undefined.
    """
    primer = {"ids": [i % vocabulary for i in range(1, _PRIMER + 1)], "start": _PRIMER - 1}
    call("score", **primer)
    call("begin")
    for bucket in weights.buckets:
        taken = call(
            "update",
            path=bucket.path,
            nbytes=bucket.nbytes,
            tensors=[[placed.name, placed.shape, bucket.dtype, placed.offset] for placed in bucket.tensors],
            version=str(version),
        )
        if taken != {"tensors": len(bucket.tensors), "bytes": bucket.payload}:
            raise EngineError(
                f"SGLang took {taken} of a bucket of {len(bucket.tensors)} tensors and {bucket.payload} bytes"
            )
    call("end")
    call("flush")
    cached = call("score", **primer)["cached_tokens"]
    if cached:
        raise EngineError(f"the cache was not emptied: {cached} tokens of the old weights are still in it")
