from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_treeopsd.observe.history import read_evaluations, read_metrics, series, tags
from megatron_treeopsd.observe.metrics import MetricsWriter
from megatron_treeopsd.observe.run_folder import RunFolder, RunFolderError

pytestmark = pytest.mark.fast


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    board = EventAccumulator(str(folder))
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars(tag)]


def write(metrics: MetricsWriter, step: int, **values: float) -> None:
    tagged = {name.replace("__", "/"): value for name, value in values.items()}
    metrics.step(step, training_seconds=2.5 * (step + 1), total_seconds=3.0 * (step + 1), values=tagged)


def test_a_step_is_one_line_and_one_point_on_each_axis(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run, MetricsWriter(run) as metrics:
        write(metrics, 0, train__loss=0.5, rollout__reward_mean=0.25)
        write(metrics, 1, train__loss=0.125)
        lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        assert lines[0].pop("time") > 1.6e9
        assert lines[0] == {
            "step": 0, "training_seconds": 2.5, "total_seconds": 3.0, "train/loss": 0.5, "rollout/reward_mean": 0.25,
        }  # fmt: skip
        assert points(run.tensorboard / "by_step", "train/loss") == [(0, 0.5), (1, 0.125)]
        assert points(run.tensorboard / "by_seconds", "by_seconds/train/loss") == [(2, 0.5), (5, 0.125)]
    rows = read_metrics(run.metrics)
    assert [(row.step, value) for row, value in series(rows, "rollout/reward_mean")] == [(0, 0.25)]
    assert tags(rows, "train/") == ["train/loss"]


def test_a_resumed_run_has_each_point_once(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run, MetricsWriter(run) as metrics:
        metrics.evaluation({"when": "before", "step": 0, "training_seconds": 0.0, "exact_match_greedy": 0.25})
        for step in range(8):
            write(metrics, step, train__loss=1.0 + step)
        metrics.evaluation({"when": "during", "step": 8, "training_seconds": 20.0, "exact_match_greedy": 0.5})
    with RunFolder(tmp_path, resume=True) as run:
        run.rewind(4)
        with MetricsWriter(run) as metrics:
            assert metrics.last_step == 4
            for step in range(5, 8):
                write(metrics, step, train__loss=100.0 + step)
            metrics.evaluation({"when": "after", "step": 8, "training_seconds": 20.0, "exact_match_greedy": 0.75})
    losses = [1.0, 2.0, 3.0, 4.0, 5.0, 105.0, 106.0, 107.0]
    rows = read_metrics(run.metrics)
    assert [row.values["train/loss"] for row in rows] == losses
    assert points(run.tensorboard / "by_step", "train/loss") == list(enumerate(losses))
    assert [value for _, value in points(run.tensorboard / "by_seconds", "by_seconds/train/loss")] == losses
    assert points(run.tensorboard / "by_step", "evaluation/exact_match_greedy") == [(0, 0.25), (8, 0.75)]
    assert [entry["when"] for entry in read_evaluations(run.evaluations)] == ["before", "after"]


def test_the_same_evaluation_is_written_once(tmp_path: Path) -> None:
    entry = {"when": "after", "step": 8, "training_seconds": 20.0, "questions": 256.0, "exact_match_greedy": 0.5}
    with RunFolder(tmp_path) as run:
        for _ in range(2):
            with MetricsWriter(run) as metrics:
                metrics.evaluation(entry)
                metrics.evaluation(entry)
        assert len(read_evaluations(run.evaluations)) == 1
        assert points(run.tensorboard / "by_step", "evaluation/exact_match_greedy") == [(8, 0.5)]


def test_steps_are_written_in_order(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run, MetricsWriter(run) as metrics:
        write(metrics, 3, train__loss=1.0)
        for step in (3, 2):
            with pytest.raises(RunFolderError, match=f"step {step} after step 3"):
                write(metrics, step, train__loss=1.0)


@pytest.mark.parametrize("tag", ["loss", "train/", "Train/loss", "train/lo ss", "train//loss"])
def test_a_malformed_tag_is_named(tmp_path: Path, tag: str) -> None:
    with RunFolder(tmp_path) as run, MetricsWriter(run) as metrics:
        with pytest.raises(RunFolderError, match="group/name") as error:
            metrics.step(0, training_seconds=0, total_seconds=0, values={tag: 1.0})
        assert tag in str(error.value)
        assert read_metrics(run.metrics) == []


def test_values_that_are_not_finite_become_null_and_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RunFolder(tmp_path) as run, MetricsWriter(run) as metrics, caplog.at_level(logging.WARNING):
        write(metrics, 0, train__loss=float("nan"), train__grad_norm=float("inf"), train__lr=0.5)
        write(metrics, 1, train__loss=float("nan"), train__lr=0.5)
        line = json.loads(run.metrics.read_text().splitlines()[0], parse_constant=pytest.fail)
        assert line["train/loss"] is None
        assert line["train/grad_norm"] is None
        assert (line["train/lr"], line["metrics/not_finite"]) == (0.5, 2.0)
        assert points(run.tensorboard / "by_step", "metrics/not_finite") == [(0, 2.0), (1, 1.0)]
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "step 0: train/loss is nan",
        "step 0: train/grad_norm is inf",
    ]
    assert "train/loss" not in read_metrics(run.metrics)[0].values


def test_a_full_disk_stops_the_step(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run, MetricsWriter(run) as metrics:
        run.metrics.symlink_to("/dev/full")
        with pytest.raises(RunFolderError, match=r"metrics\.jsonl: cannot be written: No space left"):
            write(metrics, 0, train__loss=1.0)


@pytest.mark.parametrize(
    ("name", "line", "says"),
    [("metrics", '{"train/loss": 1}', "metrics.jsonl:1: no number under 'step'"),
     ("evaluations", '{"step": 1}', "evaluations.jsonl:1: nothing under 'when'")],
)  # fmt: skip
def test_lines_of_something_else_are_named(tmp_path: Path, name: str, line: str, says: str) -> None:
    with RunFolder(tmp_path) as run:
        getattr(run, name).write_text(line + "\n")
        with pytest.raises(RunFolderError, match=says):
            MetricsWriter(run)
