"""Write the data folder of a Factbook task.

passages.jsonl   train.jsonl   dev.jsonl   test.jsonl      what every search task has
facts.json       what the scripted agent of `demonstrator.py` knows
tokenizer/       the word-level tokenizer, the same for both tasks
dataset.json     counts and measured ceilings; marks the folder as one that may be written anew
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_treeopsd import config
from megatron_treeopsd.environment import retrieval
from megatron_treeopsd.environment.data import passage_row, question_row, write_rows
from megatron_treeopsd.environment.factbook.corpus import build_passages, passage_id, read_fact
from megatron_treeopsd.environment.factbook.folder import written_whole
from megatron_treeopsd.environment.factbook.policy import create_policy
from megatron_treeopsd.environment.factbook.questions import Composition, build_questions, chain_of
from megatron_treeopsd.environment.factbook.tokenizer import build_tokenizer, lower_words, structural_text, vocabulary
from megatron_treeopsd.environment.factbook.world import Country, Facts, load_world
from megatron_treeopsd.environment.retrieval.base import Passage, Retriever
from megatron_treeopsd.tree import Question

__all__ = ["VARIANTS", "Summary", "create_policy", "prepare", "retrieval_ceiling"]

FORMAT = "megatron_treeopsd.factbook/1"
VOCABULARY = 3520
"""Tokens; a multiple of 64, so that the embedding can be divided among tensor-parallel ranks."""
CEILING_QUESTIONS = 1000
"""Test questions on which the ceilings are measured."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What one task is made of."""

    composition: Composition
    near_facts: bool = False


VARIANTS = {
    "factbook": Variant(Composition(enumerate_relations=(0, 1), walks=24, walk_relations=(2, 2), min_hops=4)),
    "factbook_long": Variant(Composition(walks=300, walk_relations=(1, 4), min_hops=3), near_facts=True),
}
"""By the recipe's `task.name`."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What `prepare` wrote and measured.

    Attributes:
        questions: number of questions by split and number of hops.
        chain_ceiling: share of test questions for which every gold query finds its gold passage in the top k.
        query_ceiling: the same share of single gold queries.
        longest_prompt: tokens of the longest question with bos.
        longest_trajectory: tokens of a trajectory that uses all its budgets behind the longest prompt.
    """

    name: str
    countries: int
    passages: int
    vocabulary: int
    questions: dict[str, dict[str, int]]
    chain_ceiling: float
    query_ceiling: float
    longest_prompt: int
    longest_trajectory: int

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.countries} countries, {self.passages} passages, {self.vocabulary} tokens"]
        for split, hops in self.questions.items():
            shares = ", ".join(f"{count} of {number} hops" for number, count in hops.items())
            lines.append(f"  {split:5} {sum(hops.values()):6} questions: {shares}")
        lines.append(
            f"  gold passages found: for {self.query_ceiling:.1%} of the gold queries, "
            f"for all hops of {self.chain_ceiling:.1%} of the test questions"
        )
        return "\n".join(lines)


def prepare(task: config.Task, folder: Path) -> Summary:
    """Write the data of `task` to `folder`, all or nothing, always the same bytes.

    An older data folder is replaced. Raises `FileExistsError` if `folder` holds anything else, and `RecipeError` for a
    task that is not made here or whose budgets are too small for its questions.
    """
    if task.name not in VARIANTS:
        raise config.RecipeError(f"task.name={task.name}: cannot be prepared; known are {', '.join(VARIANTS)}")
    variant = VARIANTS[task.name]
    with written_whole(folder, replaces="dataset.json") as temporary:
        world = load_world()
        passages = build_passages(world, near_facts=variant.near_facts)
        questions = build_questions(world, variant.composition, prefix=task.name)
        longest_prompt, longest_trajectory = _check_budgets(task, questions)
        words = _vocabulary(world)
        chain_ceiling, query_ceiling = retrieval_ceiling(
            random.Random(0).sample(questions["test"], min(CEILING_QUESTIONS, len(questions["test"]))),
            retrieval.build(task.retrieval, passages),
            task.retrieval.top_k,
        )
        summary = Summary(
            name=task.name,
            countries=len(world),
            passages=len(passages),
            vocabulary=len(words),
            questions={split: _by_hops(items) for split, items in questions.items()},
            chain_ceiling=chain_ceiling,
            query_ceiling=query_ceiling,
            longest_prompt=longest_prompt,
            longest_trajectory=longest_trajectory,
        )
        write_rows(temporary / "passages.jsonl", map(passage_row, passages))
        for split, items in questions.items():
            write_rows(temporary / f"{split}.jsonl", map(question_row, items))
        facts = {country.name: country.facts for country in world}
        (temporary / "facts.json").write_text(json.dumps(facts, indent=0))
        build_tokenizer(words).save_pretrained(temporary / "tokenizer")
        (temporary / "dataset.json").write_text(json.dumps({"format": FORMAT, **asdict(summary)}, indent=1))
    return summary


def retrieval_ceiling(questions: Sequence[Question], retriever: Retriever, top_k: int) -> tuple[float, float]:
    """How much an agent with perfect queries can find.

    Returns the share of `questions` for which every gold query finds its gold passage among the first `top_k`, and the
    same share of single gold queries.
    """
    found = [
        [
            passage_id(hop.country, hop.field) in {passage.id for passage in retriever.search(hop.query, top_k)}
            for hop in chain_of(question)
        ]
        for question in questions
    ]
    hops = [hit for hits in found for hit in hits]
    return sum(all(hits) for hits in found) / len(found), sum(hops) / len(hops)


def _vocabulary(world: Sequence[Country]) -> list[str]:
    """The same for both tasks: every word that a question, a query or an answer can need, then frequent ones."""
    passages = build_passages(world, near_facts=True)
    facts = Facts.index({country.name: country.facts for country in world})
    required = [passage for passage in passages if read_fact(passage)]
    optional = [passage for passage in passages if not read_fact(passage)]
    return vocabulary([structural_text(facts), *map(_contents, required)], map(_contents, optional), size=VOCABULARY)


def _contents(passage: Passage) -> str:
    return f"{passage.title} {passage.text}"


def _by_hops(questions: Iterable[Question]) -> dict[str, int]:
    counts = Counter(question.metadata["hops"] for question in questions)
    return {str(hops): counts[hops] for hops in sorted(counts)}


def _check_budgets(task: config.Task, questions: dict[str, list[Question]]) -> tuple[int, int]:
    """Tokens of the longest prompt and of the longest trajectory that the budgets allow; raises if those are short."""
    everything = [question for items in questions.values() for question in items]
    hops = max(question.metadata["hops"] for question in everything)
    if task.max_turns <= hops:
        raise config.RecipeError(
            f"task.max_turns={task.max_turns}: questions of {hops} hops need {hops + 1} turns, one for the answer"
        )
    prompt = 1 + max(len(lower_words(question.text)) for question in everything)
    longest = prompt + task.max_turns * task.max_turn_tokens + (task.max_turns - 1) * task.max_observation_tokens
    if task.max_context_tokens < longest:
        raise config.RecipeError(
            f"task.max_context_tokens={task.max_context_tokens}: a trajectory can reach {longest} tokens (longest "
            "prompt, max_turns times max_turn_tokens, and max_observation_tokens between them)"
        )
    return prompt, longest
