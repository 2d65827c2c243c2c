"""Device memory of the trainer that SGLang opens by a handle: a bucket goes to the GPU once, in one piece.

    trainer: bucket on its GPU ── pickled handle ─► sglang_worker ── the same bytes ─► SGLang's scheduler opens it

The process in between must not open the handle, because memory that was imported cannot be exported again. So what
SGLang's scheduler unpickles is made here, on the trainer's side, and handed on as bytes. SGLang's own class for what
lies where in a bucket does not exist in this environment; its scheduler looks at attributes only, so a plain namespace,
which its list of harmless types has, does as well.

The same code shares host memory where there is no GPU; CUDA's part of it was never run.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch import multiprocessing as mp
from torch.multiprocessing.reductions import reduce_tensor

from megatron_treeopsd.engine.staging import Bucket
from megatron_treeopsd.engine.transport.base import BucketTransport, Call

_DEVICE = 6  # position of the device's index among the arguments that rebuild a CUDA tensor


class CudaIPC(BucketTransport):
    """Shares one bucket at a time on `device`; `ranks` processes of the engine open it."""

    def __init__(self, device: torch.device, *, ranks: int) -> None:
        self._device, self._ranks = device, ranks

    def send(self, call: Call, bucket: Bucket, *, version: str) -> Any:
        """See `BucketTransport.send`.

        The engine may answer before its GPU has copied the last of a bucket. So each bucket has memory of its own,
        which PyTorch takes back when those who opened it say that they are done.
        """
        memory = bucket.memory().to(self._device, copy=True)
        if memory.is_cuda:
            torch.cuda.synchronize(self._device)  # the other process knows nothing of this one's streams
        # One each: opening a handle counts, and each rank opens its own.
        handles = [serialise(memory, bucket) for _ in range(self._ranks)]
        taken = call("update_by_handle", handles=handles, tensors=bucket.layout(), version=version)
        if memory.is_cuda:
            torch.cuda.ipc_collect()
        return taken


def serialise(memory: Tensor, bucket: Bucket) -> str:
    """Base64 of what SGLang's scheduler unpickles: a handle to `memory`, and where in it each tensor lies."""
    metadata = []
    for name, shape, dtype_name, start in bucket.layout():
        dtype, size = getattr(torch, dtype_name), torch.Size(shape)
        nbytes = size.numel() * dtype.itemsize
        metadata.append(
            SimpleNamespace(
                name=name, shape=size, dtype=dtype, start_idx=start, end_idx=start + nbytes, numel=nbytes
            )
        )  # fmt: skip
    stream = io.BytesIO()
    with _memory_shared_by_name():
        ForkingPickler(stream).dump({"flattened_tensor": _Shared(memory), "metadata": metadata})
    return base64.b64encode(stream.getvalue()).decode()


class _Shared:
    """Pickled as a tensor that the reader opens in place, on the device that it is on."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        rebuild, arguments = reduce_tensor(self._tensor)
        if self._tensor.is_cuda:  # by the name of the device: the other process may count devices from another one
            name = str(torch.cuda.get_device_properties(self._tensor.device).uuid)
            arguments = (*arguments[:_DEVICE], name, *arguments[_DEVICE + 1 :])
        return rebuild, arguments


@contextmanager
def _memory_shared_by_name() -> Iterator[None]:
    """Host memory is otherwise shared by file descriptors, which processes of another parent cannot fetch."""
    before = mp.get_sharing_strategy()
    mp.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        mp.set_sharing_strategy(before)
