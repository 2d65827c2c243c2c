"""The contract of all transports: a set arrives whole, and every answer is checked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from megatron_treeopsd.engine.base import EngineError
from megatron_treeopsd.engine.staging import Bucket, StagedWeights

Call = Callable[..., Any]
"""Asks the engine's process for something by name, with fields as keywords, and waits for the answer."""


class Transport(ABC):
    """One way to give an engine a set of weights."""

    @abstractmethod
    def load(self, call: Call, weights: StagedWeights, *, version: int) -> None:
        """Make the engine hold `weights`.

        Raises `EngineError` if anything was refused, or if the engine says that it took something else than was sent.
        What it holds is then undefined.
        """

    def close(self) -> None:
        """Forget the engine's process, which has ended or is about to; the next `load` meets another one."""


class BucketTransport(Transport):
    """Opens an update, gives one bucket after the other, closes the update."""

    def load(self, call: Call, weights: StagedWeights, *, version: int) -> None:
        """See `Transport.load`."""
        call("begin")
        for bucket in weights.buckets:
            check_taken(self.send(call, bucket, version=str(version)), len(bucket.tensors), bucket.nbytes)
        call("end")

    @abstractmethod
    def send(self, call: Call, bucket: Bucket, *, version: str) -> Any:
        """Give the engine one bucket; returns what it says it took: {"tensors": count, "bytes": sum}."""


def check_taken(taken: Any, tensors: int, nbytes: int) -> None:
    """Raise `EngineError` unless the engine took what it was given."""
    if taken != {"tensors": tensors, "bytes": nbytes}:
        raise EngineError(f"SGLang took {taken} of a bucket of {tensors} tensors and {nbytes} bytes")
