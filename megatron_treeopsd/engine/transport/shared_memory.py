"""Host memory that both processes map: the trainer's staged buckets, by the path of their memory file."""

from __future__ import annotations

from typing import Any

from megatron_treeopsd.engine.staging import Bucket
from megatron_treeopsd.engine.transport.base import BucketTransport, Call


class SharedMemory(BucketTransport):
    """Nothing is copied on the trainer's side, and nothing has a name that could be left behind."""

    def send(self, call: Call, bucket: Bucket, *, version: str) -> Any:
        """See `BucketTransport.send`."""
        return call("update", path=bucket.path, nbytes=bucket.nbytes, tensors=bucket.layout(), version=version)
