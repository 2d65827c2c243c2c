"""Weights on their way to an engine in another process: checked, and laid out in shared memory, bucket by bucket.

A set is complete and right before the engine sees any of it, and it stays until the next one has been taken, so that an
engine that has to be started again gets its weights without the trainer. Buckets are anonymous memory files: no names
that could clash, and nothing left behind by a process that is killed. Host memory: one copy of the weights, two while a
set replaces another.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_treeopsd.engine.base import EngineError
from megatron_treeopsd.engine.policy import targets

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each tensor of a checkpoint, by its Hugging Face name."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor in a bucket: its place is `offset` bytes behind the bucket's start."""

    name: str
    shape: tuple[int, ...]
    offset: int


class Bucket:
    """Tensors of one dtype, one right behind the other, in memory that other processes of this user can map by `path`.

    Attributes:
        dtype: of all tensors, by its name in torch.
        nbytes: size of the memory.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> None:
        tensors = list(tensors)
        self.dtype = str(dtype).removeprefix("torch.")
        self.tensors: list[Placed] = []
        self.nbytes = 0
        for name, tensor in tensors:
            self.tensors.append(Placed(name, tuple(tensor.shape), self.nbytes))
            self.nbytes += tensor.numel() * dtype.itemsize
        self._file = os.memfd_create("treeopsd-weights")
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        os.ftruncate(self._file, self.nbytes)
        for view, (_, tensor) in zip(self.views().values(), tensors, strict=True):
            view.copy_(tensor.detach())

    def layout(self) -> list[tuple[str, tuple[int, ...], str, int]]:
        """Name, shape, dtype and offset in bytes of each tensor, as the engine's process is told."""
        return [(placed.name, placed.shape, self.dtype, placed.offset) for placed in self.tensors]

    def memory(self) -> Tensor:
        """uint8 [nbytes]: the memory itself, not a copy."""
        return torch.from_file(self.path, shared=True, size=self.nbytes, dtype=torch.uint8)

    def views(self) -> dict[str, Tensor]:
        """The tensors by name; they are the memory itself, not copies."""
        memory, dtype = self.memory(), getattr(torch, self.dtype)
        sizes = [torch.Size(placed.shape).numel() * dtype.itemsize for placed in self.tensors]
        parts = zip(self.tensors, memory.split(sizes), strict=True)
        return {placed.name: part.view(dtype).view(placed.shape) for placed, part in parts}

    def free(self) -> None:
        """Give the memory back once nobody maps it any more."""
        os.close(self._file)


class StagedWeights:
    """One complete set of weights.

    Args:
        weights: tensors under Hugging Face names, experts one by one. Consumed to its end even if it is refused,
            because it may be a collective of all ranks.
        shapes: what the set must consist of. `lm_head.weight` may come along where the checkpoint ties it to the
            embedding; where `tied` it is always in the set, because not every model of an engine ties it.
        tied: whether the output layer is the embedding.
        dtype: what the engine computes in.
        bucket_bytes: size at which a bucket is closed; a larger tensor has a bucket of its own.

    Raises:
        EngineError: naming the tensors that are unknown, given twice, missing or of a wrong shape.
    """

    def __init__(
        self, weights: Iterable[tuple[str, Tensor]], *, shapes: Shapes, tied: bool, dtype: torch.dtype,
        bucket_bytes: int,
    ) -> None:  # fmt: skip
        self.buckets: list[Bucket] = []
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._pending: list[tuple[str, Tensor]] = []
        self._size = 0
        try:
            problems = self._take(weights, shapes, tied)
        except BaseException:
            self.free()
            raise
        if problems:
            self.free()
            raise EngineError(f"the weights were not taken, {len(problems)} problems: " + "; ".join(problems))

    def __enter__(self) -> StagedWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def free(self) -> None:
        """Give the memory back."""
        while self.buckets:
            self.buckets.pop().free()

    def _take(self, weights: Iterable[tuple[str, Tensor]], shapes: Shapes, tied: bool) -> list[str]:
        missing = set(shapes) - ({HEAD} if tied else set())
        problems: list[str] = []
        embedding = head = None
        for name, tensor in weights:
            if tied and name == HEAD:
                head = tensor.detach().clone()
            elif name not in shapes:
                problems.append(f"unknown name {name}")
            elif tuple(tensor.shape) != shapes[name]:
                problems.append(f"{name} has shape {list(tensor.shape)}, expected {list(shapes[name])}")
                missing.discard(name)
            elif name not in missing:
                problems.append(f"{name} was given twice")
            else:
                missing.remove(name)
                self._put(name, tensor)
                if tied and name == EMBEDDING:
                    embedding = tensor.detach().clone()
                    self._put(HEAD, embedding)
        problems += [f"missing {name}" for name in sorted(missing)]
        if head is not None and embedding is not None and not torch.equal(head, embedding):
            problems.append(f"{HEAD} differs from {EMBEDDING}, but the checkpoint ties them")
        self._close_bucket()
        return problems

    def _put(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * self._dtype.itemsize
        if self._size + size > self._bucket_bytes:
            self._close_bucket()
        self._pending.append((name, tensor))
        self._size += size

    def _close_bucket(self) -> None:
        if self._pending:
            self.buckets.append(Bucket(self._pending, self._dtype))
            self._pending, self._size = [], 0


def checkpoint_shapes(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of a checkpoint's tensors by the names under which they are published, from its config.json alone.

    So it does not matter how the folder stores experts, or whether it is one in Megatron's format.
    """
    if not (checkpoint / "config.json").is_file():
        raise EngineError(f"{checkpoint}: not a checkpoint folder (there is no config.json in it)")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
    arriving = targets(dict(model.named_parameters()))
    return {name: tuple(tensor.shape) for name, (tensor, parts) in arriving.items() if parts == {name}}
