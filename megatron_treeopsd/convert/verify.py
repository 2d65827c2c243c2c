"""Reading both sides back: every tensor bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megatron_treeopsd.convert.processes import Processes
from megatron_treeopsd.convert.rows import BLOCK_BYTES
from megatron_treeopsd.convert.side_by_side import THREADS, side_by_side
from megatron_treeopsd.convert.watch import Watch
from megatron_treeopsd.weights.rules import WeightsError, listing
from megatron_treeopsd.weights.source import TensorSource
from megatron_treeopsd.weights.torch_dist.source import TorchDistSource
from megatron_treeopsd.weights.writer import TensorInfo, row_blocks

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class VerificationError(WeightsError):
    """What was written is not what was read."""


def compare(
    source: TensorSource, written: TensorSource, tensors: Sequence[TensorInfo], here: Processes, watch: Watch
) -> int:
    """Compare all tensors, after conversion to the dtype that they should have; collective. Returns their number.

    Raises `VerificationError` listing those that differ, on every process.
    """

    mine = share(tensors, here)

    def problems_of(part: Sequence[TensorInfo]) -> list[str]:
        return [problem for tensor in part if (problem := _problem(source, written, tensor, watch))]

    def compare_mine() -> tuple[int, list[str]]:
        parts = [partial(problems_of, mine[number::THREADS]) for number in range(THREADS)]
        return len(mine), [problem for found in side_by_side(parts, watch) for problem in found]

    results = here.together(compare_mine)
    if problems := [problem for _, found in results for problem in found]:
        raise VerificationError(f"{written.folder} was not written as it should be:{listing(problems)}")
    return sum(count for count, _ in results)


def share(tensors: Sequence[TensorInfo], here: Processes) -> list[TensorInfo]:
    """Those that this process compares."""
    return [tensor for number, tensor in enumerate(tensors) if here.mine(number)]


def _problem(source: TensorSource, written: TensorSource, tensor: TensorInfo, watch: Watch) -> str:
    name = tensor.name
    found = TensorInfo(name, written.shapes.get(name, ()), written.dtypes.get(name, torch.bool))
    if found != tensor:
        return f"{name}: {found.dtype} {found.shape} instead of {tensor.dtype} {tensor.shape}"
    different = 0
    for start, stop in row_blocks(tensor, BLOCK_BYTES):
        expected = source.read(name, 0, start, stop).to(tensor.dtype)
        different += _differing_bits(expected, written.read(name, 0, start, stop))
        watch.saw((name,), expected)
    if isinstance(written, TorchDistSource) and written.padding(name).any():
        return f"{name}: the rows that pad it are not zero"
    return f"{name}: {different} of {torch.Size(tensor.shape).numel()} values differ" if different else ""


def _differing_bits(left: Tensor, right: Tensor) -> int:
    """Values with another bit pattern: NaN equals itself, and zero is not minus zero."""
    bits = _BITS[left.element_size()]
    left, right = left.view(bits), right.view(bits)
    return 0 if torch.equal(left, right) else int((left != right).sum())
