"""`report.html` of a run: what was learned, where the time went, how the objective moved, and sample trees.

Reads the run folder only (`metrics.jsonl`, `evaluations.jsonl`, `summary.json`, `trees/`), also of a run that is still
going or was killed. Whatever comes from a tool, a model or a recipe is data: it is escaped and never becomes markup.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import yaml

from megatron_treeopsd.observe.charts import change_track
from megatron_treeopsd.observe.comparison import compare
from megatron_treeopsd.observe.curves import (
    diagnostic_charts,
    learning_curve,
    span_chart,
    span_colours,
    span_totals,
    token_chart,
)
from megatron_treeopsd.observe.decoder import Decode, decoder_of
from megatron_treeopsd.observe.files import write_atomically
from megatron_treeopsd.observe.glossary import term
from megatron_treeopsd.observe.history import StepRow, read_evaluations, read_metrics, series
from megatron_treeopsd.observe.page import page, section, table, tile
from megatron_treeopsd.observe.run_folder import RunPaths
from megatron_treeopsd.observe.spans import OTHER
from megatron_treeopsd.observe.tree_svg import draw_tree
from megatron_treeopsd.observe.tree_view import mark, summary_of, telling_order
from megatron_treeopsd.observe.turn_notes import TurnNote, TurnNotes
from megatron_treeopsd.observe.wording import compact, counted, duration, number, percent, printable, signed, visible
from megatron_treeopsd.tree import ROOT, RolloutTree, load_trees

SAMPLE_TREES = 3
TEXT_LIMIT = 20_000
"""Characters shown of one text; the tree file has all of it."""


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that the report is made of."""

    paths: RunPaths
    recipe: dict[str, Any]
    rows: list[StepRow]
    evaluations: list[dict[str, Any]]
    summary: dict[str, Any]
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    spans: dict[str, float]
    step: int | None = None
    trees: list[RolloutTree] = field(default_factory=list)
    notes: list[list[TurnNote]] = field(default_factory=list)


def write_report(run: Path | RunPaths, *, decode: Decode | None = None) -> Path:
    """Write `report.html` into the run folder, whole or not at all, and return its path.

    `decode` turns the token ids of trees into text; by default with the tokenizer of the recipe's checkpoint.
    Raises `RunFolderError` if `run` is not a run folder or a file in it is damaged.
    """
    paths = run if isinstance(run, RunPaths) else RunPaths(run)
    paths.require()
    read, complaint = (decode, None) if decode else decoder_of(paths)
    loaded = load_run(paths)
    write_atomically(paths.report, page(_title(loaded), _body(loaded, read, complaint)))
    return paths.report


def load_run(paths: RunPaths) -> Run:
    """Read a run folder; parts that are not there (yet) are empty."""
    rows, evaluations = read_metrics(paths.metrics), read_evaluations(paths.evaluations)
    summary = json.loads(paths.summary.read_text(encoding="utf-8")) if paths.summary.exists() else {}
    first = next((entry for entry in evaluations if entry["when"] == "before"), None)
    last = evaluations[-1] if evaluations and evaluations[-1]["step"] > 0 else None
    steps = paths.saved_tree_steps()
    trees = load_trees(paths.tree_file(steps[-1])) if steps else []
    return Run(
        paths=paths,
        recipe=yaml.safe_load(paths.recipe.read_text(encoding="utf-8")) if paths.recipe.exists() else {},
        rows=rows,
        evaluations=evaluations,
        summary=summary,
        before=first,
        after=last,
        spans=summary.get("spans") or span_totals(rows),
        step=steps[-1] if steps else None,
        trees=trees,
        notes=TurnNotes.read(paths.notes_file(steps[-1]), trees).trees if steps else [],
    )


def _title(run: Run) -> str:
    task = (run.recipe.get("task") or {}).get("name", "run")
    return f"{task} · {run.recipe.get('method', run.paths.root.name)}"


def _body(run: Run, decode: Decode, complaint: str | None) -> str:
    return "".join(
        (
            _header(run),
            _tiles(run),
            section("Learning", _learning_note(run), learning_curve(run.rows, run.evaluations)),
            section("Before and after", _questions(run), _comparison(run)),
            section(
                "Where the time went",
                "Share of each span in the time of a step. Spans partition the training clock; what is in none of them "
                "is other. Evaluation is not on this clock.",
                _spans(run),
            ),
            section(
                "How training moved",
                "One point a step and the moving mean; long runs are averaged in pieces, with their range behind.",
                _diagnostics(run.rows),
            ),
            section("Tokens", "A prompt token found in the cache was computed once and shared.", _tokens(run)),
            section(f"Sample trees of step {run.step}", _trees_note(complaint), _trees(run, decode), wide=True),
            section("Recipe", "", _recipe(run)),
        )
    )


