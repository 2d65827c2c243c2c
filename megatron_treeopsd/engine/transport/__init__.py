"""How a complete set of weights gets from the trainer's process into SGLang's: one file a transport.

    shared_memory   the engine maps the trainer's buckets, which are host memory            a CPU, or any GPU
    cuda_ipc        the engine opens a handle to the trainer's copy on its own GPU          engine on the same GPUs
    distributed     a process group of trainer and engine, one broadcast a bucket           engine on other GPUs
    disk            a Hugging Face folder that the engine reads                             always; the fallback

Nothing of this was ever run with a GPU. On a CPU all four run, `cuda_ipc` over named shared memory instead of CUDA's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from megatron_treeopsd.engine.transport.base import Call, Transport
from megatron_treeopsd.engine.transport.cuda_ipc import CudaIPC
from megatron_treeopsd.engine.transport.disk import Disk
from megatron_treeopsd.engine.transport.distributed import Distributed
from megatron_treeopsd.engine.transport.shared_memory import SharedMemory

Name = Literal["auto", "shared_memory", "cuda_ipc", "distributed", "disk"]

__all__ = ["Call", "Name", "Transport", "build", "resolve"]


def resolve(name: Name, *, cuda: bool, same_gpus: bool) -> Name:
    """What "auto" stands for. `same_gpus`: whether the engine is on the GPUs of the training processes."""
    if name != "auto":
        return name
    if not cuda:
        return "shared_memory"
    return "cuda_ipc" if same_gpus else "distributed"


def build(name: Name, *, device: torch.device, ranks: int, folder: Path, seconds: float) -> Transport:
    """The transport called `name`, which is not "auto".

    Args:
        device: where the trainer's process holds a bucket that the engine is to take.
        ranks: processes that the engine is divided over (tensor parallel).
        folder: for files; an existing folder that is removed with the engine, with the model's `model/config.json`.
        seconds: longest wait for the other side.
    """
    match name:
        case "shared_memory":
            return SharedMemory()
        case "cuda_ipc":
            return CudaIPC(device, ranks=ranks)
        case "distributed":
            return Distributed(device, ranks=ranks, seconds=seconds)
        case "disk":
            return Disk(folder, folder / "model" / "config.json")
    raise ValueError(f"{name} is no transport")
