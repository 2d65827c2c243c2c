"""What a run says while it goes: a header, a line a step, progress, the table at the end, and where to look next.

On a terminal a progress bar stays below the lines; in a log file there are plain lines only, and each can be read
alone:

    step   12     38 s  32 %  reward 0.412   turns 3.12    loss -0.0123  grad 0.430   1.9k tok/s  rollout 58 update 39 %
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

import rich.box
import rich.console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from megatron_treeopsd.config import Recipe, Section
from megatron_treeopsd.observe.comparison import compare
from megatron_treeopsd.observe.run_folder import RunPaths
from megatron_treeopsd.observe.spans import OTHER
from megatron_treeopsd.observe.wording import compact, duration, number

LOG_WIDTH = 160
"""Columns of lines that go to a file or a pipe."""

_FIELDS = (
    ("reward", "rollout/reward_mean"),
    ("exact", "rollout/exact_match"),
    ("turns", "rollout/turns_mean"),
    ("loss", "train/loss"),
    ("grad", "train/grad_norm"),
)


class Console:
    """Everything that a run prints. `close()` leaves the terminal as it was found.

    Args:
        recipe: says when the run ends, which is what the progress bar measures.
        file: where to print; standard output by default.
        width: columns; by default those of the terminal, or `LOG_WIDTH` for a file or pipe.
    """

    def __init__(self, recipe: Recipe, *, file: IO[str] | None = None, width: int | None = None) -> None:
        stream = file or sys.stdout
        terminal = stream.isatty()
        self._recipe = recipe
        self._fields: tuple[tuple[str, str], ...] | None = None
        self._bar: TaskID | None = None
        self._rich = rich.console.Console(
            file=stream, width=width or (None if terminal else LOG_WIDTH), highlight=False, markup=False, emoji=False
        )
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=32),
            TextColumn("{task.fields[note]}", style="dim"),
            console=self._rich,
            transient=True,
            refresh_per_second=2,
            disable=not terminal,
        )
        self._progress.start()

    def close(self) -> None:
        """Take the progress bar away. Calling it twice is fine."""
        self._progress.stop()

    def header(self, *, parameters: int | None = None, first_step: int = 0, attention: str = "") -> None:
        """Name of the run, what it will do and with which attention kernel, and where it continues if it does."""
        recipe = self._recipe
        name = f"{recipe.task.name} · {recipe.method}"
        self._print(Text.assemble((name, "bold"), ("  →  ", "dim"), f"{recipe.run}"))
        lines = recipe_lines(recipe)
        if parameters:
            lines["model"] += f", {compact(parameters)} parameters"
        if attention:
            lines["attention"] = attention
        if first_step:
            lines["resumed"] = f"{first_step} steps are done"
        for label, text in lines.items():
            self._print(Text.assemble((f"  {label:<10}", "dim"), text))
        self._print(Text())

    @contextmanager
    def busy(self, text: str) -> Iterator[None]:
        """Say that something takes a while: a moving bar on a terminal, one line in a log."""
        if self._progress.disable:
            self._print(Text(text))
        task = self._progress.add_task(text, total=None, note="")
        try:
            yield
        finally:
            self._progress.remove_task(task)

    def step(self, step: int, *, training_seconds: float, values: Mapping[str, float]) -> None:
        """One line for the step (counted from 0), from the values that `MetricsWriter.step` gets; the bar moves on."""
        if self._fields is None:
            same = self._recipe.reward.name == "exact_match"  # then the reward says it already
            self._fields = tuple(f for f in _FIELDS if f[1] in values and not (same and f[0] == "exact"))
        done = self._share(step, training_seconds)
        line = Text(f"step {step:>4}  {training_seconds:>5.0f} s ")
        line.append(f"{100 * done:>3.0f} %", style="dim")
        for label, tag in self._fields:
            line.append(f"  {label} ", style="dim")
            line.append(f"{number(values[tag]) if tag in values else '–':<6}")
        if rate := values.get("rollout/tokens_per_second"):
            line.append(f"  {compact(rate):>4}")
            line.append(" tok/s", style="dim")
        line.append("  " + _span_shares(values), style="dim")
        self._print(line)
        self._move_bar(step, training_seconds, done)

    def _share(self, step: int, training_seconds: float) -> float:
        """How much of the run is done: by steps or budget, whichever is nearer to its end."""
        by_steps = (step + 1) / self._recipe.steps if self._recipe.steps else 0.0
        by_budget = training_seconds / self._recipe.budget if self._recipe.budget else 0.0
        return min(max(by_steps, by_budget), 1.0)

    def _move_bar(self, step: int, training_seconds: float, done: float) -> None:
        left = duration(training_seconds * (1 - done) / done) if done else "?"
        note = f"{100 * done:.0f} %, {step + 1} steps, about {left} of training left"
        if self._bar is None:
            self._bar = self._progress.add_task("training", total=1.0, note=note)
        self._progress.update(self._bar, completed=done, note=note)

    def note(self, text: str) -> None:
        """One line that stands for itself."""
        self._print(Text(text, style="dim"))

    def evaluation(self, entry: Mapping[str, Any]) -> None:
        """One line with the main scores of an evaluation: {"when": "before", "step": 0, "exact_match_greedy": ...}."""
        scores = [f"{row.label} {row.shown(row.after)}" for row in compare(None, entry)]
        when = {"before": "before training", "after": "after training"}.get(entry["when"], f"at step {entry['step']}")
        questions = f" on {entry['questions']:.0f} questions" if "questions" in entry else ""
        self._print(Text.assemble((f"evaluation {when}", "bold"), f"{questions}: {' · '.join(scores[:4])}"))

    def finish(self, summary: Mapping[str, Any], run: RunPaths | None = None) -> None:
        """The end of a run from its `summary.json`: where the time went, the table before/after, where to look."""
        self.close()
        self._print(Text())
        self._spans(summary["spans"], summary["excluded"])
        self._table(summary["evaluation_before"], summary["evaluation_after"])
        self._where_next(run or RunPaths(self._recipe.run))

    def _spans(self, spans: Mapping[str, float], excluded: Mapping[str, float]) -> None:
        total = sum(spans.values())
        order = sorted(spans, key=lambda name: (name == OTHER, -spans[name]))
        parts = [f"{name} {100 * spans[name] / (total or 1):.1f} %" for name in order]
        self._print(Text.assemble((f"trained {duration(total)}", "bold"), f": {', '.join(parts)}"))
        if excluded:
            parts = [f"{name} {duration(seconds)}" for name, seconds in excluded.items()]
            self._print(Text(f"not on the training clock: {', '.join(parts)}", style="dim"))

    def _table(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        rows = compare(before, after)
        if not rows:
            return
        questions = (after or before).get("questions")
        table = Table(show_edge=False, pad_edge=False, box=rich.box.SIMPLE_HEAD, padding=(0, 2, 0, 0))
        table.add_column(f"{questions:.0f} held-out questions" if questions else "held-out questions")
        for name in ("before", "after", "change"):
            table.add_column(name, justify="right")
        for row in rows:
            style = {1: "green", -1: "red", 0: ""}[row.verdict]
            after_text = Text(row.shown(row.after), style="bold")
            table.add_row(row.label, row.shown(row.before), after_text, Text(row.shown_change, style=style))
        self._print(Text())
        self._rich.print(table)

    def _where_next(self, run: RunPaths) -> None:
        root = shlex.quote(str(run.root))
        places = {"report": shlex.quote(str(run.report))} if run.report.exists() else {}
        if run.saved_tree_steps():
            places["trees"] = f"treeopsd show {root}"
        places["metrics"] = f"tensorboard --logdir {root}/tensorboard"
        self._print(Text())
        for label, text in places.items():
            self._print(Text.assemble((f"  {label:<10}", "dim"), text))

    def _print(self, text: Text) -> None:
        self._rich.print(text, soft_wrap=not self._rich.is_terminal)


def _span_shares(values: Mapping[str, float]) -> str:
    """rollout 58 update 39 %, of the step's time; spans below 2 % are left to the summary."""
    names = (tag.removeprefix("span/") for tag in values if tag.startswith("span/"))
    spans = {name: values[f"span/{name}"] for name in names if "/" not in name}
    total = sum(spans.values())
    if not total:
        return ""
    order = sorted(spans, key=lambda name: (name == OTHER, -spans[name]))
    shown = [f"{name} {100 * spans[name] / total:.0f}" for name in order if spans[name] / total >= 0.02]
    return " ".join(shown) + " %"