def _header(run: Run) -> str:
    sections = [run.recipe.get(name) or {} for name in ("expansion", "credit", "objective")]
    method = " → ".join(part["name"] for part in sections if "name" in part)
    seed = f"seed {run.recipe['seed']}" if "seed" in run.recipe else ""
    line = " · ".join(part for part in (method, seed, str(run.paths.root)) if part)
    return f'<h1>{escape(_title(run))}</h1><p class="quiet">{escape(line)}</p>'


def _tiles(run: Run) -> str:
    if not run.rows:
        return '<section><p class="quiet">No step is finished yet.</p></section>'
    seconds, steps = sum(run.spans.values()), len(run.rows)
    tiles = [_headline(run)]
    tiles.append(
        tile("training time", duration(seconds), f"{counted(steps, 'step')}, {duration(seconds / steps)} each")
    )
    if generated := _sum(run.rows, "rollout/generated_tokens"):
        rates = [value for _, value in series(run.rows, "rollout/tokens_per_second")]
        rate = f"{compact(sum(rates) / len(rates))} a second in rollout" if rates else ""
        tiles.append(tile("tokens sampled", compact(generated), rate))
    if cached := _sum(run.rows, "rollout/cached_tokens"):
        prompt = cached + _sum(run.rows, "rollout/computed_prompt_tokens")
        tiles.append(
            tile("prompt from the cache", percent(cached / prompt), f"{compact(cached)} tokens not recomputed")
        )
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _headline(run: Run) -> str:
    """The outcome in one figure: held-out exact match, or reward, or loss, whichever the run has."""
    key = "exact_match_greedy"
    if run.before and run.after and key in run.before and key in run.after:
        change = 100 * (run.after[key] - run.before[key])
        text = f"{percent(run.before[key], 1)} → {percent(run.after[key], 1)}"
        return tile("exact match, greedy", text, f"{change:+.1f} points, held-out questions")
    for tag, label in (("rollout/reward_mean", "reward of rollouts"), ("train/loss", "loss")):
        values = [value for _, value in series(run.rows, tag)]
        if values:
            part = max(1, len(values) // 10)
            first, last = sum(values[:part]) / part, sum(values[-part:]) / part
            return tile(label, f"{number(first)} → {number(last)}", f"means of the first and last {part} steps")
    return tile("steps", str(len(run.rows)), "")


def _sum(rows: Sequence[StepRow], tag: str) -> float:
    return sum(value for _, value in series(rows, tag))


def _learning_note(run: Run) -> str:
    reward = (
        "Reward of a step is noisy; the strong line is its moving mean. "
        if series(run.rows, "rollout/reward_mean")
        else ""
    )
    return reward + "The training clock leaves evaluation out, so runs can be compared at equal cost."


def _questions(run: Run) -> str:
    count = (run.after or run.before or {}).get("questions")
    asked = f"{count:.0f} held-out questions; " if count else ""
    return asked + "changes are in percentage points where scores are shares. Ring: before; disc: after."


def _comparison(run: Run) -> str:
    rows = []
    for row in compare(run.before, run.after):
        tone = {1: "up", -1: "down", 0: ""}[row.verdict]
        change = f'<span class="{tone}">{escape(row.shown_change)}</span>'
        after = f"<b>{escape(row.shown(row.after))}</b>"
        track = change_track(row.before, row.after) if row.share else ""
        rows.append([escape(row.label), escape(row.shown(row.before)), after, change, track])
    return table(["", "before", "after", "change", "0 to 100 %"], rows, words=(0, 4)) if rows else ""


def _spans(run: Run) -> str:
    chart = span_chart(run.rows)
    if not chart:
        return ""
    order = sorted(run.spans, key=lambda name: (name == OTHER, -run.spans[name]))
    colours = span_colours(order)
    total = sum(run.spans.values()) or 1.0
    rows = [
        [f'<i class="key" style="background:{colours[name]}"></i>{escape(name)}', *_times(run, run.spans[name], total)]
        for name in order
    ]
    for name, seconds in (run.summary.get("excluded") or {}).items():
        rows.append([f'<span class="quiet">{escape(name)}, not counted</span>', escape(duration(seconds)), "", ""])
    times = table(["span", "seconds", "share", "a step"], rows)
    return f'<div class="columns"><div>{chart}</div><div>{times}</div></div>'


def _times(run: Run, seconds: float, total: float) -> list[str]:
    return [duration(seconds), percent(seconds / total, 1), duration(seconds / max(len(run.rows), 1))]


def _diagnostics(rows: Sequence[StepRow]) -> str:
    parts = []
    for tag, chart in diagnostic_charts(rows):
        words = term(tag)
        head = f"<h3>{escape(words.title)}</h3>"
        parts.append(f'<div title="{escape(tag)}">{head}<p class="note">{escape(words.meaning)}</p>{chart}</div>')
    return f'<div class="small">{"".join(parts)}</div>' if parts else ""


def _tokens(run: Run) -> str:
    chart = token_chart(run.rows)
    totals = []
    for tag in (
        "rollout/generated_tokens", "rollout/computed_prompt_tokens", "rollout/cached_tokens", "train/trained_tokens",
        "train/unique_tokens",
    ):  # fmt: skip
        if total := _sum(run.rows, tag):
            totals.append([escape(term(tag).title), compact(total), compact(total / len(run.rows))])
    if not totals:
        return ""
    summed = table(["tokens", "run", "a step"], totals)
    return f'<div class="columns"><div>{chart}</div><div>{summed}</div></div>' if chart else summed


def _trees_note(complaint: str | None) -> str:
    text = (
        "Time runs to the right; boxes are turns, and the questions shown are those whose trajectories disagree most. "
        "Blue: credit or reward above zero; orange: below, or none. Click a box to read the whole turn."
    )
    return f"{text} {complaint}" if complaint else text


def _trees(run: Run, decode: Decode) -> str:
    return "".join(
        _tree(run.trees[index], run.notes[index], decode) for index in telling_order(run.trees)[:SAMPLE_TREES]
    )


def _tree(tree: RolloutTree, notes: Sequence[TurnNote], decode: Decode) -> str:
    turns = [_article("prompt", "prompt", "", [counted(len(tree.prompt_ids), "token")], decode(tree.prompt_ids), "")]
    for index, (turn, note) in enumerate(zip(tree.turns, notes, strict=True)):
        draws = f" ×{turn.multiplicity}" if turn.multiplicity > 1 else ""
        parent = "the prompt" if turn.parent == ROOT else f"turn {turn.parent}"
        facts = [f"after {parent}", *_facts(note)]
        if turn.sampled_logprobs:
            facts.append(f"mean log-prob {signed(turn.mean_logprob)}")
        facts.append(f"{counted(len(turn.sampled_ids), 'token')} sampled, {len(turn.observation_ids)} observed")
        if turn.reward is not None:
            facts.insert(0, f"{mark(turn.reward)} reward {turn.reward:.3g}")
        title = f"{index} {visible(turn.action) or 'turn'}{draws}"
        observed = decode(turn.observation_ids) if turn.observation_ids else ""
        turns.append(_article(str(index), title, turn.finish, facts, decode(turn.sampled_ids), observed))
    return (
        f'<div class="tree"><h3>{escape(visible(tree.question.text))}</h3>'
        f'<p class="note">{escape(visible(tree.question.id))}: {escape(summary_of(tree))}</p>'
        f'<div class="scroll">{draw_tree(tree, notes, decode)}</div><div class="panel"></div>'
        f"<details><summary>all turns as text</summary>{''.join(turns)}</details></div>"
    )


def _facts(note: TurnNote) -> list[str]:
    facts = []
    if note.credit is not None:
        facts.append(f"credit {signed(note.credit)}")
    if note.ratio is not None:
        facts.append(f"ratio {note.ratio:.3g}")
    if note.target is not None and note.target_ratio is not None:
        facts.append(f"target {note.target:.3f}, which is a ratio of {note.target_ratio:.3g}")
    return facts


def _article(turn: str, title: str, finish: str, facts: Sequence[str], text: str, observed: str) -> str:
    cut = f" · ended by {finish}" if finish not in ("", "stop") else ""
    seen = f'<pre class="observed">{escape(_limited(observed))}</pre>' if observed else ""
    return (
        f'<article data-turn="{escape(turn)}"><h4>{escape(title + cut)}</h4>'
        f"<p>{escape(' · '.join(facts))}</p><pre>{escape(_limited(text))}</pre>{seen}</article>"
    )


def _limited(text: str) -> str:
    shown = printable(text[:TEXT_LIMIT])
    return shown if len(text) <= TEXT_LIMIT else f"{shown}\n… {len(text) - TEXT_LIMIT} characters more in the tree file"


def _recipe(run: Run) -> str:
    if not run.recipe:
        return ""
    rows = "".join(f"<dt>{escape(key)}</dt><dd>{escape(_flat(value))}</dd>" for key, value in run.recipe.items())
    versions = ", ".join(f"{name} {version}" for name, version in (run.summary.get("versions") or {}).items())
    if versions:
        rows += f"<dt>versions</dt><dd>{escape(versions)}</dd>"
    return f"<dl>{rows}</dl>"


def _flat(value: Any) -> str:
    """A section of the recipe on one line: name: bernoulli_kl, radius: 0.45, …"""
    if isinstance(value, Mapping):
        return ", ".join(
            f"{key}: {_flat(item) if not isinstance(item, Mapping) else f'({_flat(item)})'}"
            for key, item in value.items()
        )
    return "" if value is None else str(value)
