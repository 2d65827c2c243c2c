"""The table before/after training: one list of rows for the terminal and for the report."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_treeopsd.observe.history import scores

_LABELS = {
    "exact_match_greedy": "exact match, greedy",
    "exact_match_sampled": "exact match, sampled",
    "f1_greedy": "F1, greedy",
    "f1_sampled": "F1, sampled",
    "no_answer_greedy": "no answer, greedy",
    "no_answer_sampled": "no answer, sampled",
    "turns_greedy": "turns, greedy",
    "turns_sampled": "turns, sampled",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One line of the table: a score before and after training (None: not measured).

    `better` is 1 if more is better, -1 if less is, 0 if neither. `share` tells shares (0.41 is 41 %) from counts.
    """

    label: str
    before: float | None
    after: float | None
    better: int
    share: bool

    @property
    def change(self) -> float | None:
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def verdict(self) -> int:
        """1 if it became better, -1 if worse, 0 if neither."""
        change = self.change or 0.0
        return self.better * ((change > 0) - (change < 0))

    def shown(self, value: float | None) -> str:
        """A score as the table shows it."""
        if value is None:
            return "–"
        return f"{100 * value:.1f} %" if self.share else f"{value:.2f}"

    @property
    def shown_change(self) -> str:
        """The change as the table shows it: points for shares."""
        if self.change is None:
            return ""
        text = f"{100 * self.change:+.1f}" if self.share else f"{self.change:+.2f}"
        return "0" + text[2:] if float(text) == 0 else text.replace("-", "−")


def compare(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> list[Comparison]:
    """Rows in reading order: greedy and sampled scores first, exact match by hops, then whatever else was measured.

    An evaluation is a mapping of score to value; what says when it was made ("step", "questions", ...) is left out.
    """
    first, last = scores(before or {}), scores(after or {})
    names = dict.fromkeys((*_LABELS, *sorted(first.keys() | last.keys(), key=_natural)))
    rows = []
    for name in names:
        if name not in first and name not in last:
            continue
        turns = name.startswith("turns")
        better = 0 if turns else -1 if name.startswith("no_answer") else 1
        rows.append(Comparison(_label(name), first.get(name), last.get(name), better, share=not turns))
    return rows


def _label(name: str) -> str:
    if hops := re.fullmatch(r"hops_(\d+)", name):
        return f"exact match, {hops[1]} hop{'s' if hops[1] != '1' else ''}"
    return _LABELS.get(name, name.replace("_", " "))


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """hops_2 before hops_10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]
