"""A scripted agent that walks a question's chain, and errs as often as it is told to.

Supervised learning on its trajectories gives a policy that can search but has room to improve: it sends lazy queries,
takes the wrong passage for the right one, and stops too early.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_treeopsd import config
from megatron_treeopsd.environment.factbook.corpus import read_fact
from megatron_treeopsd.environment.factbook.questions import Chain, Hop
from megatron_treeopsd.environment.factbook.world import FINALS, RELATIONS, Facts
from megatron_treeopsd.environment.retrieval.base import Passage

ONLY_ENTITY, ONLY_FIELD = 0.3, 0.3
"""Shares of faulty queries that name just the entity, or just the field; the others name a wrong field."""

SKIPS_AHEAD = 0.6
"""Share of the queries with a wrong field that name the field of the next hop."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """The searches of one trajectory in order, and the answer behind them."""

    queries: tuple[str, ...]
    answer: str


class Demonstrator:
    """Plays questions.

    Args:
        facts: what the agent knows about the right way.
        search: the search tool, as the policy will have it.
        settings: how often the agent errs, notices that it did, and stops too early.
    """

    def __init__(
        self, facts: Facts, search: Callable[[str], Sequence[Passage]], settings: config.Demonstrations
    ) -> None:
        self._facts = facts
        self._search = search
        self._settings = settings

    def play(self, chain: Chain, *, noise: float, max_turns: int, draw: random.Random) -> Demonstration:
        """One trajectory of at most `max_turns` turns; the last turn is the answer.

        Without noise the queries are those of the chain and the answer is right, given `max_turns > len(chain)`.
        """
        settings = self._settings
        queries: list[str] = []
        entity, hop = chain[0].subject, 0
        while len(queries) < max_turns - 1:
            errs = draw.random() < noise * (1 - settings.correct_hop)
            queries.append(self._faulty_query(chain, hop, entity, draw) if errs else f"{chain[hop].field} {entity}")
            found = None if errs else self._look_up(chain[hop], entity)
            if found is None:
                if draw.random() < settings.retry and len(queries) < max_turns - 1:
                    continue
                found = self._take_first(queries[-1], chain[hop], entity)
            entity, hop = found, hop + 1
            if hop == len(chain) or draw.random() < noise * settings.early_stop:
                break
        return Demonstration(tuple(queries), entity)

    def _look_up(self, hop: Hop, entity: str) -> str | None:
        if hop.kind == "inverse":
            return self._facts.country(hop.field, entity)
        return self._facts.value(entity, hop.field)

    def _faulty_query(self, chain: Chain, hop: int, entity: str, draw: random.Random) -> str:
        kind = draw.random()
        if kind < ONLY_ENTITY:
            return entity
        if kind < ONLY_ENTITY + ONLY_FIELD:
            return chain[hop].field
        if hop + 1 < len(chain) and draw.random() < SKIPS_AHEAD:
            return f"{chain[hop + 1].field} {entity}"
        return f"{draw.choice(FINALS + RELATIONS)} {entity}"

    def _take_first(self, query: str, hop: Hop, entity: str) -> str:
        """What an agent reads that takes the first passage for the right one."""
        passages = self._search(query)
        if not passages:
            return entity
        value = None if hop.kind == "inverse" else read_fact(passages[0])
        return value or passages[0].title
