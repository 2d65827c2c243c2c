from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_treeopsd.observe.spans import SpanError, Spans

pytestmark = pytest.mark.fast
SECOND = 1_000_000_000


class Clock:
    """A clock that goes only when it is told to."""

    def __init__(self) -> None:
        self.now = 17 * SECOND

    def __call__(self) -> int:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += round(seconds * SECOND)


def test_a_step_is_partitioned() -> None:
    clock = Clock()
    spans = Spans(clock)
    clock.wait(0.5)
    with spans("rollout"):
        clock.wait(2)
        with spans("rollout/prefill"):
            clock.wait(1)
    with spans("update"):
        clock.wait(4)
    with spans("rollout"):
        clock.wait(0.25)
    clock.wait(0.125)
    assert spans.finish_step() == {"rollout": 3.25, "update": 4.0, "other": 0.625}
    assert list(spans.finish_step()) == ["other"]
    assert spans.totals() == {"rollout": 3.25, "update": 4.0, "other": 0.625}


def test_details_are_reported_beside_the_partition() -> None:
    clock = Clock()
    spans = Spans(clock)
    for seconds in (1, 2):
        with spans("rollout"), spans("rollout/decode"):
            clock.wait(seconds)
        spans.finish_step()
    assert spans.details == {"rollout/decode": 2.0}
    assert spans.details_totals() == {"rollout/decode": 3.0}


def test_time_between_steps_belongs_to_the_next_one() -> None:
    clock = Clock()
    spans = Spans(clock)
    spans.finish_step()
    clock.wait(3)
    with spans("update"):
        clock.wait(1)
    assert spans.finish_step() == {"update": 1.0, "other": 3.0}


def test_paused_time_is_known_but_not_trained() -> None:
    clock = Clock()
    spans = Spans(clock)
    with spans.paused("startup"):
        clock.wait(5)
        assert spans.training_seconds == 0
        assert spans.total_seconds == 5
    with spans("update"):
        clock.wait(2)
        assert spans.training_seconds == 2
    with spans.paused():
        clock.wait(7)
    assert spans.finish_step() == {"update": 2.0, "other": 0.0}
    assert spans.excluded() == {"startup": 5.0, "evaluation": 7.0}
    assert (spans.training_seconds, spans.total_seconds) == (2.0, 14.0)
    clock.wait(1)
    assert (spans.training_seconds, spans.total_seconds) == (3.0, 15.0)
    assert spans.totals() == {"update": 2.0, "other": 1.0}


def test_a_span_closes_when_its_block_raises() -> None:
    clock = Clock()
    spans = Spans(clock)
    with contextlib.suppress(ZeroDivisionError), spans("update"):
        clock.wait(1)
        raise ZeroDivisionError
    with spans("update"):
        clock.wait(1)
    assert spans.finish_step()["update"] == 2


@pytest.mark.parametrize(
    ("outer", "inner", "says"),
    [
        ("rollout", "update", "'rollout/update'"),
        ("rollout", "rollout", "inside 'rollout'"),
        ("rollout", "update/forward", "inside span 'update'"),
        ("rollout", "other", "cannot be called"),
    ],
)
def test_a_second_may_not_count_twice(outer: str, inner: str, says: str) -> None:
    spans = Spans(Clock())
    with spans(outer), pytest.raises(SpanError, match=says):
        spans(inner).__enter__()


def test_the_same_detail_may_not_overlap_itself() -> None:
    spans = Spans(Clock())
    with spans("rollout"), spans("rollout/prefill"), pytest.raises(SpanError, match="once"):
        spans("rollout/prefill").__enter__()


def test_pausing_and_spans_exclude_each_other() -> None:
    spans = Spans(Clock())
    with spans("update"):
        with pytest.raises(SpanError, match="inside 'update'"):
            spans.paused().__enter__()
        with pytest.raises(SpanError, match="finish_step"):
            spans.finish_step()
    with spans.paused():
        with pytest.raises(SpanError, match="paused"):
            spans("update").__enter__()
        with pytest.raises(SpanError, match="paused"):
            spans.paused().__enter__()


def test_a_resumed_run_continues_both_clocks() -> None:
    clock = Clock()
    first = Spans(clock)
    with first.paused():
        clock.wait(3)
    with first("update"):
        clock.wait(2)
    first.finish_step()
    state = json.loads(json.dumps(first.state()))
    clock.wait(100)  # lost with the process

    second = Spans(clock)
    with second.paused("startup"):
        clock.wait(1)
    second.load(state)
    assert (second.training_seconds, second.total_seconds) == (2.0, 6.0)
    with second("update"):
        clock.wait(4)
    assert second.finish_step() == {"update": 4.0, "other": 0.0}
    assert second.totals() == {"update": 6.0, "other": 0.0}
    assert second.excluded() == {"evaluation": 3.0, "startup": 1.0}


def test_resuming_while_paused_keeps_the_start_up_time() -> None:
    clock = Clock()
    spans = Spans(clock)
    with spans.paused("startup"):
        clock.wait(2)
        spans.load({"totals": {"update": SECOND}, "details": {}, "excluded": {"startup": SECOND}})
        clock.wait(3)
    assert spans.excluded() == {"startup": 6.0}
    assert (spans.training_seconds, spans.total_seconds) == (1.0, 7.0)


@given(st.lists(st.tuples(st.sampled_from(["rollout", "update", "idle", "paused"]), st.integers(0, 10**12))))
def test_every_nanosecond_is_somewhere(pieces: list[tuple[str, int]]) -> None:
    clock = Clock()
    spans = Spans(clock)
    start = clock.now
    for name, nanoseconds in pieces:
        if name == "paused":
            with spans.paused():
                clock.now += nanoseconds
        elif name == "idle":
            clock.now += nanoseconds
        else:
            with spans(name):
                clock.now += nanoseconds
    total, training = spans.total_seconds, spans.training_seconds
    step = spans.finish_step()
    assert sum(step.values()) == pytest.approx(training, abs=1e-9)
    assert total == pytest.approx((clock.now - start) / SECOND, abs=1e-9)
    assert sum(step.values()) + sum(spans.excluded().values()) == pytest.approx(total, abs=1e-6)