def recipe_lines(recipe: Recipe) -> dict[str, str]:
    """A recipe in a few lines by label: what a reader wants to know before the first step."""
    task, update, layout = recipe.task, recipe.update, recipe.layout
    ends = [f"{recipe.steps} steps"] if recipe.steps is not None else []
    ends += [f"{duration(recipe.budget)} of training"] if recipe.budget is not None else []
    sizes = " ".join(f"{name}={getattr(layout, name)}" for name in ("tp", "pp", "ep", "etp"))
    return {
        "model": f"{recipe.model.checkpoint}, {recipe.model.dtype}",
        "task": f"{task.name}: {task.environment} ({task.retrieval.name}, top {task.retrieval.top_k}), "
        f"up to {task.max_turns} turns of {task.max_turn_tokens} tokens, reward {recipe.reward.name}",
        "method": " → ".join(_words(section) for section in (recipe.expansion, recipe.credit, recipe.objective)),
        "update": f"{update.questions_per_step} questions a step, {recipe.expansion.leaves} leaves each, "
        f"{update.epochs} epochs × {update.mini_batches} mini-batches, lr {recipe.optimizer.lr:g}",
        "layout": f"{sizes}, {recipe.engine.name} engine, seed {recipe.seed}",
        "ends": "after " + " or ".join(ends),
    }


def _words(section: Section) -> str:
    """A strategy with the settings that differ from its defaults: bernoulli_kl(radius=0.45, kappa=1.0)."""
    fields = type(section).model_fields
    changed = [f"{key}={value}" for key, value in section if key != "name" and value != fields[key].default]
    return f"{getattr(section, 'name', '')}" + (f"({', '.join(changed)})" if changed else "")
