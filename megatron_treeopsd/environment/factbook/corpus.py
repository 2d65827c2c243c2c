"""Countries to passages: one sentence a fact, and long texts cut to a few words as distractors."""

from __future__ import annotations

import re
from collections.abc import Iterable

from megatron_treeopsd.environment.factbook.text import first_words
from megatron_treeopsd.environment.factbook.world import Country
from megatron_treeopsd.environment.retrieval.base import Passage

SECTION_WORDS = 12
"""Words of a long text, its heading included."""

_FACT = re.compile(r"The (.+?) is (.+)\.")


def build_passages(world: Iterable[Country], *, near_facts: bool) -> list[Passage]:
    """All passages: facts first, then distractors. With `near_facts`, facts that are easily mistaken for others too."""
    passages = []
    for country in world:
        passages += [_fact(country.name, field, field, value) for field, value in country.facts.items()]
        if near_facts:
            # naming the first keeps this passage longer than the one it competes with, which BM25 then ranks first
            passages += [
                _fact(country.name, field, f"{field}, after {country.facts[field.removeprefix('second ')]},", value)
                for field, value in country.near_facts.items()
            ]
    for country in world:
        passages += [_section(country.name, heading, text) for heading, text in country.sections.items()]
    return passages


def passage_id(country: str, field: str) -> str:
    """Id of the passage that states a fact."""
    return f"{country}: {field}"


def read_fact(passage: Passage) -> str | None:
    """The value that a passage states, None if it is not a fact."""
    match = _FACT.fullmatch(passage.text)
    return match.group(2) if match else None


def _fact(country: str, field: str, phrase: str, value: str) -> Passage:
    return Passage(passage_id(country, field), country, f"The {phrase} is {value}.")


def _section(country: str, heading: str, text: str) -> Passage:
    return Passage(
        f"{country}: {heading} (text)", country, first_words(f"{heading.capitalize()}: {text}", SECTION_WORDS)
    )
