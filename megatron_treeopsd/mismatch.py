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


def corrections(
    trees: Sequence[RolloutTree], behaviour: Behaviour, section: config.Mismatch
) -> tuple[list[np.ndarray], dict[str, float]]:
    """What the weight of each turn is multiplied with, float64 [n_turns] a tree, and counts of turns by what was done.

    With `section.truncate="turn"` the truncated importance weight min(ratio, cap), where the ratio is the product over
    the turn's tokens of trainer over engine probability; else one. A turn is dropped (zero) if its |log ratio| is above
    `section.drop_above`.
    """
    factors: list[np.ndarray] = []
    truncated = dropped = 0
    for differences in turn_differences(trees, behaviour):
        log_ratio = np.array([part.sum() for part in differences], dtype=np.float64)
        factor = np.ones(len(log_ratio))
        if section.truncate == "turn":
            factor = np.exp(np.minimum(log_ratio, np.log(section.cap)))
            truncated += int((log_ratio > np.log(section.cap)).sum())
        if section.drop_above is not None:
            gone = np.abs(log_ratio) > section.drop_above
            factor[gone] = 0.0
            dropped += int(gone.sum())
        factors.append(factor)
    counts = {"mismatch/truncated_turns": float(truncated)} if section.truncate != "none" else {}
    if section.drop_above is not None:
        counts["mismatch/dropped_turns"] = float(dropped)
    return factors, counts


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
