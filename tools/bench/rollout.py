"""How many prompt tokens does a tree rollout compute, and how many would it without a shared prefix?

    python tools/bench/rollout.py [--engine embedded|sglang] [--questions N] [--json] [key=value ...]

Grows the trees of one training step with the recipe's policy and counts, from the engine's own report of what it found
in its cache:

    computed        prompt tokens that went through the model
    unique          the limit: every distinct prompt token once, sampled tokens not at all (they have their keys and
                    values from being sampled, but for the last one of a turn)
    cold branches   the same requests if only the turns of one chain shared a cache: a fork computes its prefix anew
    no cache        every prompt from its first token

The last three are counted on the trees that were grown. An engine must compute at least one token of a prompt, or one
page, even if it knows all of it; that happens once a branch, so the bound is unique + branches * page.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_treeopsd import environment, reward
from megatron_treeopsd.collect import Collector, Share
from megatron_treeopsd.config import Recipe, RecipeError
from megatron_treeopsd.engine.base import Engine, EngineError
from megatron_treeopsd.engine.build import build_engine
from megatron_treeopsd.engine.prefix_cache import PrefixCache
from megatron_treeopsd.environment.data import load_questions
from megatron_treeopsd.questions import QuestionSource
from megatron_treeopsd.recipes import load_recipe
from megatron_treeopsd.tokenizer import load_tokenizer
from megatron_treeopsd.tree import RolloutTree

PAGE = {"embedded": 0, "sglang": 1}
"""Tokens that an engine computes of a prompt it has whole in its cache."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sampled turn: its tree, its chain in the tree, what it was asked with and what came out."""

    tree: int
    chain: int
    prompt: list[int]
    sampled: list[int]


def requests_of(trees: Sequence[RolloutTree]) -> Iterator[Request]:
    """Every request behind trees whose identical siblings were not merged; parents first."""
    for number, tree in enumerate(trees):
        for turn in tree.turns:
            yield Request(number, turn.chain, tree.path_ids(turn.parent), turn.sampled_ids)


def computed_tokens(requests: Sequence[Request], *, shared: bool) -> int:
    """Prompt tokens that an ideal cache leaves to compute: one for all requests, or one for each chain of each tree."""
    capacity = sum(len(request.prompt) + len(request.sampled) for request in requests)
    caches: dict[object, PrefixCache] = {}
    computed = 0
    for request in requests:
        key = None if shared else (request.tree, request.chain)
        cache = caches.setdefault(key, PrefixCache(capacity if shared else 4 * len(request.prompt) + 4096))
        computed += len(request.prompt) - len(cache.match(request.prompt))
        cache.insert([*request.prompt, *request.sampled[:-1]])
    return computed


def measure(recipe: Recipe, *, questions: int) -> dict[str, Any]:
    """Grow the trees of one step and count."""
    tokenizer = load_tokenizer(recipe.model.checkpoint)
    world = environment.build(recipe.task, tokenizer)
    engine = build_engine(recipe.engine, checkpoint=recipe.model.checkpoint, dtype=recipe.model.dtype)
    try:
        engine.publish(checkpoint_weights(recipe.model.checkpoint), version=0)
        return count(recipe, engine, world, questions=questions)
    finally:
        engine.close()
        world.close()


def alone(recipe: Recipe, engine: Engine, world: environment.Environment) -> Collector:
    """What collects all trees of a step in this process."""
    share = Share(0, 1, lambda items: [items])
    return Collector(recipe, engine=engine, environment=world, reward=reward.build(recipe.reward), share=share)


def count(recipe: Recipe, engine: Engine, world: environment.Environment, *, questions: int) -> dict[str, Any]:
    """The figures of one step on a running engine."""
    collector = alone(recipe, engine, world)
    source = QuestionSource(load_questions(recipe.task.data / "train.jsonl"), seed=recipe.seed)
    drawn = source.draw(0, questions, recipe.task.hop_weights)
    engine.counters.reset()
    started = time.perf_counter()
    trees = collector.collect(drawn, step=0)
    seconds = time.perf_counter() - started
    requests = list(requests_of(trees))
    unique = computed_tokens(requests, shared=True)
    branches = len(requests) - len({(request.tree, *request.prompt) for request in requests})
    page = PAGE[recipe.engine.name]
    return {
        "engine": recipe.engine.name,
        "questions": questions,
        "requests": engine.counters.requests,
        "branches": branches,
        "prompt_tokens_computed": engine.counters.computed_tokens,
        "unique_prompt_tokens": unique,
        "limit_prompt_tokens": unique + branches * page,
        "cold_branch_prompt_tokens": computed_tokens(requests, shared=False),
        "no_cache_prompt_tokens": sum(len(request.prompt) for request in requests),
        "generated_tokens": engine.counters.generated_tokens,
        "generated_tokens_per_second": engine.counters.generated_tokens / seconds,
    }


def checkpoint_weights(checkpoint: Path) -> Iterator[tuple[str, Any]]:
    """The tensors of a checkpoint, one after the other."""
    from safetensors import safe_open

    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                yield name, tensors.get_tensor(name)


def table(found: dict[str, Any]) -> str:
    """The figures for people."""
    unique = found["unique_prompt_tokens"]
    rows = [
        ("computed", found["prompt_tokens_computed"]),
        ("unique (limit)", unique),
        ("cold branches", found["cold_branch_prompt_tokens"]),
        ("no cache", found["no_cache_prompt_tokens"]),
    ]
    lines = [
        f"{found['engine']} engine: {found['questions']} questions, {found['requests']} requests, "
        f"{found['branches']} branches, {found['generated_tokens']} tokens sampled at "
        f"{found['generated_tokens_per_second']:.0f}/s",
        "",
        f"{'prompt tokens':<16}{'tokens':>10}{'of unique':>12}",
        *(f"{name:<16}{tokens:>10}{tokens / unique:>11.2f}x" for name, tokens in rows),
        "",
        f"bound: unique + branches * page = {found['limit_prompt_tokens']}",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(PAGE), default="embedded")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("words", nargs="*", help="recipe words, as for treeopsd train")
    options = parser.parse_args(arguments)
    try:
        # Identical siblings stay apart, so that each turn of a tree is one request.
        fixed = [f"engine={options.engine}", "expansion.merge_siblings=false", "steps=1"]
        found = measure(load_recipe([*fixed, *options.words]), questions=options.questions)
    except (RecipeError, EngineError) as error:
        print(f"rollout.py: {error}", file=sys.stderr)
        return 1
    print(table(found))
    if options.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
