"""What an objective sees: turns as segments of token log-probs, with one credit and one weight each. torch only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TurnTable:
    """The trained turns of one micro-batch. N turns, E trained tokens; turn n owns tokens offsets[n]:offsets[n+1].

    Two turns of 3 and 2 tokens, the second worth twice as much as the first and both of one trajectory:

        offsets   [0, 3, 5]     sequence [0, 0]
        credit    [-0.4, 0.8]   weight   [0.01, 0.02]

    Attributes:
        offsets: int64 [N+1]; every turn has at least one token.
        behaviour: float32/64 [E], log pi_b of every trained token, recomputed by the trainer at the sampling version.
        credit: [N], C_v of ALGORITHMS.md §1.2 (or the advantage of a trajectory, on each of its turns).
        weight: [N], W_v: omega_v over the sum of a whole mini-batch, so that its loss is sum_v W_v f_v and nothing
            has to be divided afterwards, whatever the split into micro-batches and ranks.
        leaves: int64 [N], number of leaves n of the turn's question.
        peak: [N], max |C| within the turn's question.
        sequence: int64 [N], index of the trajectory piece that the turn belongs to, counted within the micro-batch;
            turns of one sequence stand together and in order.
    """

    offsets: Tensor
    behaviour: Tensor
    credit: Tensor
    weight: Tensor
    leaves: Tensor
    peak: Tensor
    sequence: Tensor

    @property
    def turn_count(self) -> int:
        return self.offsets.numel() - 1

    @property
    def lengths(self) -> Tensor:
        """int64 [N]: L_v, trained tokens of each turn."""
        return self.offsets.diff()

    @property
    def turn_of_token(self) -> Tensor:
        """int64 [E]: index of the turn that each trained token belongs to."""
        index = torch.arange(self.turn_count, device=self.offsets.device)
        return torch.repeat_interleave(index, self.lengths, output_size=self.behaviour.numel())

    def to(self, device: torch.device) -> TurnTable:
        return replace(self, **{f.name: getattr(self, f.name).to(device) for f in fields(self)})


Report = dict[str, Tensor]
"""Detached per-turn (or per-token) values by name; concatenated over micro-batches and ranks, then summarised."""


class Objective(ABC):
    """A pure function of tensors: current log-probs and a turn table to a loss.

    `uses_behaviour` says whether `TurnTable.behaviour` is looked at; if not, it need not be computed.
    """

    uses_behaviour: ClassVar[bool] = True

    @abstractmethod
    def __call__(self, logprobs: Tensor, turns: TurnTable) -> tuple[Tensor, Report]:
        """Loss (scalar, sum over turns of weight times the turn's loss) and the values to report.

        `logprobs` is [E] with gradient: log pi_theta of every trained token. Must give an exact zero with gradient
        (`logprobs.sum() * 0`) for a table without turns.
        """

    def summarise(self, report: Report) -> dict[str, float]:
        """Scalars for one mini-batch from the concatenated reports of all its micro-batches, by stable tag names."""
        return {name: float(values.double().mean()) for name, values in report.items() if values.numel()}
