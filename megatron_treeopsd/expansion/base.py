"""How a tree grows: the contract of expansions, and what those share that sample with the engine."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from megatron_treeopsd.engine.base import Engine, Sampling
from megatron_treeopsd.environment.base import Environment
from megatron_treeopsd.episode import Budgets, play
from megatron_treeopsd.tree import ROOT, Question, RolloutTree

Result = TypeVar("Result")


class Expansion(ABC):
    """Grows one tree for each question.

    Attributes:
        needs_engine: False if trees come from elsewhere, so that no weights have to be published.
    """

    needs_engine: bool = True

    @abstractmethod
    async def grow(self, question: Question, *, seed: int, session: str) -> RolloutTree:
        """The finished tree of `question`; the same for the same seed and weights, whatever else is being sampled.

        `session` names the tree in the engine and is released when the tree is finished.
        """

    def set_progress(self, progress: float) -> None:
        """Tell a strategy with a curriculum how much of the run is over, in [0, 1]."""

    def question_weights(self, progress: float) -> Mapping[int, float] | None:
        """Share of each number of hops among the questions wanted at this progress; None: as the task says."""
        return None


@dataclass(frozen=True, slots=True)
class Ground:
    """What all trees of an expansion grow from; `merge` is whether equal siblings become one turn."""

    engine: Engine
    environment: Environment
    sampling: Sampling
    budgets: Budgets
    merge: bool


@dataclass(frozen=True, slots=True)
class Growth:
    """One tree while it grows.

    Each draw is a node of its own here, because the order in which draws come back depends on what else the engine
    is doing. `settled` brings them into an order that does not.
    """

    tree: RolloutTree
    states: dict[int, Any]
    ground: Ground
    seed: int
    session: str

    async def play(self, node: int, *, chain: int) -> int:
        """Continue behind `node` to the end (see `episode.play`); returns the index of the last turn."""
        return await play(
            self.tree,
            node,
            engine=self.ground.engine,
            environment=self.ground.environment,
            states=self.states,
            sampling=self.ground.sampling,
            budgets=self.ground.budgets,
            session=self.session,
            seed=self.seed,
            chain=chain,
        )

    def settled(self) -> RolloutTree:
        """The grown tree with turns in the order of their chains.

        If they are to be merged, siblings with the same tokens become one turn with multiplicity (ALGORITHMS.md
        §1.1), which belongs to the first of its chains. Two trunks may then share turns. Raises `TreeError` if such
        siblings were answered differently.
        """
        out = RolloutTree(self.tree.question, self.tree.prompt_ids, prompt_routes=self.tree.prompt_routes)
        moved = {ROOT: ROOT}
        # The turns of a chain are in order already, and a chain starts behind a turn of a chain with a lower number.
        for index, turn in sorted(enumerate(self.tree.turns), key=lambda item: item[1].chain):
            moved[index] = out.add(replace(turn, parent=moved[turn.parent]), merge=self.ground.merge)
        return out


class SampledExpansion(Expansion):
    """Base of the expansions that sample whole trajectories, `trajectories` of them at most in a tree."""

    def __init__(self, ground: Ground, *, trajectories: int) -> None:
        self.trajectories = trajectories
        self._ground = ground

    async def grow(self, question: Question, *, seed: int, session: str) -> RolloutTree:
        tree = RolloutTree(question, self._ground.environment.prompt(question))
        growth = Growth(tree, {ROOT: None}, self._ground, seed, session)
        engine = self._ground.engine
        engine.open(session, tokens=self.trajectories * self._ground.budgets.max_context_tokens)
        try:
            await self._expand(growth)
        finally:
            engine.release(session)
        return growth.settled()

    @abstractmethod
    async def _expand(self, growth: Growth) -> None:
        """Play all trajectories of one tree. Trunks have lower chain numbers than the forks behind them."""


async def together(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run coroutines at the same time; their results in order.

    The first exception cancels the others, waits for them, and is raised as it is.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
        return [task.result() for task in tasks]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
