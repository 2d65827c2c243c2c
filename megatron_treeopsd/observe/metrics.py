"""One writer for everything that is measured: a JSON line a step, a JSON line an evaluation, and both for TensorBoard.

    metrics.jsonl      {"step": 3, "training_seconds": 9.81, "total_seconds": 14.2, "time": 1760000000.0,
                        "rollout/reward_mean": 0.41, "train/loss": -0.013, "span/rollout": 1.9, ...}
    evaluations.jsonl  {"when": "before", "step": 0, "training_seconds": 0.0, "exact_match_greedy": 0.43, ...}

Steps count from 0: step s trains weights s into weights s + 1, which is the number that an evaluation carries.

The two files are the source of truth. TensorBoard is derived from them, in two runs, because its axis is one integer:

    tensorboard/by_step       tag  rollout/reward_mean              axis = step
    tensorboard/by_seconds    tag  by_seconds/rollout/reward_mean   axis = round(training_seconds)

The training clock leaves evaluation out, so curves of two runs over `by_seconds` compare them at equal cost.

Values that are not finite are written as null and counted in `metrics/not_finite` of the same line, with one warning
for each tag. They do not raise: the line of the step in which a loss became nan is the one that is needed to find out
why, and a median over no turns is nan by right. Whether a nan may be trained on is for the trainer to decide.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from megatron_treeopsd.observe.files import RunFolderError, append_json_line, writing
from megatron_treeopsd.observe.history import read_evaluations, read_metrics, scores
from megatron_treeopsd.observe.run_folder import RunPaths

NOT_FINITE = "metrics/not_finite"
_TAG = re.compile(r"[a-z0-9_]+(/[A-Za-z0-9_.-]+)+")
_log = logging.getLogger(__name__)


class MetricsWriter:
    """Appends to the metrics of a run. One writer, one step axis, each step once.

    Continues after the lines that are there: call `RunFolder.rewind` first when a run is resumed. TensorBoard files of
    an earlier process are written anew from those lines, so that no point is there twice, whenever that process died.
    """

    def __init__(self, run: RunPaths) -> None:
        rows, entries = read_metrics(run.metrics), read_evaluations(run.evaluations)
        self.last_step: int | None = rows[-1].step if rows else None
        self._run = run
        self._evaluated = {(entry["when"], entry["step"]) for entry in entries}
        self._warned: set[str] = set()
        with writing(run.tensorboard):
            self._board = _TensorBoard(run.tensorboard)
        for row in rows:
            self._board.add(row.step, row.training_seconds, row.values, row.time)
        for entry in entries:
            self._board.add(entry["step"], entry["training_seconds"], _scores(entry), entry["time"])
        self._board.flush()

    def step(self, step: int, *, training_seconds: float, total_seconds: float, values: Mapping[str, float]) -> None:
        """Write everything measured in one step. `values` by stable tag `group/name`.

        Raises `RunFolderError` for a step that is not after the last one, for a malformed tag (named), or if the file
        cannot be written.
        """
        if self.last_step is not None and step <= self.last_step:
            raise RunFolderError(
                f"{self._run.metrics}: step {step} after step {self.last_step}; each step is written once, in order"
            )
        if bad := next((tag for tag in values if not _TAG.fullmatch(tag)), None):
            raise RunFolderError(f"metric tag {bad!r} is not of the form group/name")
        finite = {tag: float(value) for tag, value in values.items() if math.isfinite(value)}
        line: dict[str, float | None] = {tag: finite.get(tag) for tag in values}
        if strange := {tag: value for tag, value in values.items() if tag not in finite}:
            self._warn(step, strange)
            line[NOT_FINITE] = finite[NOT_FINITE] = float(len(strange))
        now = time.time()
        clocks = {"step": step, "training_seconds": training_seconds, "total_seconds": total_seconds, "time": now}
        append_json_line(self._run.metrics, clocks | line)
        self.last_step = step
        self._board.add(step, training_seconds, finite, now)
        self._board.flush()

    def _warn(self, step: int, strange: Mapping[str, float]) -> None:
        for tag, value in strange.items():
            if tag not in self._warned:
                self._warned.add(tag)
                _log.warning("step %d: %s is %s; written as null, and not mentioned again", step, tag, value)

    def evaluation(self, entry: Mapping[str, Any]) -> None:
        """Write one evaluation: `when` ("before", "during", "after"), `step`, `training_seconds`, scores by name.

        The same evaluation of the same weights again is not written twice.
        """
        if (entry["when"], entry["step"]) in self._evaluated:
            return
        self._evaluated.add((entry["when"], entry["step"]))
        now = time.time()
        append_json_line(self._run.evaluations, {**entry, "time": now})
        self._board.add(entry["step"], entry["training_seconds"], _scores(entry), now)
        self._board.flush()

    def close(self) -> None:
        """Close the TensorBoard files. Calling it twice is fine."""
        self._board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _TensorBoard:
    """Two event files, one for each axis. Starts from nothing: files that are there are removed."""

    def __init__(self, folder: Path) -> None:
        for old in folder.glob("by_*/events.out.tfevents.*"):
            old.unlink()
        self._by_step = EventFileWriter(str(folder / "by_step"))
        self._by_seconds = EventFileWriter(str(folder / "by_seconds"))

    def add(self, step: int, training_seconds: float, values: Mapping[str, float], when: float) -> None:
        self._by_step.add_event(_event(step, "", values, when))
        self._by_seconds.add_event(_event(round(training_seconds), "by_seconds/", values, when))

    def flush(self) -> None:
        self._by_step.flush()
        self._by_seconds.flush()

    def close(self) -> None:
        self._by_step.close()
        self._by_seconds.close()


def _event(position: int, prefix: str, values: Mapping[str, float], when: float) -> Event:
    scalars = [Summary.Value(tag=prefix + tag, simple_value=value) for tag, value in values.items()]
    return Event(wall_time=when, step=position, summary=Summary(value=scalars))


def _scores(entry: Mapping[str, Any]) -> dict[str, float]:
    """The scores of an evaluation as TensorBoard scalars: evaluation/exact_match_greedy, ..."""
    return {f"evaluation/{name}": value for name, value in scores(entry).items()}
