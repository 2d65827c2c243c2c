"""The policy of a run as a Hugging Face folder that any engine serves."""

from __future__ import annotations

from pathlib import Path

from megatron_treeopsd import weights
from megatron_treeopsd.backend import checkpoint, parallel
from megatron_treeopsd.backend.policy import Policy
from megatron_treeopsd.config import RecipeError
from megatron_treeopsd.recipes import read_recipe


def export(run: Path, destination: Path) -> None:
    """Write the last checkpoint of a run folder to `destination`, at the layout the run was trained with.

    Start it on as many processes as the run had. Raises `RecipeError` if there is nothing to export or the
    destination exists.
    """
    if destination.exists():
        raise RecipeError(f"{destination} exists; choose another folder or remove it")
    latest = checkpoint.latest(run / "checkpoints")
    if latest is None:
        raise RecipeError(f"{run}: no complete checkpoint in {run / 'checkpoints'}")
    recipe = read_recipe(run / "recipe.yaml")
    state = parallel.initialize(recipe.layout, seed=recipe.seed)
    try:
        policy = Policy(recipe, state, total_steps=recipe.optimizer_steps)
        checkpoint.load(latest, policy)
        weights.save_pretrained(policy.model, policy.hf_config, recipe.model.checkpoint, destination)
    finally:
        parallel.shutdown()
