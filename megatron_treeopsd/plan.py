"""`treeopsd train --dry-run`: what a recipe would do, checked as far as it can be without starting anything."""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from megatron_treeopsd.config import Recipe
from megatron_treeopsd.observe.run_folder import contents

PREPARE = "treeopsd prepare and the same words (task=..., if there are any)"
BYTES = {"float32": 4, "bfloat16": 2}


def describe(recipe: Recipe) -> str:
    """The resolved recipe as YAML, the plan in plain words, and what is missing, if anything."""
    problems = missing(recipe)
    lines = [
        "# resolved recipe",
        yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False).rstrip(),
        "",
        "# plan",
        *_plan(recipe),
        "",
        *(f"# problem: {problem}" for problem in problems),
    ]
    if not problems:
        lines.append("# nothing is missing; run the same command without --dry-run")
    return "\n".join(lines)


def missing(recipe: Recipe) -> list[str]:
    """What would stop the run at its start: files that are not there, a folder that holds another run."""
    problems = []
    for name in ("config.json", "tokenizer_config.json"):
        if not (recipe.model.checkpoint / name).is_file():
            problems.append(f"model.checkpoint: {recipe.model.checkpoint / name} does not exist")
    for name in ("passages.jsonl", "train.jsonl", f"{recipe.evaluation.split}.jsonl"):
        if not (recipe.task.data / name).is_file():
            problems.append(f"task.data: {recipe.task.data / name} does not exist; make it with {PREPARE}")
    if not recipe.resume and contents(recipe.run):
        problems.append(f"run: {recipe.run} is not empty; continue it with resume=true or choose another folder")
    return problems


def _plan(recipe: Recipe) -> list[str]:
    update, layout = recipe.update, recipe.layout
    trajectories = update.questions_per_step * recipe.expansion.leaves
    ends = [f"{recipe.steps} steps"] if recipe.steps is not None else []
    ends += [f"{recipe.budget:g} s of training clock"] if recipe.budget is not None else []
    lines = [
        f"run folder      {recipe.run}",
        f"ends after      {' or '.join(ends)}",
        f"a step          {update.questions_per_step} questions x {recipe.expansion.leaves} leaves "
        f"= {trajectories} trajectories of at most {recipe.task.max_turns} turns "
        f"and {recipe.task.max_context_tokens} tokens",
        f"                {update.epochs} epochs x {update.mini_batches} mini-batches "
        f"= {update.epochs * update.mini_batches} optimizer steps",
        f"layout          tp={layout.tp} cp={layout.cp} pp={layout.pp} ep={layout.ep} etp={layout.etp} on "
        f"{os.environ.get('WORLD_SIZE', '1')} process(es), distributed optimizer "
        f"{'on' if layout.distributed_optimizer else 'off'}",
    ]
    return lines + (_memory(recipe) if (recipe.model.checkpoint / "config.json").is_file() else [])


def _memory(recipe: Recipe) -> list[str]:
    total, experts = parameter_counts(recipe.model.checkpoint)
    layout = recipe.layout
    mine = (total - experts) / layout.tp / layout.pp + experts / (layout.ep * layout.etp * layout.pp)
    weights = mine * BYTES[recipe.model.dtype]
    gradients = mine * 4
    replicas = max(1, int(os.environ.get("WORLD_SIZE", "1")) // (layout.tp * layout.pp))
    state = mine * (8 if recipe.model.dtype == "float32" else 12)
    state /= replicas if layout.distributed_optimizer else 1
    return [
        f"parameters      {total / 1e6:.1f} M, {experts / 1e6:.1f} M of them in experts; {mine / 1e6:.1f} M a process",
        f"memory          weights {weights / 1e6:.1f} MB, gradients {gradients / 1e6:.1f} MB, "
        f"optimizer {state / 1e6:.1f} MB a process, activations and engine not counted",
    ]


def parameter_counts(checkpoint: Path) -> tuple[int, int]:
    """All parameters and those in experts, from `config.json` alone (the model is built on the meta device)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(checkpoint), local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    return total, experts
