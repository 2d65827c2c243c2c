"""Multi-hop questions as chains of facts, split by country.

A chain is walked in the order in which an agent can look it up. The question names only where it starts:

    What is the currency of the export partner of the country whose capital is Bern?

    ("inverse", "capital",        "Bern",        "Switzerland")
    ("forward", "export partner", "Switzerland", "Germany")
    ("forward", "currency",       "Germany",     "euros")          3 hops

Splits: the answer of a test (dev) question is looked up in a test (dev) country; a training chain touches neither, so
nothing that a test question asks for can have been learnt by heart.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_treeopsd.environment.factbook.world import ANCHORS, FINALS, RELATIONS, Country, Facts
from megatron_treeopsd.tree import Question

SPLIT_SEED = 0
TEST_SHARE, DEV_SHARE = 0.25, 0.05
"""Shares of the countries."""

SPLITS = ("train", "dev", "test")


class Hop(NamedTuple):
    """One fact on the way: `subject` is what the query starts from, `value` what it finds.

    forward: `value` is the field of the country `subject`; inverse: `value` is the country whose field is `subject`.
    """

    kind: Literal["forward", "inverse"]
    field: str
    subject: str
    value: str

    @property
    def query(self) -> str:
        """The search that finds the fact."""
        return f"{self.field} {self.subject}"

    @property
    def country(self) -> str:
        """The country that the fact is about."""
        return self.value if self.kind == "inverse" else self.subject


Chain = tuple[Hop, ...]


@dataclass(frozen=True, slots=True)
class Composition:
    """Which chains become questions.

    Attributes:
        enumerate_relations: every chain with so many relations is taken.
        walks: random chains drawn for every country to start from.
        walk_relations: least and greatest number of relations of a drawn chain.
        min_hops: shorter drawn chains are left out.
    """

    enumerate_relations: tuple[int, ...] = ()
    walks: int = 0
    walk_relations: tuple[int, int] = (0, 0)
    min_hops: int = 1


def split_countries(names: Sequence[str]) -> dict[str, str]:
    """Split of every country, the same for every task made of the same countries."""
    shuffled = sorted(names)
    random.Random(SPLIT_SEED).shuffle(shuffled)
    test, dev = round(len(shuffled) * TEST_SHARE), round(len(shuffled) * DEV_SHARE)
    return {name: "test" if i < test else "dev" if i < test + dev else "train" for i, name in enumerate(shuffled)}


def build_questions(world: Sequence[Country], composition: Composition, *, prefix: str) -> dict[str, list[Question]]:
    """Questions of every split in a fixed random order; ids are `prefix-split-number`."""
    hops = _Map.draw(Facts.index({country.name: country.facts for country in world}))
    splits = split_countries([country.name for country in world])
    aliases = {(country.name, field): names for country in world for field, names in country.aliases.items()}
    found: dict[str, dict[str, Chain]] = {split: {} for split in SPLITS}
    for country in world:
        for chain in _chains(country.name, hops, composition):
            split = _split(chain, splits)
            if split and not _trivial(chain):
                found[split].setdefault(question_text(chain), chain)
    questions: dict[str, list[Question]] = {}
    for split, chains in found.items():
        texts = sorted(chains)
        random.Random(f"{SPLIT_SEED} {split}").shuffle(texts)
        questions[split] = [
            _question(f"{prefix}-{split}-{number:05d}", text, chains[text], aliases)
            for number, text in enumerate(texts)
        ]
    return questions


def question_text(chain: Chain) -> str:
    """The question that a chain answers, from its last hop back to where it starts."""
    parts = [
        f"the country whose {hop.field} is {hop.subject}" if hop.kind == "inverse" else f"the {hop.field}"
        for hop in reversed(chain)
    ]
    if chain[0].kind == "forward":
        parts.append(chain[0].subject)
    return f"What is {' of '.join(parts)}?"


def chain_of(question: Question) -> Chain:
    """The chain of a question that `build_questions` made. Raises `ValueError` naming the question if it has none."""
    if "chain" not in question.metadata:
        raise ValueError(f"question {question.id} has no chain of facts in its metadata; only Factbook questions have")
    return tuple(Hop(*hop) for hop in question.metadata["chain"])


@dataclass(frozen=True, slots=True)
class _Map:
    """The hops that start at each country: to another country, to an answer, and from an anchor to the country."""

    relations: dict[str, list[Hop]]
    finals: dict[str, list[Hop]]
    anchors: dict[str, list[Hop]]

    @classmethod
    def draw(cls, facts: Facts) -> _Map:
        relations, finals, anchors = {}, {}, {}
        for name, values in facts.by_country.items():
            relations[name] = [
                Hop("forward", field, name, values[field])
                for field in RELATIONS
                if field in values and values[field] in facts.by_country
            ]
            finals[name] = [Hop("forward", field, name, values[field]) for field in FINALS if field in values]
            anchors[name] = [
                Hop("inverse", field, values[field], name)
                for field in ANCHORS
                if field in values and facts.country(field, values[field]) == name
            ]
        return cls(relations, finals, anchors)


def _chains(start: str, hops: _Map, composition: Composition) -> Iterator[Chain]:
    """All chains that start at a country, named by itself or by one of its anchors."""
    starts: list[Chain] = [(), *((hop,) for hop in hops.anchors[start])]
    for opening in starts:
        for relations in composition.enumerate_relations:
            for chain in _extensions(opening, start, hops, relations):
                yield from ((*chain, hop) for hop in hops.finals[_end(chain, start)])
    draw = random.Random(f"{SPLIT_SEED} {start}")
    for _ in range(composition.walks):
        drawn = _walk(draw.choice(starts), start, hops, draw.randint(*composition.walk_relations), draw)
        if drawn is not None and len(drawn) >= composition.min_hops:
            yield drawn


def _extensions(chain: Chain, start: str, hops: _Map, relations: int) -> Iterator[Chain]:
    if relations == 0:
        yield chain
        return
    for hop in hops.relations[_end(chain, start)]:
        yield from _extensions((*chain, hop), start, hops, relations - 1)


def _walk(chain: Chain, start: str, hops: _Map, relations: int, draw: random.Random) -> Chain | None:
    """A random chain that visits no country twice; None where the way ends early."""
    visited = {start}
    for _ in range(relations):
        choices = [hop for hop in hops.relations[_end(chain, start)] if hop.value not in visited]
        if not choices:
            return None
        chain += (draw.choice(choices),)
        visited.add(chain[-1].value)
    finals = hops.finals[_end(chain, start)]
    return (*chain, draw.choice(finals)) if finals else None


def _end(chain: Chain, start: str) -> str:
    return chain[-1].value if chain else start


def _split(chain: Chain, splits: dict[str, str]) -> str | None:
    """Split of a chain; None for one that may be neither trained on nor asked for."""
    last = splits[chain[-1].country]
    if last != "train":
        return last
    return "train" if all(splits[hop.country] == "train" for hop in chain) else None


def _trivial(chain: Chain) -> bool:
    """Whether the answer stands in the question or is met before the last hop, or a country comes twice."""
    visited = [hop.value for hop in chain[:-1]]
    if chain[0].kind == "forward":
        visited.insert(0, chain[0].subject)
    known = {name.lower() for name in (*visited, chain[0].subject)}
    return len(set(visited)) < len(visited) or chain[-1].value.lower() in known


def _question(id: str, text: str, chain: Chain, aliases: dict[tuple[str, str], tuple[str, ...]]) -> Question:
    last = chain[-1]
    answers = (last.value, *aliases.get((last.country, last.field), ()))
    return Question(id, text, answers, {"hops": len(chain), "chain": [list(hop) for hop in chain]})
