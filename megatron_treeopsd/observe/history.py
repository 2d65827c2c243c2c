"""Reading `metrics.jsonl` and `evaluations.jsonl` back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_treeopsd.observe.files import RunFolderError, read_json_lines

CLOCKS = ("step", "training_seconds", "total_seconds", "time")
"""Keys of a line that are axes; every other key is a tag `group/name`."""

ABOUT_AN_EVALUATION = frozenset({"when", "questions", *CLOCKS})
"""Keys of an evaluation that are not scores."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step: where it stands on every axis and its values by tag (those written as null are left out).

    Attributes:
        training_seconds: training clock at the end of the step (evaluation not counted).
        total_seconds: wall clock of the run at the end of the step.
        time: Unix time when the line was written.
    """

    step: int
    training_seconds: float
    total_seconds: float
    time: float
    values: dict[str, float]


def read_metrics(path: Path) -> list[StepRow]:
    """All steps of a run in order. Raises `RunFolderError` naming file and line for a line that is not of a run."""
    rows = []
    for number, line in enumerate(read_json_lines(path), start=1):
        if missing := [key for key in CLOCKS if not isinstance(line.get(key), (int, float))]:
            raise RunFolderError(f"{path}:{number}: no number under {missing[0]!r}; this is not a line of a run")
        values = {tag: float(v) for tag, v in line.items() if tag not in CLOCKS and v is not None}
        rows.append(StepRow(line["step"], line["training_seconds"], line["total_seconds"], line["time"], values))
    return rows


def read_evaluations(path: Path) -> list[dict[str, Any]]:
    """All evaluations in order: {"when": "before", "step": 0, "training_seconds": 0.0, "exact_match_greedy": ...}.

    `step` counts the weights: 0 before training, n after the update of step n - 1.
    Raises `RunFolderError` naming file and line for a line that is not an evaluation.
    """
    entries = read_json_lines(path)
    for number, entry in enumerate(entries, start=1):
        if missing := [key for key in ("when", "step", "training_seconds", "time") if key not in entry]:
            raise RunFolderError(f"{path}:{number}: nothing under {missing[0]!r}; this is not an evaluation")
    return entries


def scores(entry: Mapping[str, Any]) -> dict[str, float]:
    """The scores of an evaluation: everything in it but what says when and on what it was made."""
    return {name: float(value) for name, value in entry.items() if name not in ABOUT_AN_EVALUATION}


def series(rows: Iterable[StepRow], tag: str) -> list[tuple[StepRow, float]]:
    """The steps that have a value for `tag`, with it."""
    return [(row, row.values[tag]) for row in rows if tag in row.values]


def tags(rows: Sequence[StepRow], prefix: str) -> list[str]:
    """Tags that start with `prefix`, in the order in which the run first wrote them."""
    return list(dict.fromkeys(tag for row in rows for tag in row.values if tag.startswith(prefix)))
