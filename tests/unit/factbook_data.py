"""The Factbook tasks, prepared once for all tests of a session."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from megatron_treeopsd import config, environment, recipes
from megatron_treeopsd.environment.data import load_questions
from megatron_treeopsd.environment.factbook.prepare import Summary, prepare
from megatron_treeopsd.environment.search import SearchEnvironment
from megatron_treeopsd.tree import Question


def recipe(name: str, *words: str) -> config.Recipe:
    return recipes.load_recipe([f"task={name}", "method=sft", "steps=1", *words])


@cache
def prepared(name: str) -> tuple[Path, Summary]:
    """Data folder and summary of a task."""
    root = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root / name, prepare(recipe(name).task, root / name)


def task(name: str, **changes: object) -> config.Task:
    return recipe(name).task.model_copy(update={"data": prepared(name)[0], **changes})


@cache
def search_environment(name: str) -> SearchEnvironment:
    from transformers import AutoTokenizer

    folder, _ = prepared(name)
    built = environment.build(task(name), AutoTokenizer.from_pretrained(folder / "tokenizer"))
    assert isinstance(built, SearchEnvironment)
    return built


@cache
def questions(name: str, split: str) -> tuple[Question, ...]:
    return tuple(load_questions(prepared(name)[0] / f"{split}.jsonl"))
