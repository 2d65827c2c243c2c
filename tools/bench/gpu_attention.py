"""Tree attention beside attention on flattened leaves, for tools/bench/gpu.py: same numbers, how much faster.

One trunk and its branches, as rollout makes them; the flattened arm holds every leaf whole, packed into one call of the
same kernel. What is compared is the attention of one layer with the gathering of shared keys, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_treeopsd.backend.attention import AttentionKernel, choose_kernel
from megatron_treeopsd.backend.rows import GatherRows
from megatron_treeopsd.batch.packed import PackedTrees
from megatron_treeopsd.objective import TurnTable


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the attention: heads, groups of keys and values, size of a head; tokens of the trunk, depths of the forks."""

    heads: int
    groups: int
    width: int
    trunk: int
    forks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compared:
    """Tree against flattened attention. Errors are norms of differences relative to the norm of the flattened result.

    FLOP are those of the products of a causal attention, forward and backward (3.5 times the forward pass).
    """

    kernel: str
    output_error: float
    gradient_error: float
    tree_flop: float
    flat_flop: float
    token_ratio: float


class TreeCase:
    """The same random queries, keys and values, packed both ways; `tree` and `flat` are one forward and backward."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        self.kernel: AttentionKernel = choose_kernel(device, dtype)
        paths = _paths(shape)
        owned = [paths[0], *(path[path >= shape.trunk] for path in paths[1:])]
        self.packed_tree = _pack([own.numel() for own in owned], paths).to(device)
        lengths = [path.numel() for path in paths]
        self.packed_flat = _pack(lengths, list(torch.arange(sum(lengths)).split(lengths))).to(device)
        self.row_of_copy = torch.cat(paths).to(device)
        rows = self.packed_tree.token_count
        generator = torch.Generator(device).manual_seed(0)

        def draw(*size: int) -> Tensor:
            return torch.randn(rows, *size, device=device, dtype=dtype, generator=generator)

        self.query = draw(shape.heads, shape.width).requires_grad_()
        self.keys_and_values = draw(2 * shape.groups, shape.width).requires_grad_()
        self.upstream = draw(shape.heads * shape.width)
        self.plan_tree = self.kernel.plan(self.packed_tree, dtype)
        self.plan_flat = self.kernel.plan(self.packed_flat, dtype)
        # Whole leaves need no gathering, unless the kernel pads them.
        self.flat_in_place = torch.equal(self.plan_flat.key_rows, self.packed_flat.key_rows)
        copies = self.row_of_copy.bincount(minlength=rows)
        self.flat_query = self.query.detach()[self.row_of_copy].requires_grad_()
        self.flat_keys_and_values = self.keys_and_values.detach()[self.row_of_copy].requires_grad_()
        self.flat_upstream = (self.upstream / copies[:, None])[self.row_of_copy]

    def tree(self) -> tuple[Tensor, ...]:
        """Output and gradients of queries, keys and values."""
        gathered = GatherRows.apply(self.keys_and_values, self.plan_tree.key_rows)
        return self._finish(self.query, self.keys_and_values, gathered, self.plan_tree, self.upstream)

    def flat(self) -> tuple[Tensor, ...]:
        source = self.flat_keys_and_values
        gathered = source if self.flat_in_place else GatherRows.apply(source, self.plan_flat.key_rows)
        return self._finish(self.flat_query, source, gathered, self.plan_flat, self.flat_upstream)

    def _finish(
        self, query: Tensor, source: Tensor, gathered: Tensor, plan: object, upstream: Tensor
    ) -> tuple[Tensor, ...]:
        keys, values = gathered.split(self.shape.groups, 1)
        output = self.kernel.attend(query, keys, values, plan, self.shape.width**-0.5)
        return output.detach(), *torch.autograd.grad(output, (query, source), upstream)

    def compare(self) -> Compared:
        output, *gradients = self.tree()
        flat_output, *flat_gradients = self.flat()
        summed = []
        for gradient in flat_gradients:
            total = gradient.new_zeros((self.packed_tree.token_count, *gradient.shape[1:]), dtype=torch.float32)
            summed.append(total.index_add_(0, self.row_of_copy, gradient.float()))
        flop = 3.5 * 4 * self.shape.heads * self.shape.width
        return Compared(
            kernel=self.kernel.name,
            output_error=_relative(output[self.row_of_copy], flat_output),
            gradient_error=max(_relative(mine, other) for mine, other in zip(gradients, summed, strict=True)),
            tree_flop=flop * self.packed_tree.pair_count,
            flat_flop=flop * self.packed_flat.pair_count,
            token_ratio=self.packed_flat.token_count / self.packed_tree.token_count,
        )


def _paths(shape: Shape) -> list[Tensor]:
    """Rows of each leaf: the trunk first, then branches, each of the trunk up to its fork and rows of its own."""
    paths = [torch.arange(shape.trunk)]
    first = shape.trunk
    for fork in shape.forks:
        own = shape.trunk - fork
        paths.append(torch.cat((torch.arange(fork), torch.arange(first, first + own))))
        first += own
    return paths


def _pack(queries: Sequence[int], paths: Sequence[Tensor]) -> PackedTrees:
    """Chains with these numbers of queries and these paths; nothing is trained."""
    none, nothing = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    rows = sum(queries)
    return PackedTrees(
        ids=torch.zeros(rows, dtype=torch.int64),
        positions=torch.cat([torch.arange(path.numel())[-own:] for own, path in zip(queries, paths, strict=True)]),
        query_offsets=torch.tensor([0, *queries]).cumsum(0),
        key_rows=torch.cat(list(paths)),
        key_offsets=torch.tensor([0, *(path.numel() for path in paths)]).cumsum(0),
        edge_rows=none,
        edge_labels=none,
        turns=TurnTable(torch.zeros(1, dtype=torch.int64), nothing, nothing, nothing, none, nothing, none),
    )


def _relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())
