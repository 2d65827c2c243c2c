"""Small turn tables for tests of objectives, in float64 unless asked otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_treeopsd.objective import Objective, TurnTable


def turn_table(
    lengths: Sequence[int],
    credit: Sequence[float] | Tensor,
    *,
    behaviour: Tensor | None = None,
    weight: Sequence[float] | Tensor | None = None,
    leaves: int = 12,
    peak: float | None = None,
    sequence: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
) -> TurnTable:
    """Turns of the given lengths and credits; equal weights, and behaviour log-probs of -1, unless given."""
    count, tokens = len(lengths), sum(lengths)
    credits = torch.as_tensor(credit, dtype=dtype)
    largest = float(credits.abs().max()) if count else 0.0
    return TurnTable(
        offsets=torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0),
        behaviour=torch.full((tokens,), -1.0, dtype=dtype) if behaviour is None else behaviour.to(dtype),
        credit=credits,
        weight=torch.full((count,), 1 / max(count, 1), dtype=dtype)
        if weight is None
        else torch.as_tensor(weight, dtype=dtype),
        leaves=torch.full((count,), leaves, dtype=torch.int64),
        peak=torch.full((count,), largest if peak is None else peak, dtype=dtype),
        sequence=torch.arange(count) if sequence is None else torch.tensor(sequence, dtype=torch.int64),
    )


def random_case(seed: int, count: int = 12, spread: float = 0.3) -> tuple[Tensor, TurnTable]:
    """Log-probs (with gradient) and a table of turns of 1 to 9 tokens, three turns a sequence, unequal weights."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 10, (count,), generator=generator).tolist()
    behaviour = -2 * torch.rand(sum(lengths), generator=generator, dtype=torch.float64) - 1
    moved = behaviour + spread * torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    turns = turn_table(
        lengths,
        torch.randn(count, generator=generator, dtype=torch.float64),
        behaviour=behaviour,
        weight=torch.rand(count, generator=generator, dtype=torch.float64) / count,
        sequence=[index // 3 for index in range(count)],
    )
    return moved.requires_grad_(), turns


def loss_and_gradient(objective: Objective, logprobs: Tensor, turns: TurnTable) -> tuple[float, Tensor]:
    leaf = logprobs.detach().clone().requires_grad_()
    loss, _ = objective(leaf, turns)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.item(), gradient
