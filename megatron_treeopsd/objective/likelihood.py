"""Negative log-likelihood of the sampled tokens: supervised learning on the rails of reinforcement learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megatron_treeopsd.objective.base import Objective, Report, TurnTable
from megatron_treeopsd.objective.segments import require_finite, turn_sums


@dataclass(frozen=True)
class Likelihood(Objective):
    """f_v = -(1/L_v) sum_t log pi_theta(y_t). Credit and behaviour log-probs play no part."""

    uses_behaviour: ClassVar[bool] = False

    def __call__(self, logprobs: Tensor, turns: TurnTable) -> tuple[Tensor, Report]:
        """Loss and report of one micro-batch (see `Objective`).

        Raises `LogProbError` naming the turn if a log-prob is infinite or not a number.
        """
        require_finite(logprobs, logprobs, turns)
        losses = -turns.weight * turn_sums(logprobs, turns) / turns.lengths
        return losses.sum(), {"loss": losses.detach(), "nll": -logprobs.detach()}

    def summarise(self, report: Report) -> dict[str, float]:
        """`objective/loss`, and `objective/nll`: the mean negative log-likelihood of a token in nats."""
        summary = {"objective/loss": float(report["loss"].double().sum())}
        if report["nll"].numel():
            summary["objective/nll"] = float(report["nll"].double().mean())
        return summary
