"""Rollouts: questions in, scored trees out, on every rank the same list.

Each rank grows the trees of its share of the questions with its own engine; trees are then exchanged, so that the
update can balance them over data-parallel ranks in any way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_treeopsd import config
from megatron_treeopsd import expansion as expansions
from megatron_treeopsd import reward as rewards
from megatron_treeopsd.engine.base import Engine, Sampling
from megatron_treeopsd.environment.base import Environment
from megatron_treeopsd.expansion.base import Expansion, together
from megatron_treeopsd.questions import stable_seed
from megatron_treeopsd.reward import Reward, score_tree
from megatron_treeopsd.tree import Question, RolloutTree

Exchange = Callable[[list[tuple[int, RolloutTree]]], list[list[tuple[int, RolloutTree]]]]
"""Gathers one list from every rank (see `backend.parallel.all_gather_objects`)."""


@dataclass(frozen=True, slots=True)
class Share:
    """Which questions this rank grows: those of its engine, which are dealt out in turn. Guests of an engine: none."""

    rank: int
    world: int
    exchange: Exchange
    ranks_per_engine: int = 1

    def of(self, count: int) -> range:
        """The indices among `count` questions."""
        number, guest = divmod(self.rank, self.ranks_per_engine)
        engines = -(-self.world // self.ranks_per_engine)
        return range(0) if guest else range(number, count, engines)


class Collector:
    """Grows trees for training and plays single trajectories for evaluation."""

    def __init__(
        self, recipe: config.Recipe, *, engine: Engine, environment: Environment, reward: Reward, share: Share
    ) -> None:
        self._recipe = recipe
        self._engine = engine
        self._environment = environment
        self._reward = reward
        self._share = share
        routes = recipe.mismatch.routes != "ignore"
        self.training = self._expansion(recipe.expansion, recipe.rollout.temperature, routes=routes)
        single = config.Chains(name="chains", chains=1)
        self._single = {t: self._expansion(single, t, routes=False) for t in (0.0, recipe.rollout.temperature)}

    def _expansion(self, section: config.Expansion, temperature: float, *, routes: bool) -> Expansion:
        sampling = Sampling(self._recipe.task.max_turn_tokens, self._environment.stop_ids, temperature, routes)
        return expansions.build(
            section,
            engine=self._engine,
            environment=self._environment,
            sampling=sampling,
            task=self._recipe.task,
        )

    def collect(self, questions: Sequence[Question], *, step: int) -> list[RolloutTree]:
        """One scored tree a question, in the order of `questions`."""
        return self._grow(self.training, questions, ("rollout", self._recipe.seed, step))

    def evaluate(self, questions: Sequence[Question], *, repeats: int) -> dict[str, float]:
        """Greedy and sampled scores of single trajectories; rates are shares of trajectories in [0, 1]."""
        if not questions:
            return {}
        greedy = self._grow(self._single[0.0], questions, ("greedy",))
        scores = {"questions": float(len(questions)), **_scores(greedy, "greedy")}
        for hops in sorted({int(q.metadata["hops"]) for q in questions if "hops" in q.metadata}):
            chosen = [tree for tree in greedy if tree.question.metadata.get("hops") == hops]
            scores[f"hops_{hops}"] = _scores(chosen, "greedy")["exact_match_greedy"]
        sampled = []
        for repeat in range(repeats):
            sampled += self._grow(self._single[self._recipe.rollout.temperature], questions, ("sampled", repeat))
        return scores | (_scores(sampled, "sampled") if sampled else {})

    def _grow(self, expansion: Expansion, questions: Sequence[Question], seed: tuple[object, ...]) -> list[RolloutTree]:
        mine = self._share.of(len(questions))

        async def grow_all() -> list[RolloutTree]:
            async def grow(index: int) -> RolloutTree:
                session = "/".join(map(str, (*seed, index)))
                tree = await expansion.grow(
                    questions[index], seed=stable_seed(*seed, index, questions[index].id), session=session
                )
                score_tree(self._reward, tree)
                tree.check()
                return tree

            return await together(grow(index) for index in mine)

        grown = list(zip(mine, asyncio.run(grow_all()), strict=True))
        everything = [item for part in self._share.exchange(grown) for item in part]
        return [tree for _, tree in sorted(everything, key=lambda item: item[0])]


_SCORERS = {name: rewards.build(config.Reward(name=name)) for name in ("exact_match", "f1")}
"""What evaluation reports, whatever the reward that is trained."""


def _scores(trees: Sequence[RolloutTree], kind: str) -> dict[str, float]:
    leaves = [(tree, index, tree.turns[index].prediction) for tree in trees for index in tree.terminals()]
    means = {name: [s.score(tree.question, answer) for tree, _, answer in leaves] for name, s in _SCORERS.items()}
    means["no_answer"] = [float(answer is None) for _, _, answer in leaves]
    means["turns"] = [float(len(tree.path(index))) for tree, index, _ in leaves]
    return {f"{name}_{kind}": float(np.mean(values)) for name, values in means.items()}
