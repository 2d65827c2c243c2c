"""The two pictures of the README from a run folder: its learning curve, and one of its trees with credits.

Usage: python tools/pictures.py runs/quickstart --step 10 --tree 9 [--to docs/images]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_treeopsd.observe.curves import learning_curve_svg
from megatron_treeopsd.observe.files import write_atomically
from megatron_treeopsd.observe.run_folder import RunPaths
from megatron_treeopsd.observe.tree_svg import tree_svg
from megatron_treeopsd.observe.turn_notes import TurnNotes
from megatron_treeopsd.recipes import read_recipe
from megatron_treeopsd.tokenizer import load_tokenizer
from megatron_treeopsd.tree import load_trees


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, required=True, help="a step whose trees were kept")
    parser.add_argument("--tree", type=int, required=True, help="which of them")
    parser.add_argument("--to", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()

    run = RunPaths(arguments.run)
    run.require()
    trees = load_trees(run.tree_file(arguments.step))
    notes = TurnNotes.read(run.notes_file(arguments.step), trees)
    tokenizer = load_tokenizer(read_recipe(run.recipe).model.checkpoint)
    arguments.to.mkdir(parents=True, exist_ok=True)
    write_atomically(arguments.to / "learning-curve.svg", learning_curve_svg(run))
    picture = tree_svg(trees[arguments.tree], notes.trees[arguments.tree], tokenizer.decode)
    write_atomically(arguments.to / "tree.svg", picture)
    print(f"{arguments.to / 'learning-curve.svg'}\n{arguments.to / 'tree.svg'}")


if __name__ == "__main__":
    main()
