"""`treeopsd show RUN`: print a saved tree, or list what is saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO

import rich.console
from rich.text import Text

from megatron_treeopsd.observe.decoder import decoder_of
from megatron_treeopsd.observe.files import RunFolderError
from megatron_treeopsd.observe.run_folder import RunPaths
from megatron_treeopsd.observe.tree_view import render_tree, summary_of, telling_order
from megatron_treeopsd.observe.turn_notes import TurnNotes
from megatron_treeopsd.observe.wording import shorten, visible
from megatron_treeopsd.tree import RolloutTree, load_trees

WIDTH = 100
"""Columns where the output is not a terminal; on one, trees are not drawn wider than `WIDEST`."""
WIDEST = 140


def show(
    run: Path,
    *,
    step: int | None = None,
    tree: int | None = None,
    question: str | None = None,
    listing: bool = False,
    full: bool = False,
    file: IO[str] | None = None,
) -> None:
    """Print one tree of a run folder.

    Args:
        step: a step whose trees are saved; None: the last such step.
        tree: index in that step; None: the tree whose leaves disagree most.
        question: the tree of this question instead.
        listing: print the saved steps and the trees of the step instead.
        full: print whole texts, nothing shortened.

    Raises `RunFolderError` saying what there is if what was asked for is not.
    """
    console = rich.console.Console(file=file, highlight=False, markup=False, emoji=False)
    width = min(console.width, WIDEST) if console.is_terminal else WIDTH
    paths = RunPaths(run)
    steps = _saved_steps(paths)
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise RunFolderError(f"{run}: no trees of step {step} are saved; --step takes {_ranges(steps)}")
    trees = load_trees(paths.tree_file(chosen))
    if listing:
        _print(console, _listing(trees, chosen, steps, width))
        return
    index = _pick(trees, tree, question, where=f"{run}, step {chosen}")
    notes = TurnNotes.read(paths.notes_file(chosen), trees)
    decode, complaint = decoder_of(paths)
    _print(console, Text(f"step {chosen}, tree {index} of {len(trees)} (--list shows the others)\n", style="dim"))
    _print(console, render_tree(trees[index], decode, notes=notes.trees[index], width=width, full=full))
    if complaint:
        _print(console, Text(f"\n{complaint}", style="bold"))


def _saved_steps(paths: RunPaths) -> list[int]:
    paths.require()
    steps = paths.saved_tree_steps()
    if not steps:
        raise RunFolderError(
            f"{paths.root}: no trees are saved yet; that happens every logging.trees_every_steps steps and at the end"
        )
    return steps


def _pick(trees: Sequence[RolloutTree], tree: int | None, question: str | None, *, where: str) -> int:
    if question is not None:
        ids = [item.question.id for item in trees]
        if question not in ids:
            raise RunFolderError(f"{where}: no tree of question {question!r}; --question takes {', '.join(ids)}")
        return ids.index(question)
    if not trees:
        raise RunFolderError(f"{where}: the file holds no trees")
    if tree is None:
        return telling_order(trees)[0]
    if not 0 <= tree < len(trees):
        raise RunFolderError(f"{where}: there is no tree {tree}; --tree takes 0 to {len(trees) - 1}")
    return tree


def _listing(trees: Sequence[RolloutTree], step: int, steps: Sequence[int], width: int) -> Text:
    out = Text(f"trees are saved of steps {_ranges(steps)} (--step N); step {step} has {len(trees)} (--tree I):\n\n")
    for index, tree in enumerate(trees):
        out.append(f"{index:>4}  ", style="dim")
        out.append(f"{visible(tree.question.id)}  ", style="bold").append(summary_of(tree) + "\n", style="dim")
        out.append(f"      {shorten(visible(tree.question.text), width - 6)}\n")
    out.rstrip()
    return out


def _ranges(steps: Sequence[int]) -> str:
    """0, 10, ..., 90: all of a few, the ends of many."""
    if len(steps) <= 8:
        return ", ".join(map(str, steps))
    return f"{steps[0]}, {steps[1]}, …, {steps[-2]}, {steps[-1]}"


def _print(console: rich.console.Console, text: Text) -> None:
    console.print(text, soft_wrap=True)
