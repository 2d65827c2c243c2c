"""What the update knew about each turn of saved trees, kept beside them: trees/step_000010.json.

    {"trees": [{"turns": [{"credit": 0.42, "target": 0.69, "log_ratio": 0.31}, {}, ...]}, ...]}

Trees and turns stand in the order of the tree file. A turn that was not trained has no numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_treeopsd.observe.files import RunFolderError, write_atomically
from megatron_treeopsd.tree import RolloutTree

FIELDS = ("credit", "target", "log_ratio")


@dataclass(frozen=True, slots=True)
class TurnNote:
    """Numbers of one turn; None where there is none.

    Attributes:
        credit: C_v, the turn's credit or advantage.
        target: q_v in (0, 1), where the objective wants the turn's student probability p = rho / (1 + rho) to go.
        log_ratio: x_v = log rho_v after the update, the turn's log-ratio of current to behaviour policy.
    """

    credit: float | None = None
    target: float | None = None
    log_ratio: float | None = None

    @property
    def ratio(self) -> float | None:
        """rho_v = exp(x_v), current over behaviour policy."""
        return None if self.log_ratio is None else math.exp(min(self.log_ratio, 700.0))

    @property
    def target_log_ratio(self) -> float | None:
        """x*_v = logit(q_v), the log-ratio at which the residual is zero (ALGORITHMS.md §1.3)."""
        if self.target is None or not 0 < self.target < 1:
            return None
        return math.log(self.target / (1 - self.target))

    @property
    def target_ratio(self) -> float | None:
        """rho*_v = q_v / (1 - q_v)."""
        log_ratio = self.target_log_ratio
        return None if log_ratio is None else math.exp(log_ratio)


NO_NOTE = TurnNote()


@dataclass(frozen=True, slots=True)
class TurnNotes:
    """Notes on every turn of every tree of one file."""

    trees: list[list[TurnNote]]

    @classmethod
    def from_arrays(
        cls,
        *,
        credit: Sequence[np.ndarray],
        target: Sequence[np.ndarray] | None = None,
        log_ratio: Sequence[np.ndarray] | None = None,
    ) -> TurnNotes:
        """From one array [n_turns] a tree for each quantity, with nan where a turn has no number."""
        given = {"credit": credit, "target": target, "log_ratio": log_ratio}
        columns = {name: arrays for name, arrays in given.items() if arrays is not None}
        trees = []
        for arrays in zip(*columns.values(), strict=True):
            rows = zip(*(array.tolist() for array in arrays), strict=True)
            trees.append([TurnNote(**{k: _number(v) for k, v in zip(columns, row, strict=True)}) for row in rows])
        return cls(trees)

    @classmethod
    def empty(cls, trees: Sequence[RolloutTree]) -> TurnNotes:
        """Notes for trees about which nothing was kept."""
        return cls([[NO_NOTE] * len(tree.turns) for tree in trees])

    def write(self, path: Path) -> None:
        """Write the JSON file, whole or not at all."""
        trees = [{"turns": [_record(note) for note in notes]} for notes in self.trees]
        write_atomically(path, json.dumps({"trees": trees}) + "\n")

    @classmethod
    def read(cls, path: Path, trees: Sequence[RolloutTree]) -> TurnNotes:
        """Read the notes on `trees`; empty ones if the file does not exist.

        Raises `RunFolderError` naming the file if it is damaged or does not fit the trees.
        """
        if not path.exists():
            return cls.empty(trees)
        try:
            records = json.loads(path.read_text(encoding="utf-8"))["trees"]
            notes = [[_note(turn) for turn in record["turns"]] for record in records]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunFolderError(
                f"{path}: not a file of turn notes ({error}); remove it to see the trees without"
            ) from None
        if [len(turns) for turns in notes] != [len(tree.turns) for tree in trees]:
            raise RunFolderError(f"{path}: does not belong to the trees beside it; remove it to see the trees without")
        return cls(notes)


def _number(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _note(record: dict[str, Any]) -> TurnNote:
    return TurnNote(**{name: _number(record.get(name)) for name in FIELDS})


def _record(note: TurnNote) -> dict[str, float]:
    return {name: value for name in FIELDS if (value := getattr(note, name)) is not None}
