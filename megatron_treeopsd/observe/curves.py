"""Which metrics become which chart: from the lines of a run to drawings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_treeopsd.observe.charts import COUNT, NUMBER, SHARE, Axis, Series, Style, line_chart, share_chart
from megatron_treeopsd.observe.glossary import term
from megatron_treeopsd.observe.history import StepRow, read_evaluations, read_metrics, series, tags
from megatron_treeopsd.observe.run_folder import RunPaths
from megatron_treeopsd.observe.spans import OTHER
from megatron_treeopsd.observe.style import SERIES, standalone
from megatron_treeopsd.observe.wording import duration

_UNITS = ((7200.0, 3600.0, "h"), (300.0, 60.0, "min"), (0.0, 1.0, "s"))
_TOKENS = ("rollout/generated_tokens", "rollout/computed_prompt_tokens", "rollout/cached_tokens")
_DIAGNOSTICS = ("train/loss", "train/grad_norm")
_ROLLOUT = ("rollout/turns_mean", "rollout/no_answer_share", "rollout/zero_variance_share")


def learning_curve_svg(run: RunPaths) -> str:
    """The learning curve of a run as a file of its own, for instance for a README."""
    return standalone(learning_curve(read_metrics(run.metrics), read_evaluations(run.evaluations)))


def learning_curve(rows: Sequence[StepRow], evaluations: Sequence[Mapping[str, Any]], *, width: int = 1040) -> str:
    """Held-out exact match and training reward against training time; the loss of a run that has neither."""
    scale, axis = _time_axis([row.training_seconds for row in rows] + [e["training_seconds"] for e in evaluations])
    chosen = [
        _evaluated(evaluations, "exact_match_greedy", "exact match, held out, greedy", 1, scale),
        _evaluated(evaluations, "exact_match_sampled", "exact match, held out, sampled", 3, scale),
        _over_time(rows, "rollout/reward_mean", "reward of training rollouts", 2, scale),
    ]
    if all(len(item.x) == 0 for item in chosen):
        loss = _over_time(rows, "train/loss", "loss", 1, scale)
        return line_chart([loss], axis, label="loss against training time", width=width) if len(loss.x) else ""
    label = "exact match and reward against training time"
    return line_chart(chosen, axis, label=label, width=width, height=330, y_range=(0.0, 1.0), unit=SHARE)


def _time_axis(seconds: Sequence[float]) -> tuple[float, Axis]:
    longest = max(seconds, default=0.0)
    scale, name = next((scale, name) for least, scale, name in _UNITS if longest >= least)
    return scale, Axis(f"training time ({name})", lambda value: duration(value * scale), begin=0.0)


def _evaluated(evaluations: Sequence[Mapping[str, Any]], score: str, name: str, colour: int, scale: float) -> Series:
    points = sorted((e["training_seconds"] / scale, e[score]) for e in evaluations if score in e)
    x, y = np.array(points, dtype=np.float64).reshape(-1, 2).T
    return Series(name, x, y, f"var(--s{colour})", "dots")


def _over_time(rows: Sequence[StepRow], tag: str, name: str, colour: int, scale: float) -> Series:
    found = series(rows, tag)
    x = np.array([row.training_seconds / scale for row, _ in found])
    return Series(name, x, np.array([value for _, value in found]), f"var(--s{colour})", "smooth")


def _by_step(rows: Sequence[StepRow], tag: str, name: str, colour: str, style: Style = "line") -> Series:
    found = series(rows, tag)
    x = np.array([row.step for row, _ in found], dtype=np.float64)
    return Series(name, x, np.array([value for _, value in found]), colour, style)


_STEPS = Axis("step", lambda value: f"step {value:.0f}", whole=True)


def span_totals(rows: Sequence[StepRow]) -> dict[str, float]:
    """Seconds by span over the given steps: largest first, `other` last, details ("rollout/prefill") left out."""
    totals: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        for tag, value in row.values.items():
            name = tag.removeprefix("span/")
            if tag != name and "/" not in name:
                totals[name] += value
    order = sorted(totals, key=lambda name: (name == OTHER, -totals[name]))
    return {name: totals[name] for name in order}


def span_colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each span; the colours that are left over after the largest go to one grey with `other`."""
    named = [name for name in names if name != OTHER][:SERIES]
    colours = {name: f"var(--s{index})" for index, name in enumerate(named, start=1)}
    return {name: colours.get(name, "var(--rest)") for name in names}


def span_chart(rows: Sequence[StepRow]) -> str:
    """Share of each span in the time of a step, stacked; spans too many for a colour are drawn together as `other`."""
    colours = span_colours(list(span_totals(rows)))
    timed = [row for row in rows if any(tag.startswith("span/") for tag in row.values)]
    if not timed:
        return ""
    x = np.array([row.step for row in timed], dtype=np.float64)
    stacks = []
    for colour in dict.fromkeys(colours.values()):
        names = [name for name, its in colours.items() if its == colour]
        y = np.array([sum(row.values.get(f"span/{name}", 0.0) for name in names) for row in timed])
        stacks.append(Series(names[0] if colour != "var(--rest)" else OTHER, x, y, colour))
    return share_chart(stacks, _STEPS, label="share of each span in the time of a step", width=680)


def token_chart(rows: Sequence[StepRow]) -> str:
    """Tokens a step: sampled, computed and found in the cache."""
    shown = [_by_step(rows, tag, term(tag).title, f"var(--s{n})") for n, tag in enumerate(_TOKENS, start=1)]
    if all(len(item.x) == 0 for item in shown):
        return ""
    return line_chart(shown, _STEPS, label="tokens a step", width=680, height=260, y_range=(0, 0), unit=COUNT)


def diagnostic_charts(rows: Sequence[StepRow]) -> list[tuple[str, str]]:
    """(tag, chart) for loss, gradient norm, everything the objective reports, the rollouts and the mismatch."""
    chosen = [*_DIAGNOSTICS, *tags(rows, "objective/"), *_ROLLOUT, *tags(rows, "mismatch/")]
    charts = []
    for tag in dict.fromkeys(chosen):
        curve = _by_step(rows, tag, term(tag).title, "var(--s1)", "smooth")
        if not len(curve.x):
            continue
        unit = term(tag).unit
        least = (0.0, 0.0) if unit is not NUMBER else None
        charts.append(
            (tag, line_chart([curve], _STEPS, label=term(tag).title, width=340, height=170, y_range=least, unit=unit))
        )
    return charts
