"""What a run leaves behind and shows on the way: one place that rank 0 writes from, silent on the other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_treeopsd.config import Recipe
from megatron_treeopsd.observe.console import Console
from megatron_treeopsd.observe.metrics import MetricsWriter
from megatron_treeopsd.observe.report import write_report
from megatron_treeopsd.observe.run_folder import RunFolder
from megatron_treeopsd.observe.spans import Spans
from megatron_treeopsd.observe.summary import write_summary
from megatron_treeopsd.observe.turn_notes import TurnNotes
from megatron_treeopsd.recipes import save_recipe
from megatron_treeopsd.tree import RolloutTree, save_trees


class Journal:
    """Run folder, metrics, console, sample trees, summary and report of one run."""

    def __init__(self, recipe: Recipe, writes: bool) -> None:
        self._recipe = recipe
        self._folder = RunFolder(recipe.run, resume=recipe.resume) if writes else None
        self._metrics: MetricsWriter | None = None
        self._console: Console | None = None
        self._last: tuple[int, Sequence[RolloutTree], TurnNotes] | None = None

    def start(self, first_step: int, *, parameters: int, attention: str = "") -> None:
        """Begin writing at `first_step`; what an earlier process wrote behind it is dropped."""
        if self._folder is None:
            return
        self._folder.rewind(first_step - 1 if first_step else None)
        save_recipe(self._recipe, self._folder.recipe)
        self._metrics = MetricsWriter(self._folder)
        self._console = Console(self._recipe)
        self._console.header(parameters=parameters, first_step=first_step, attention=attention)

    def step(self, step: int, values: Mapping[str, float], *, training_seconds: float, total_seconds: float) -> None:
        if self._metrics is None or self._console is None:
            return
        self._metrics.step(step, training_seconds=training_seconds, total_seconds=total_seconds, values=values)
        self._console.step(step, training_seconds=training_seconds, values=values)

    def trees(self, step: int, trees: Sequence[RolloutTree], notes: TurnNotes) -> None:
        """Keep the trees of a step if it is one of those that the recipe samples; of the last step in any case."""
        if self._folder is None:
            return
        self._last = (step, trees, notes)
        every = self._recipe.logging.trees_every_steps
        if every and step % every == 0:
            self._keep_trees()

    def _keep_trees(self) -> None:
        if self._folder is None or self._last is None:
            return
        step, trees, notes = self._last
        notes.write(self._folder.notes_file(step))
        save_trees(self._folder.tree_file(step), trees)
        self._last = None

    def busy(self, text: str) -> AbstractContextManager[None]:
        """Say what is going on while the block runs, where somebody is watching."""
        return nullcontext() if self._console is None else self._console.busy(text)

    def note(self, text: str) -> None:
        """A line for people, of something that happens once in a run."""
        if self._console is not None:
            self._console.note(text)

    def evaluation(self, entry: Mapping[str, Any]) -> None:
        if self._metrics is not None and self._console is not None:
            self._metrics.evaluation(entry)
            self._console.evaluation(entry)

    def finish(
        self,
        *,
        steps: int,
        spans: Spans,
        evaluations: Sequence[Mapping[str, Any]],
        tokens: Mapping[str, int],
        interrupted: bool,
    ) -> Path | None:
        """Write summary and report, print the closing table. Returns the summary's path where this rank writes."""
        if self._folder is None or self._console is None or self._metrics is None:
            return None
        self._keep_trees()
        self._metrics.close()
        first = {e["when"]: e for e in evaluations}
        summary = write_summary(
            self._folder.summary,
            method=self._recipe.method,
            seed=self._recipe.seed,
            steps=steps,
            spans=spans.totals(),
            excluded=spans.excluded(),
            generated_tokens=tokens["generated"],
            cached_tokens=tokens["cached"],
            before=_scores(first.get("before")),
            after=_scores(first.get("after")),
            extra={"evaluations": list(evaluations), "tokens": dict(tokens), "interrupted": interrupted},
        )
        if self._recipe.logging.report:
            write_report(self._folder.root)
        self._console.finish(summary, self._folder)
        return self._folder.summary

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console is not None:
            self._console.close()
        if self._metrics is not None:
            self._metrics.close()
        if self._folder is not None:
            self._folder.close()


def _scores(entry: Mapping[str, Any] | None) -> dict[str, float] | None:
    return None if entry is None else {k: v for k, v in entry.items() if isinstance(v, float)}
