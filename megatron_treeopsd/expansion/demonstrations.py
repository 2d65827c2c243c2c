"""Scripted trajectories in place of sampled ones: supervised learning on the same rails as reinforcement learning.

Symbol shuffling: a demonstration stays a valid one if its content words are renamed consistently, in the question, in
the queries, in the passages and in the answer alike. Renamed at random, no word can be learnt by heart, so that all
that is left to learn is to copy the right one; and words that no training question contains are trained too.

Curriculum, over the share of the run that is over:

    progress   0 ......... curriculum ......... 2 curriculum ......... 1
    questions  fewest hops   fewest and next      as the task says
    agent      never errs    never errs           errs as `noise` says
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

import numpy as np

from megatron_treeopsd import config
from megatron_treeopsd.environment.base import Environment
from megatron_treeopsd.environment.factbook.demonstrator import Demonstrator
from megatron_treeopsd.environment.factbook.questions import chain_of
from megatron_treeopsd.environment.factbook.tokenizer import structural_text
from megatron_treeopsd.environment.factbook.world import Facts
from megatron_treeopsd.environment.search import SearchEnvironment
from megatron_treeopsd.expansion.base import Expansion
from megatron_treeopsd.tree import ROOT, Question, RolloutTree, Turn

CLEAN_SHUFFLE = 0.8
"""Least share of shuffled demonstrations while the agent does not err: copying is learnt first."""

SECOND_PHASE = (0.4, 0.6)
"""Shares of the questions with the fewest and the next fewest hops."""


class DemonstrationsExpansion(Expansion):
    """One chain for each question, played by the Factbook's scripted agent with real search results.

    The agent's tokens count as sampled with log-probability 0.
    """

    needs_engine = False

    def __init__(self, section: config.Demonstrations, *, environment: Environment, task: config.Task) -> None:
        if not isinstance(environment, SearchEnvironment):
            raise config.RecipeError(
                f"expansion.name=demonstrations needs task.environment=search, not {task.environment}"
            )
        self._section = section
        self._environment = environment
        self._task = task
        facts = Facts.load(task.data / "facts.json")
        search = environment.retriever.search
        self._demonstrator = Demonstrator(facts, lambda query: search(query, environment.top_k), section)
        self._content_ids = _content_ids(environment, structural_text(facts))
        self._progress = 0.0

    def set_progress(self, progress: float) -> None:
        self._progress = progress

    def question_weights(self, progress: float) -> Mapping[int, float] | None:
        hops = sorted(self._task.hop_weights or ())
        if len(hops) < 2 or progress >= 2 * self._section.curriculum:
            return None
        if progress < self._section.curriculum:
            return {hops[0]: 1.0}
        return dict(zip(hops[:2], SECOND_PHASE, strict=True))

    async def grow(self, question: Question, *, seed: int, session: str) -> RolloutTree:
        """The demonstration of `question`. Raises `ValueError` if it has no chain or a turn is over its budget."""
        draw = random.Random(seed)
        clean = self._progress < 2 * self._section.curriculum
        demonstration = self._demonstrator.play(
            chain_of(question), noise=0.0 if clean else self._section.noise, max_turns=self._task.max_turns, draw=draw
        )
        tree = RolloutTree(question, self._environment.prompt(question))
        for query in demonstration.queries:
            self._add(tree, f"<search> {query} </search>")
        self._add(tree, f"<answer> {demonstration.answer} </answer>")
        shuffle = self._section.symbol_shuffle
        if draw.random() < (max(shuffle, CLEAN_SHUFFLE) if clean and shuffle else shuffle):
            self._shuffle(tree, np.random.default_rng(seed))
        return tree

    def _add(self, tree: RolloutTree, text: str) -> None:
        ids = self._environment.encode(text)
        if len(ids) > self._task.max_turn_tokens:
            raise ValueError(
                f"question {tree.question.id}: the scripted turn {text!r} has {len(ids)} tokens, more than "
                f"task.max_turn_tokens={self._task.max_turn_tokens}"
            )
        outcome = self._environment.step(tree.question, None, ids, last=False)
        turn = Turn(
            parent=len(tree.turns) - 1 if tree.turns else ROOT,
            sampled_ids=ids,
            sampled_logprobs=[0.0] * len(ids),
            observation_ids=outcome.observation_ids,
            action=outcome.action,
            terminal=outcome.done,
            prediction=outcome.prediction,
        )
        tree.add(turn, merge=False)

    def _shuffle(self, tree: RolloutTree, random: np.random.Generator) -> None:
        """Rename content words; `prediction` keeps the real answer, so that the reward stays what it was."""
        renamed = np.arange(len(self._environment.tokenizer))
        renamed[self._content_ids] = random.permutation(self._content_ids)

        def rename(ids: Iterable[int]) -> list[int]:
            return [int(renamed[token]) for token in ids]

        tree.prompt_ids = rename(tree.prompt_ids)
        for turn in tree.turns:
            turn.sampled_ids = rename(turn.sampled_ids)
            turn.observation_ids = rename(turn.observation_ids)


def _content_ids(environment: SearchEnvironment, structure: str) -> np.ndarray:
    """int64 [content words]: every token but control tokens, tags, and the words that give a text its form."""
    tokenizer = environment.tokenizer
    fixed = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values(), *environment.encode(structure)}
    return np.asarray([token for token in range(len(tokenizer)) if token not in fixed], dtype=np.int64)
