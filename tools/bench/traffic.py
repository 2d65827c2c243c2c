"""Counts what a computation does to the logits: passes over them, how many are held at once, launches. No timing.

`Traffic` watches torch operations through a `TorchDispatchMode`, and kernels through Triton's interpreter, which shows
every address that a kernel reads or writes. An operation of torch is taken to read each input and write each output
once, which is the least it can do; matrix products are not counted, for every method has the same ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MATRIX_PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "matmul", "_addmm_activation"}
ONE_ELEMENT_A_ROW = {"gather", "scatter_add_", "index", "index_put_", "nll_loss_forward"}
"""Operations that touch single elements of the logits that they are given."""
NO_LAUNCH = {
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided",
    "detach", "alias", "_unsafe_view", "_reshape_alias", "lift_fresh", "is_same_size", "promote_types", "result_type",
}  # fmt: skip
NOT_READ = {"copy_", "fill_", "zero_"}
"""Operations in place that overwrite their first argument without reading it."""
ONLY_SHAPE = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "nll_loss_backward"}
"""Operations that write a tensor of the shape of one that they do not read."""


@dataclass
class Traffic:
    """What was counted.

    Attributes:
        reads, writes: elements of logits that were read and written.
        peak_logit_bytes: the most bytes of logits held at once.
        peak_bytes: the most bytes of all tensors that were made under the watch and held at once.
        launches: operations and kernels that run on the device; views and allocations do not.
        copies_to_host: values that the host waited for.
    """

    reads: int = 0
    writes: int = 0
    peak_logit_bytes: int = 0
    peak_bytes: int = 0
    launches: int = 0
    copies_to_host: int = 0
    operations: dict[str, int] = field(default_factory=dict)

    @property
    def accesses(self) -> int:
        return self.reads + self.writes


class _Operations(TorchDispatchMode):
    """Torch operations. Logits are floating tensors of at least two dimensions whose last one is one of `widths`."""

    def __init__(self, traffic: Traffic, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.traffic = traffic
        self.widths = widths
        self.held: dict[int, tuple[StorageWeakRef, int, int, bool]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if self._is_view(func):
            return result
        if name == "_local_scalar_dense":
            self.traffic.copies_to_host += 1
        elif name not in NO_LAUNCH:
            self.traffic.launches += 1
            self.traffic.operations[name] = self.traffic.operations.get(name, 0) + 1
            if name not in MATRIX_PRODUCTS:
                self._count_accesses(func, name, args, kwargs or {}, result)
        self._hold(result)
        return result

    def _is_view(self, func: Any) -> bool:
        """An output that shares the memory of an input, which is not written."""
        return any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)

    def _count_accesses(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        if name in ONE_ELEMENT_A_ROW:
            return
        written: set[int] = set()
        for position, argument in enumerate(func._schema.arguments):
            given = kwargs.get(argument.name, args[position] if position < len(args) else None)
            changed = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in filter(self._is_logits, tree_leaves(given)):
                if changed:
                    self.traffic.writes += tensor.numel()
                    written.add(tensor.untyped_storage().data_ptr())
                if name not in ONLY_SHAPE and not (changed and (name in NOT_READ or argument.name == "out")):
                    self.traffic.reads += tensor.numel()
        for tensor in filter(self._is_logits, tree_leaves(result)):
            if tensor.untyped_storage().data_ptr() not in written:
                self.traffic.writes += tensor.numel()

    def _is_logits(self, value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.dim() >= 2
            and value.shape[-1] in self.widths
        )

    def _hold(self, result: Any) -> None:
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.held:
                    entry = (StorageWeakRef(storage), storage.data_ptr(), storage.nbytes(), self._is_logits(tensor))
                    self.held[storage._cdata] = entry
        self.held = {key: entry for key, entry in self.held.items() if not entry[0].expired()}
        sizes = [(nbytes, logits) for _, _, nbytes, logits in self.held.values()]
        self.traffic.peak_bytes = max(self.traffic.peak_bytes, sum(nbytes for nbytes, _ in sizes))
        self.traffic.peak_logit_bytes = max(
            self.traffic.peak_logit_bytes, sum(nbytes for nbytes, logits in sizes if logits)
        )

    def logit_buffers(self) -> list[tuple[int, int]]:
        """Begin and end addresses of the logits that are held."""
        return [(begin, begin + nbytes) for _, begin, nbytes, logits in self.held.values() if logits]


@contextlib.contextmanager
def watch(*widths: int) -> Iterator[Traffic]:
    """Count everything that happens inside, on this thread. `widths`: how many columns logits may have."""
    traffic = Traffic()
    operations = _Operations(traffic, widths)
    with contextlib.ExitStack() as stack:
        _watch_kernels(traffic, operations, stack)
        stack.enter_context(operations)
        yield traffic


def _watch_kernels(traffic: Traffic, operations: _Operations, stack: contextlib.ExitStack) -> None:
    from triton.runtime import interpreter

    builder, executor = interpreter.interpreter_builder, interpreter.GridExecutor
    load, store, run = builder.create_masked_load, builder.create_masked_store, executor.__call__

    def inside(pointers: Any, mask: Any) -> int:
        addresses = pointers.data[mask.data.astype(bool)]
        return sum(int(((addresses >= begin) & (addresses < end)).sum()) for begin, end in operations.logit_buffers())

    def counted_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        traffic.reads += inside(pointers, mask)
        return load(pointers, mask, *rest)

    def counted_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        traffic.writes += inside(pointers, mask)
        return store(pointers, value, mask, *rest)

    def counted_run(self: Any, *args: Any, **options: Any) -> Any:
        traffic.launches += 1
        name = self.fn.__name__
        traffic.operations[name] = traffic.operations.get(name, 0) + 1
        # What the interpreter itself does with tensors is no part of the kernel.
        with torch.utils._python_dispatch._disable_current_modes():
            return run(self, *args, **options)

    stack.enter_context(mock.patch.object(builder, "create_masked_load", counted_load))
    stack.enter_context(mock.patch.object(builder, "create_masked_store", counted_store))
    stack.enter_context(mock.patch.object(executor, "__call__", counted_run))
