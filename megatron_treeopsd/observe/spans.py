"""Where the seconds of a run went: named spans that partition the wall clock of every step.

    spans = Spans()                          the clock starts
    with spans.paused("startup"): ...        known, but not training time
    for step in ...:
        with spans("rollout"):
            with spans("rollout/prefill"):   a detail of rollout, not part of the partition
                ...
        with spans("update"): ...
        seconds = spans.finish_step()        {"rollout": 2.0, "update": 1.1, "other": 0.02}, sums to the step's time

A step begins where the one before it ended, so no second is lost: what is in no span is `other`, and what happens
between two steps belongs to the second one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

OTHER = "other"
_NANO = 1_000_000_000


class SpanError(RuntimeError):
    """Spans used in a way that would count a second twice, or not at all."""


class Spans:
    """Partitions the wall clock into named spans, step by step and over the whole run.

    Time is kept in whole nanoseconds, so sums over a long run do not drift. Two clocks come out of it:
    `training_seconds` (everything but `paused` time, the clock of budgets and comparisons) and `total_seconds`.

    Args:
        clock: monotonic time in nanoseconds; tests pass their own.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._open: list[str] = []
        self._paused_since: int | None = None
        self._totals: Counter[str] = Counter()
        self._details_total: Counter[str] = Counter()
        self._excluded: Counter[str] = Counter()
        self._details: dict[str, float] = {}
        self._begin_step()

    def _begin_step(self) -> None:
        self._step_start = self._clock()
        self._step: Counter[str] = Counter()
        self._step_details: Counter[str] = Counter()
        self._step_paused = 0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time of the block as `name`; as a detail of the open span `a` if the name is `a/b`.

        Raises `SpanError` for a span inside another one that is not its detail, or inside `paused()`.
        """
        self._check_may_open(name)
        self._open.append(name)
        start = self._clock()
        try:
            yield
        finally:
            elapsed = self._clock() - start
            self._open.remove(name)
            (self._step_details if "/" in name else self._step)[name] += elapsed

    def _check_may_open(self, name: str) -> None:
        if not name or name == OTHER:
            raise SpanError(f"a span cannot be called {name!r}: {OTHER!r} is what no span covers")
        if self._paused_since is not None:
            raise SpanError(f"span {name!r} opened while the training clock is paused; its time would count nowhere")
        parent = name.rpartition("/")[0]
        if parent and (parent not in self._open or name in self._open):
            raise SpanError(f"span {name!r} must be opened once inside span {parent!r}; open now: {self._open}")
        if not parent and self._open:
            raise SpanError(
                f"span {name!r} opened inside {self._open[0]!r}: the same seconds would count twice. "
                f"Name it '{self._open[0]}/{name}' to see it as a detail"
            )

    @contextmanager
    def paused(self, name: str = "evaluation") -> Iterator[None]:
        """Stop the training clock for the block and count its time as `name` in `excluded()`."""
        if self._open or self._paused_since is not None:
            where = self._open[0] if self._open else "paused()"
            raise SpanError(f"paused({name!r}) inside {where!r}: close that first")
        self._paused_since = start = self._clock()
        try:
            yield
        finally:
            elapsed = self._clock() - start
            self._paused_since = None
            self._excluded[name] += elapsed
            self._step_paused += elapsed

    def finish_step(self) -> dict[str, float]:
        """End the step: seconds by span name with `other` last, which sum to the step's training time."""
        self._check_nothing_open("finish_step")
        step = self._step_with_other()
        self._totals.update(step)
        self._details_total.update(self._step_details)
        self._details = _seconds(self._step_details)
        self._begin_step()
        return _seconds(step)

    def _check_nothing_open(self, what: str) -> None:
        if self._open or self._paused_since is not None:
            raise SpanError(f"{what}() inside {self._open[0] if self._open else 'paused()'!r}: close that first")

    def _step_with_other(self) -> dict[str, int]:
        elapsed = self._clock() - self._step_start - self._step_paused
        return {**self._step, OTHER: elapsed - self._step.total()}

    @property
    def details(self) -> dict[str, float]:
        """Seconds of the sub-spans ("rollout/prefill") of the last finished step."""
        return dict(self._details)

    def totals(self) -> dict[str, float]:
        """Seconds by span over the run, the unfinished step included, `other` last; their sum is the training time."""
        self._check_nothing_open("totals")
        sums = self._totals + Counter(self._step_with_other())
        other = sums.pop(OTHER, 0)
        return _seconds({**sums, OTHER: other})

    def details_totals(self) -> dict[str, float]:
        """Seconds by sub-span over the finished steps."""
        return _seconds(self._details_total)

    def excluded(self) -> dict[str, float]:
        """Seconds over the run that the training clock did not count, by the name given to `paused`."""
        return _seconds(self._excluded)

    @property
    def training_seconds(self) -> float:
        """Training clock of the whole run, up to this moment. Standing still inside `paused()`."""
        now = self._clock() if self._paused_since is None else self._paused_since
        return (self._totals.total() + now - self._step_start - self._step_paused) / _NANO

    @property
    def total_seconds(self) -> float:
        """Wall clock of the whole run up to this moment: training and paused time."""
        now = self._clock()
        return (self._totals.total() + self._excluded.total() + now - self._step_start - self._step_paused) / _NANO

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the finished steps and the paused time. JSON values only."""
        return {
            "totals": dict(self._totals),
            "details": dict(self._details_total),
            "excluded": dict(self._excluded),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue both clocks from `state()` of an earlier process; the current step begins now.

        Paused time of this process so far (its start-up) is kept on top, so that `total_seconds` stays true. May be
        called inside `paused()`, which is where a run usually loads its checkpoint.
        """
        if self._open:
            raise SpanError(f"load() inside {self._open[0]!r}: close that first")
        self._totals = Counter(state["totals"])
        self._details_total = Counter(state["details"])
        self._excluded = self._excluded + Counter(state["excluded"])
        self._begin_step()
        if self._paused_since is not None:
            self._step_start = self._paused_since


def _seconds(nanoseconds: Mapping[str, int]) -> dict[str, float]:
    return {name: value / _NANO for name, value in nanoseconds.items()}
