"""The training loop: one line a phase.

    question -> rollout -> sleep -> credit -> behaviour log-probs -> update -> publish -> record

Every strategy in it (how trees grow, what a turn is credited with, what is minimised) comes from the recipe; the loop
knows none of them by name.
"""

from __future__ import annotations

from pathlib import Path

from megatron_treeopsd.config import Recipe
from megatron_treeopsd.session import Session


def train(recipe: Recipe) -> Path | None:
    """Run a recipe to its end. Returns the path of `summary.json` on rank 0 and None on the other ranks.

    Started on every rank (`torchrun`), or in one process. Continues the run folder if `recipe.resume` is set.
    """
    with Session(recipe) as run:
        run.evaluate("before")
        for step in run.steps():
            questions = run.draw(step)
            with run.spans("rollout"):
                trees = run.collector.collect(questions, step=step)
            with run.spans("sleep"):
                run.sleep()
            with run.spans("credit"):
                credits = [run.credit(tree) for tree in trees]
            with run.spans("behaviour"):
                behaviour = run.learner.behaviour(trees)
            with run.spans("update"):
                learned = run.learner.update(trees, credits, behaviour, step=step)
            with run.spans("publish"):
                run.publish(version=step + 1)
            run.record(step, trees, credits, behaviour, learned)
        run.evaluate("after")
        return run.finish()
