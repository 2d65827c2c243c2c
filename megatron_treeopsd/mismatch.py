"""Differences between the engine's log-probabilities and the trainer's: measured, corrected, watched.

Both compute the same policy with different kernels, and a mixture of experts may route a token elsewhere over a
rounding error. What was sampled then comes from a slightly other distribution than the one whose gradient is taken. The
trainer's numbers at the sampling version are the behaviour policy; the ratio trainer/engine of a turn corrects for the
rest.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from megatron_treeopsd import config
from megatron_treeopsd.tree import RolloutTree

logger = logging.getLogger(__name__)

Behaviour = Sequence[Sequence[np.ndarray]]
"""For each tree and turn the trainer's log-probs of the sampled tokens, float [L_v]."""


def measure(trees: Sequence[RolloutTree], behaviour: Behaviour) -> dict[str, float]:
    """How far the engine's log-probs are from the trainer's, in nats a token and as a ratio a turn."""
    differences = [part for tree in turn_differences(trees, behaviour) for part in tree]
    every = np.abs(np.concatenate([np.empty(0), *differences]))
    return {
        "mismatch/logprob_abs_mean": float(every.mean()) if every.size else 0.0,
        "mismatch/logprob_abs_max": float(every.max()) if every.size else 0.0,
        "mismatch/turn_ratio_error_max": max([0.0, *(abs(float(np.expm1(-part.sum()))) for part in differences)]),
    }


@dataclass(frozen=True, slots=True)
class Corrections:
    """What training makes of the differences; one entry a tree.

    Attributes:
        turns: float64 [n_turns], what the weight of each turn is multiplied with.
        tokens: for each turn float64 [L_v], what the gradient of each token's log-prob is multiplied with; None for
            one.
        counts: turns or tokens by what was done to them, as metrics.
    """

    turns: list[np.ndarray]
    tokens: list[list[np.ndarray]] | None
    counts: dict[str, float]


def corrections(trees: Sequence[RolloutTree], behaviour: Behaviour, section: config.Mismatch) -> Corrections:
    """Truncated importance weights min(ratio, cap), where the ratio is trainer over engine probability, and drops.

    With `section.truncate="turn"` the ratio is that of a whole turn, the product over its tokens, and weighs the turn.
    With "token" each token has its own (TIS, Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training"): of a loss that is a sum over tokens it weighs the token's term, of a loss of the turn's
    ratio the token's part in the gradient. A turn is dropped (weight zero) if its |log ratio| is above
    `section.drop_above`.
    """
    differences = turn_differences(trees, behaviour)
    log_ratios = [np.array([part.sum() for part in of_tree], dtype=np.float64) for of_tree in differences]
    turns = [np.ones(len(of_tree)) for of_tree in log_ratios]
    tokens: list[list[np.ndarray]] | None = None
    counts: dict[str, float] = {}
    bound = np.log(section.cap)
    if section.truncate == "turn":
        turns = [np.exp(np.minimum(of_tree, bound)) for of_tree in log_ratios]
        counts["mismatch/truncated_turns"] = float(sum((of_tree > bound).sum() for of_tree in log_ratios))
    if section.truncate == "token":
        tokens = [[np.exp(np.minimum(part, bound)) for part in of_tree] for of_tree in differences]
        counts["mismatch/truncated_tokens"] = float(
            sum((part > bound).sum() for of_tree in differences for part in of_tree)
        )
    if section.drop_above is not None:
        gone = [np.abs(of_tree) > section.drop_above for of_tree in log_ratios]
        turns = [np.where(drop, 0.0, factor) for drop, factor in zip(gone, turns, strict=True)]
        counts["mismatch/dropped_turns"] = float(sum(drop.sum() for drop in gone))
    return Corrections(turns, tokens, counts)


def turn_differences(trees: Sequence[RolloutTree], behaviour: Behaviour) -> list[list[np.ndarray]]:
    """Trainer minus engine, nats: for each tree and turn float64 [L_v]."""
    return [
        [
            np.asarray(values, dtype=np.float64) - np.asarray(turn.sampled_logprobs, dtype=np.float64)
            for turn, values in zip(tree.turns, logprobs, strict=True)
        ]
        for tree, logprobs in zip(trees, behaviour, strict=True)
    ]


class Alarm:
    """Watches the mean difference a token: what matters is that it grows, not where it starts.

    Compares the median of the latest `alarm_window` steps with that of the first ones since the run was started or
    resumed.
    """

    def __init__(self, section: config.Mismatch) -> None:
        self._section = section
        self._first: list[float] = []
        self._latest: deque[float] = deque(maxlen=section.alarm_window)

    def note(self, step: int, mean: float) -> dict[str, float]:
        """Take the mean absolute difference (nats a token) of a step; returns the trend as a metric once it is known.

        Logs a warning while the trend is above `alarm_rise` and the level above `alarm_floor`.
        """
        section = self._section
        if not section.alarm_rise:
            return {}
        if len(self._first) < section.alarm_window:
            self._first.append(mean)
            return {}
        self._latest.append(mean)
        if len(self._latest) < section.alarm_window:
            return {}
        level, start = median(self._latest), median(self._first)
        trend = level / max(start, 1e-12)
        if trend > section.alarm_rise and level > section.alarm_floor:
            logger.warning(
                "step %d: engine and trainer drift apart: %.1e nats a token, %.1f times as much as in the first %d "
                "steps (mismatch.alarm_rise=%g). Check that all weights are published, and the precision of both",
                step, level, trend, section.alarm_window, section.alarm_rise,
            )  # fmt: skip
        return {"mismatch/trend": trend}
