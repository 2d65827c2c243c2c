"""Clipped policy gradient: the credit stays fixed, the ratio is cut where it has moved far enough.

    J_v = mean over the terms of turn v of  min(r C_v, clip(r, 1 - eps_low, 1 + eps_high) C_v)       f_v = -J_v

A term is a token or a whole turn, by the ratio r (ALGORITHMS.md §2 and §3):

    token      r_t = exp(l_t), a term for each token                                     PPO, GRPO, DAPO
    turn       r_t = sg(s_v) pi(y_t) / sg(pi(y_t)),  s_v = exp(mean of l over the turn)  AT2PO
    sequence   the same with the mean of l over all turns of the sequence                GSPO
    turn_sum   r_v = exp(sum of l over the turn), one term                               TreePO

All tokens of a turn have the same credit, so the mean over the tokens of a `turn` or `sequence` turn is one term too:
its value is r(sg(s_v)) and its gradient with respect to each l_t is r / L_v, which is what the forms below have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_treeopsd.objective.base import Objective, Report, TurnTable
from megatron_treeopsd.objective.segments import LogProbError, k3, log_ratios, quantile, turn_sums

Ratio = Literal["token", "turn", "turn_sum", "sequence"]


def sequence_log_ratio(token_sums: Tensor, turns: TurnTable) -> Tensor:
    """[N]: mean of l over the tokens of all turns with the same `TurnTable.sequence` (log s_i of ALGORITHMS.md §3)."""
    sums = torch.zeros_like(token_sums).index_add(0, turns.sequence, token_sums)
    tokens = torch.zeros_like(token_sums).index_add(0, turns.sequence, turns.lengths.to(token_sums.dtype))
    return sums[turns.sequence] / tokens[turns.sequence]


@dataclass(frozen=True)
class Clipped(Objective):
    """f_v as above. The fields are the keys of the recipe section of the same name.

    `clip=False` drops the clip and keeps the ratio. `dual_clip` c bounds the loss of negative credit at c |C|
    (ALGORITHMS.md §3), with or without the clip.
    """

    ratio: Ratio = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip: bool = True
    dual_clip: float | None = None

    def __call__(self, logprobs: Tensor, turns: TurnTable) -> tuple[Tensor, Report]:
        """Loss and report of one micro-batch (see `Objective`).

        Raises `LogProbError` naming the turn if a log-prob is infinite or not a number, or a ratio overflows.
        """
        tokens = log_ratios(logprobs, turns)
        if self.ratio == "token":
            log_ratio, credit = tokens, turns.credit[turns.turn_of_token]
        else:
            log_ratio, credit = self._turn_log_ratio(tokens, turns), turns.credit
        lower, upper = self.bounds(credit)
        terms = -credit * torch.exp(log_ratio.clamp(lower, upper))
        means = turn_sums(terms, turns) / turns.lengths if self.ratio == "token" else terms
        _require_no_overflow(means)
        losses = turns.weight * means
        fixed = log_ratio.detach()
        report = {
            "loss": losses.detach(),
            "log_ratio": fixed,
            "wrong_direction": (fixed * credit < 0).to(fixed.dtype),
            "clipped": (((fixed < lower) | (fixed > upper)) & (credit != 0)).to(fixed.dtype),
            "kl_behaviour": k3(tokens.detach()),
        }
        return losses.sum(), report

    def bounds(self, credit: Tensor) -> tuple[Tensor, Tensor]:
        """The interval of log r outside which a term is constant, for each credit.

        min(r C, clip(r) C) is r C cut at 1 + eps_high for C > 0 and at 1 - eps_low for C < 0; the dual clip
        max(., c C) cuts it at c for C < 0. Without credit r stays at most 1, so that 0 r is 0 however large r is.
        """
        low, high = (math.log1p(-self.clip_low), math.log1p(self.clip_high)) if self.clip else (-math.inf, math.inf)
        dual = math.inf if self.dual_clip is None else math.log(self.dual_clip)
        negative = credit < 0
        lower = torch.full_like(credit, -math.inf).masked_fill(negative, low)
        upper = torch.full_like(credit, high).masked_fill(negative, dual).masked_fill(credit == 0, 0.0)
        return lower, upper

    def _turn_log_ratio(self, tokens: Tensor, turns: TurnTable) -> Tensor:
        sums = turn_sums(tokens, turns)
        if self.ratio == "turn_sum":
            return sums
        means = sums / turns.lengths
        if self.ratio == "turn":
            return means
        return sequence_log_ratio(sums.detach(), turns) + (means - means.detach())

    def summarise(self, report: Report) -> dict[str, float]:
        """Scalars of one mini-batch. Shares are of terms (tokens or turns, by the ratio), in [0, 1].

        loss, log_ratio_abs_median and _p95 (|log r|), clipped_share (terms without gradient because of a clip),
        wrong_direction_share (log r and credit of opposite sign), kl_behaviour (k3, nats a token). What no term
        defines is left out.
        """
        summary = {"objective/loss": float(report["loss"].double().sum())}
        if report["log_ratio"].numel():
            moved = report["log_ratio"].abs()
            summary["objective/log_ratio_abs_median"] = quantile(moved, 0.5)
            summary["objective/log_ratio_abs_p95"] = quantile(moved, 0.95)
            for name in ("wrong_direction", "clipped"):
                summary[f"objective/{name}_share"] = float(report[name].double().mean())
            summary["objective/kl_behaviour"] = float(report["kl_behaviour"].double().mean())
        return summary


def _require_no_overflow(losses: Tensor) -> None:
    finite = torch.isfinite(losses.detach())
    if not bool(finite.all()):
        turn = int((~finite).nonzero()[0])
        raise LogProbError(
            turn,
            "its ratio overflows where nothing bounds it (negative credit, or objective.clip=false); "
            "set objective.dual_clip=3, a smaller optimizer.lr or fewer update.epochs",
        )
