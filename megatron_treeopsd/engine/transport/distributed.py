"""A process group of the trainer's process and the engine's: one broadcast a bucket. For engines on GPUs of their own.

Rank 0 is the trainer's, the engine's ranks follow. Both sides of a collective must be under way at the same time, so
the engine is asked here while a thread does the trainer's part. NCCL's part of this was never run; gloo's is tested.
"""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from megatron_treeopsd.engine.base import EngineError
from megatron_treeopsd.engine.staging import Bucket
from megatron_treeopsd.engine.transport.base import BucketTransport, Call

_SECONDS_BEHIND = 10.0
"""Longest that a broadcast may go on when the engine has answered, which it does when it has received it."""


class Distributed(BucketTransport):
    """Broadcasts from `device` to `ranks` processes of the engine. The group is made at the first bucket."""

    def __init__(self, device: torch.device, *, ranks: int, seconds: float) -> None:
        self._device, self._ranks = device, ranks
        self._timeout = datetime.timedelta(seconds=seconds)
        self._name = ""
        self._group: dist.Backend | None = None
        self._store: dist.TCPStore | None = None

    def send(self, call: Call, bucket: Bucket, *, version: str) -> Any:
        """See `BucketTransport.send`."""
        group = self._group or self._meet(call)
        memory = bucket.memory().to(self._device)

        def broadcast() -> None:
            group.broadcast([memory], dist.BroadcastOptions()).wait()
            if memory.is_cuda:
                torch.cuda.synchronize(self._device)

        fields = {"name": self._name, "tensors": bucket.layout(), "version": version}
        return meanwhile(broadcast, lambda: call("update_by_broadcast", **fields))

    def close(self) -> None:
        """See `Transport.close`."""
        self._group = self._store = None

    def _meet(self, call: Call) -> dist.Backend:
        """A group with a process that has just started."""
        size = 1 + self._ranks
        store = self._open_store(size)
        self._name = f"treeopsd-{store.port}"
        backend, kind = ("nccl", "cuda") if self._device.type == "cuda" else ("gloo", "cpu")
        # The names under which PyTorch keeps what the members of a group tell each other.
        prefixed: dist.Store = store
        for prefix in (self._name, f"{self._name}/", f"{kind}/"):
            prefixed = dist.PrefixStore(prefix, prefixed)
        made: list[dist.Backend] = []

        def make() -> None:
            if backend == "gloo":
                made.append(dist.ProcessGroupGloo(prefixed, 0, size, self._timeout))
            else:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self._timeout
                made.append(dist.ProcessGroupNCCL(prefixed, 0, size, options))

        meanwhile(make, lambda: call("join", name=self._name, port=store.port, ranks=size, backend=backend))
        self._store, self._group = store, made[0]
        return self._group

    def _open_store(self, size: int) -> dist.TCPStore:
        """Where the members meet: a port of this machine that is free, and that other machines do not see."""
        listener = socket.create_server(("127.0.0.1", 0))
        host, port = listener.getsockname()
        return dist.TCPStore(
            host, port, size, is_master=True, wait_for_workers=False, timeout=self._timeout,
            master_listen_fd=listener.detach(),
        )  # fmt: skip


def meanwhile(ours: Callable[[], None], theirs: Callable[[], Any]) -> Any:
    """Do both at the same time; returns what `theirs` does.

    Raises `EngineError` if `ours` fails, or does not end when `theirs` has. It is then left alone: it ends when the
    engine's process does, which is the next thing to happen.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            ours()
            done.set_result(None)
        except RuntimeError as error:  # PyTorch's, of the network
            done.set_exception(EngineError(f"the weights could not be sent to SGLang: {error}"))

    Thread(target=run, name="sglang-weights", daemon=True).start()
    answer = theirs()
    try:
        done.result(_SECONDS_BEHIND)
    except TimeoutError:
        raise EngineError(f"SGLang answered {answer}, but has not taken what was sent to it") from None
    return answer
