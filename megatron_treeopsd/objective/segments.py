"""From trained tokens to turns: checked log-probs, sums over the tokens of each turn, statistics of ratios."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_treeopsd.objective.base import TurnTable


class LogProbError(ValueError):
    """Log-probs that no loss can be computed from. `turn` is the index of the turn in its turn table."""

    def __init__(self, turn: int, problem: str) -> None:
        super().__init__(f"turn {turn} of the micro-batch: {problem}")
        self.turn = turn
        self.problem = problem


def log_ratios(logprobs: Tensor, turns: TurnTable) -> Tensor:
    """[E]: l_t = log pi_theta - log pi_b of every trained token (ALGORITHMS.md, notation).

    Raises `LogProbError` naming the turn if either of the two is infinite or not a number.
    """
    ratios = logprobs - turns.behaviour
    require_finite(ratios, logprobs, turns)
    return ratios


def require_finite(values: Tensor, logprobs: Tensor, turns: TurnTable) -> None:
    """Raise `LogProbError` naming the turn of the first of `values` [E] that is infinite or not a number."""
    finite = torch.isfinite(values.detach())
    if bool(finite.all()):
        return
    token = int((~finite).nonzero()[0])
    turn = int(torch.searchsorted(turns.offsets, token, right=True)) - 1
    raise LogProbError(
        turn,
        f"the log-prob of its token {token - int(turns.offsets[turn])} is {float(logprobs[token])}, "
        f"and {float(turns.behaviour[token])} under the behaviour policy; the policy has diverged or its weights are "
        "damaged: look at train/grad_norm and the mismatch/ metrics of the steps before",
    )


def turn_sums(values: Tensor, turns: TurnTable) -> Tensor:
    """[N]: the sum of `values` [E] over the tokens of each turn, in order (no atomic adds, so it is repeatable)."""
    # unsafe: do not validate the offsets, which would wait for the device
    return torch.segment_reduce(values, "sum", offsets=turns.offsets, unsafe=True)


def k3(log_ratio: Tensor) -> Tensor:
    """[E]: exp(l) - l - 1 >= 0 of each token; under pi_b its mean estimates KL(pi_b || pi_theta) (ALGORITHMS.md §3)."""
    return torch.expm1(log_ratio) - log_ratio


def quantile(values: Tensor, share: float) -> float:
    """The smallest of `values` that at least `share` of them do not exceed. Any number of values, at least one."""
    rank = max(1, math.ceil(share * values.numel()))
    return float(values.double().kthvalue(rank).values)
