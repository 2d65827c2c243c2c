"""Residual objective: forward KL from a bounded Bernoulli target to the ratio of a turn (ALGORITHMS.md §1.3).

The credit of a turn says how far its probability should move away from the behaviour policy; the loss pulls the turn
there and no further:

    token log-probs ──► x = log ratio of the turn ──► student  p = sigmoid(x)  ┐
                                                                              ├──►  eta KL(q || p),  d/dx = eta (p - q)
    credit ──► u = clip(C / kappa, -1, 1) ────────► teacher  q = map(u)        ┘

Student and teacher are handled through their logits x and x* and their distances from 1/2. Both are exact near 1/2,
where single precision would lose p - q, and finite for any x.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_treeopsd.objective import kernels
from megatron_treeopsd.objective.base import Objective, Report, TurnTable
from megatron_treeopsd.objective.segments import k3, log_ratios, quantile, turn_sums

Teacher = Literal["affine_prob", "affine_odds", "logistic"]
Ratio = Literal["sum", "mean", "sqrt"]


def turn_log_ratio(token_log_ratios: Tensor, turns: TurnTable, ratio: Ratio) -> Tensor:
    """x_v [N] = (beta_v / L_v) sum_t l_t with beta_v = L_v (`sum`), 1 (`mean`) or sqrt(L_v) (`sqrt`)."""
    total = turn_sums(token_log_ratios, turns)
    if ratio == "sum":
        return total
    lengths = turns.lengths.to(total.dtype)
    return total / (lengths if ratio == "mean" else lengths.sqrt())


def normalised_credit(credit: Tensor, kappa: Tensor) -> Tensor:
    """u [N] = clip(C / kappa, -1, 1); zero where kappa is zero, that is where no leaf differs from another."""
    return torch.where(kappa > 0, credit / kappa, 0.0).clamp(-1.0, 1.0)


def teacher_offset(u: Tensor, radius: float, teacher: Teacher) -> Tensor:
    """q - 1/2 [N] of the teacher maps A (delta u), B (r u / (2 (2 + r u))) and C (sigmoid(r u) - 1/2), r = 4 delta."""
    if teacher == "affine_prob":
        return radius * u
    ru = 4 * radius * u
    return ru / (2 * (2 + ru)) if teacher == "affine_odds" else torch.tanh(ru / 2) / 2


def target_log_ratio(u: Tensor, radius: float, teacher: Teacher) -> Tensor:
    """x* [N] = logit(q), the log ratio at which the residual vanishes: 2 artanh(2 delta u), log(1 + r u) or r u."""
    if teacher == "affine_prob":
        return 2 * torch.atanh(2 * radius * u)
    return torch.log1p(4 * radius * u) if teacher == "affine_odds" else 4 * radius * u


def mixture_weights(u: Tensor, radius: float) -> Tensor:
    """(2 + r u) / 2 [N], which makes the gradient of `affine_odds` at ratio one exactly proportional to u."""
    return 1 + 2 * radius * u


def residual(x: Tensor, offset: Tensor) -> Tensor:
    """p - q [N] = tanh(x / 2) / 2 - (q - 1/2)."""
    return torch.tanh(x / 2) / 2 - offset


def divergence(x: Tensor, target: Tensor) -> Tensor:
    """KL(q || p) [N] in float64, from the logits x of p and x* of q.

    Equal to q softplus(-x) + (1-q) softplus(x) - H(q), written as the Bregman divergence of softplus:
    softplus(x) - softplus(x*) - q (x - x*).
    """
    x, target = x.double(), target.double()
    return logsigmoid(-target) - logsigmoid(-x) - torch.sigmoid(target) * (x - target)


@dataclass(frozen=True)
class BernoulliKL(Objective):
    """f_v = eta_v KL(q_v || p_v). The fields are the keys of the recipe section of the same name.

    With scale `policy_gradient`, eta_v = kappa/delta: at ratio one the negative gradient with respect to x_v is then
    C_v (within |C| <= kappa), exactly for `affine_prob` and for `affine_odds` with its mixture weight, to first order
    in the radius otherwise. kappa may differ between questions (`sqrt_leaves`, `max`).

    `one_sided` is a deviation from the method: turns beyond their target are left alone (`both`), or those of
    negative credit are (`negative`); value and gradient of a turn left alone are zero.

    A turn with |x| above `max_log_ratio` is dropped: value and gradient zero, weights of the others unchanged.
    """

    teacher: Teacher = "affine_prob"
    ratio: Ratio = "sum"
    radius: float = 0.1
    kappa: Literal["sqrt_leaves", "max"] | float = "sqrt_leaves"
    one_sided: Literal["none", "negative", "both"] = "none"
    mixture_weight: bool = False
    scale: Literal["policy_gradient", "one"] = "policy_gradient"
    max_log_ratio: float = 5.0

    def __call__(self, logprobs: Tensor, turns: TurnTable) -> tuple[Tensor, Report]:
        """Loss and report of one micro-batch (see `Objective`).

        The loss has the value sum_v W_v f_v and, to the last bit, the gradient of the surrogate
        sum_v W_v eta_v sg(p_v - q_v) x_v, which is the same function of the policy.
        Raises `LogProbError` naming the turn if a log-prob is infinite or not a number.

        On a GPU it is one kernel, which gives what `reference` gives.
        """
        if turns.turn_count and kernels.choose(logprobs.device).kernels:
            from megatron_treeopsd.objective.kernels.turn_kl import turn_kl

            return turn_kl(logprobs, turns, **asdict(self))
        return self.reference(logprobs, turns)

    def reference(self, logprobs: Tensor, turns: TurnTable) -> tuple[Tensor, Report]:
        """The same in torch operations: what the kernel is tested against, and the path of every other device."""
        tokens = log_ratios(logprobs, turns)
        x = turn_log_ratio(tokens, turns, self.ratio)
        fixed = x.detach()
        kappa = self.credit_scale(turns)
        u = normalised_credit(turns.credit, kappa)
        scale = turns.weight * self._eta(u, kappa)
        pull = scale * residual(fixed, teacher_offset(u, self.radius, self.teacher))
        target = target_log_ratio(u, self.radius, self.teacher)

        dropped = fixed.abs() > self.max_log_ratio
        active = ~(dropped | self._left_alone(pull, u))
        losses = torch.where(active, scale * divergence(fixed, target).to(x.dtype), 0.0)
        surrogate = (torch.where(active, pull, 0.0) * x).sum()
        report = {
            "loss": losses,
            "log_ratio": fixed,
            "target_log_ratio": target,
            "pull": pull,
            "dropped": dropped.to(x.dtype),
            "kl_behaviour": k3(tokens.detach()),
        }
        return surrogate - surrogate.detach() + losses.sum(), report

    def credit_scale(self, turns: TurnTable) -> Tensor:
        """kappa_v [N]: the credit that reaches the full radius; sqrt(n-1) bounds every credit of n leaves (§1.2)."""
        if self.kappa == "sqrt_leaves":
            return (turns.leaves - 1).to(turns.credit.dtype).sqrt()
        if self.kappa == "max":
            return turns.peak
        return torch.full_like(turns.credit, float(self.kappa))

    def _eta(self, u: Tensor, kappa: Tensor) -> Tensor:
        """eta_v [N], the mixture weight included. kappa/delta serves all maps, since 4 kappa/r = kappa/delta."""
        eta = kappa / self.radius if self.scale == "policy_gradient" else torch.ones_like(u)
        return eta * mixture_weights(u, self.radius) if self.mixture_weight else eta

    def _left_alone(self, pull: Tensor, u: Tensor) -> Tensor:
        """bool [N]: turns beyond their target whose reversal `one_sided` switches off."""
        if self.one_sided == "none":
            return torch.zeros_like(u, dtype=torch.bool)
        beyond = pull * u > 0
        return beyond & (u < 0) if self.one_sided == "negative" else beyond

    def summarise(self, report: Report) -> dict[str, float]:
        """Scalars of one mini-batch. Shares are of turns, in [0, 1]; x* stands for `target_log_ratio`.

        loss, dropped_turns (count), kl_behaviour (k3, nats a token), log_ratio_abs_median and _p95 (|x|) are over all
        turns. progress_median (x/x*), reversed_share (x beyond x*), near_target_share (p within 10 % of the way from
        1/2 to q) and wrong_direction_share (x/x* < 0) are over turns that have a target: |x*| above 0.01, or above a
        tenth of the largest |x*| if the radius is so small. reversed_negative_weight_share is the part of the batch's
        total pull, sum_v |W_v eta_v (p_v - q_v)|, that lifts turns of negative credit back up to their target; it is
        measured before `one_sided` switches anything off, so that it can be compared between settings.

        What no turn defines is left out.
        """
        loss, x, target = (report[name].double() for name in ("loss", "log_ratio", "target_log_ratio"))
        pull, dropped = report["pull"].double(), report["dropped"] > 0
        summary = {"objective/loss": float(loss.sum()), "objective/dropped_turns": float(dropped.sum())}
        if not x.numel():
            return summary
        summary["objective/kl_behaviour"] = float(report["kl_behaviour"].double().mean())
        summary["objective/log_ratio_abs_median"] = quantile(x.abs(), 0.5)
        summary["objective/log_ratio_abs_p95"] = quantile(x.abs(), 0.95)
        total_pull = float(pull.abs()[~dropped].sum())
        if total_pull:
            lifted = (pull < 0) & (target < 0) & ~dropped
            summary["objective/reversed_negative_weight_share"] = float(pull.abs()[lifted].sum()) / total_pull
        largest = float(target_log_ratio(torch.tensor(1.0, dtype=torch.float64), self.radius, self.teacher))
        aimed = target.abs() > min(1e-2, 0.1 * largest)
        if aimed.any():
            x, target = x[aimed], target[aimed]
            progress = x / target
            way = torch.tanh(target / 2)
            summary["objective/progress_median"] = quantile(progress, 0.5)
            summary["objective/reversed_share"] = _share(progress > 1)
            summary["objective/near_target_share"] = _share((torch.tanh(x / 2) - way).abs() <= 0.1 * way.abs())
            summary["objective/wrong_direction_share"] = _share(progress < 0)
        return summary


def _share(mask: Tensor) -> float:
    return float(mask.double().mean())
