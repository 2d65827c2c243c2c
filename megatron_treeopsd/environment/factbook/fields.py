"""How a few words are cut out of each raw Factbook entry: `Dufourspitze on Monte Rosa 4,634 m` gives `Dufourspitze`.

Every reader takes the plain text of an entry and returns the part that holds the value, or an empty string where that
part cannot be told for certain. `clean` then makes the value of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from megatron_treeopsd.environment.factbook.text import name_case, words

_PHRASE_END = re.compile(r"[;(\[/]|, note|note:| - | -?\d| or | on ")
_EMPTY = frozenset({"none", "na", "n", "a", "unknown", "vacant"})
_UNUSABLE = frozenset({"no", "unnamed", "administered", "previous"})
_NOT_AN_ALIAS = frozenset({"Tenerife"})  # the island that a peak stands on
_TITLES = frozenset({
    "acting", "affairs", "amir", "and", "capt.", "co-prince", "col.", "commission", "duke", "dr.", "emir", "emperor",
    "gen.", "general", "grand", "interim", "king", "leader", "lord", "minister", "pope", "president", "prime",
    "prince", "princess", "queen", "sir", "sr.", "state", "sultan", "supreme", "taliban", "transition", "transitional",
})  # fmt: skip


def clean(text: str, max_words: int) -> str | None:
    """Words and numbers of `text` without punctuation; None unless there are 1 to `max_words` meaningful ones."""
    kept = [word for word in words(text) if word[0].isalnum() and word.isascii()]
    if not 1 <= len(kept) <= max_words or kept[0].lower() in _UNUSABLE:
        return None
    value = " ".join(kept)
    return None if value.lower() in _EMPTY else value


# -------------------------------------------------------------------------------------------------------------- values
def phrase(text: str) -> str:
    """The first phrase."""
    return _PHRASE_END.split(text, maxsplit=1)[0]


def listed(text: str) -> str:
    """The first item of a list without its percentage: `Roman Catholic 34.4%, Protestant` gives `Roman Catholic`."""
    return re.split(r"[,;(]", re.sub(r"[\d.<]+%", "", text), maxsplit=1)[0]


def capital(text: str) -> str:
    """`Chisinau in Romanian (Kishinev in Russian)` gives `Chisinau`."""
    return re.sub(r" in \w+ *$", "", phrase(text.split(",")[0]))


def currency(text: str) -> str:
    """`Swiss francs (CHF) per US dollar -` gives `Swiss francs`."""
    return re.split(r"\(| per US", text, maxsplit=1)[0]


def anthem(text: str) -> str:
    """The English title, which stands in parentheses behind one in another language."""
    translation = re.search(r"\(([^()]+)\)", text)
    return translation.group(1) if translation else text


def lyricist(text: str) -> str:
    return name_case(re.split(r"/|,| and |\[", text, maxsplit=1)[0])


def holiday(text: str) -> str:
    return name_case(listed(text))


def person(text: str) -> str:
    """The name behind the titles; empty where it cannot be told from the office (no surname in upper case)."""
    names = re.split(r"[(;,]", text, maxsplit=1)[0].split()
    while names and names[0].lower() in _TITLES:
        del names[0]
    if "of" in names:
        names = names[: names.index("of")]
    return name_case(" ".join(names)) if any(re.search(r"[A-Z]{2}", name) for name in names) else ""


def year(text: str) -> str:
    found = re.search(r"\b(1\d{3}|20[0-2]\d)\b", text)
    return found.group() if found else ""


def city(text: str, *, rank: int) -> str:
    """The city of the given rank by population: `441,000 BERN (capital), 1.432 million Zurich` has Zurich first."""
    sized = [
        (float(number.strip(",.").replace(",", "")) * (1e6 if million else 1), name)
        for number, million, name in re.findall(r"(\d[\d.,]*)( million)? ([A-Z][^\d(;,]+)", text)
    ]
    sized.sort(key=lambda item: -item[0])
    return name_case(sized[rank][1]) if rank < len(sized) else ""


# ------------------------------------------------------------------------------------------------------------- aliases
def parenthesised(text: str) -> list[str]:
    """Other names in parentheses: `Baku (Baki, Baky)`, `Parliament (Eduskunta - Riksdagen)`."""
    inside = re.findall(r"\(([^()]*)\)", text.split(";")[0])
    parts = [part for group in inside for part in re.split(r",|/| - | or ", group)]
    parts = [re.split(r" is the | in ", part)[0].strip().removeprefix("or ") for part in parts]
    explains = re.compile(r" for | is a ")
    return [
        part for part in parts if re.match(r"[A-Z]", part) and not explains.search(part) and part not in _NOT_AN_ALIAS
    ]


def other_capitals(text: str) -> list[str]:
    """`Pretoria (administrative capital); Cape Town (legislative capital)` also accepts Cape Town."""
    return parenthesised(text) + re.findall(
        r"[;,] ([A-Z][\w' -]+) \([^()]*(?:capital|seat of government)[^()]*\)", text
    )


def currency_names(text: str) -> list[str]:
    """The singular and the code: `Swiss francs (CHF)` also accepts `Swiss franc` and `CHF`."""
    return [currency(text).strip().removesuffix("s"), *re.findall(r"\(([A-Z]{3})\)", text)]


def quoted(text: str) -> list[str]:
    return re.findall(r'"([^"]+)"', text)


def no_aliases(text: str) -> list[str]:
    return []


@dataclass(frozen=True, slots=True)
class Field:
    """Where a fact stands in a Factbook record, and how its value and other names for it are read."""

    name: str
    path: tuple[str, ...]
    value: Callable[[str], str] = phrase
    aliases: Callable[[str], list[str]] = no_aliases
    max_words: int = 5


_CITIES = ("People and Society", "Major urban areas - population")

FIELDS = (
    Field("capital", ("Government", "Capital", "name"), capital, other_capitals),
    Field("highest point", ("Geography", "Elevation", "highest point"), phrase, parenthesised),
    Field("lowest point", ("Geography", "Elevation", "lowest point"), phrase, parenthesised),
    Field("currency", ("Economy", "Exchange rates", "Currency"), currency, currency_names),
    Field("nationality", ("People and Society", "Nationality", "adjective")),
    Field("anthem", ("Government", "National anthem(s)", "title"), anthem, quoted, max_words=7),
    Field("government type", ("Government", "Government type")),
    Field("national symbol", ("Government", "National symbol(s)"), listed),
    Field("legislature", ("Government", "Legislative branch", "legislature name"), phrase, parenthesised),
    Field("independence year", ("Government", "Independence"), year),
    Field("chief of state", ("Government", "Executive branch", "chief of state"), person),
    Field("national holiday", ("Government", "National holiday"), holiday),
    Field("largest city", _CITIES, partial(city, rank=0)),
    Field("aircraft prefix", ("Transportation", "Civil aircraft registration country code prefix"), max_words=2),
    Field("anthem lyricist", ("Government", "National anthem(s)", "lyrics/music"), lyricist, max_words=4),
    Field("main industry", ("Economy", "Industries"), listed, max_words=3),
    Field("main crop", ("Economy", "Agricultural products"), listed, max_words=3),
    Field("main religion", ("People and Society", "Religions"), listed, max_words=3),
    Field("main language", ("People and Society", "Languages"), listed, max_words=3),
)
"""Facts of a country that are not about another country."""

NEAR_FIELDS = (Field("second largest city", _CITIES, partial(city, rank=1)),)
"""Facts that are easily mistaken for others."""

SECTIONS = (
    ("Geography", "Location"), ("Geography", "Climate"), ("Geography", "Terrain"), ("Geography", "Natural resources"),
    ("Economy", "Industries"), ("Economy", "Exports - commodities"), ("Geography", "Natural hazards"),
    ("Government", "Country name", "etymology"), ("Government", "Flag"), ("Economy", "Exports - partners"),
    ("Economy", "Imports - partners"), ("Government", "Legal system"), ("Geography", "Area - comparative"),
)  # fmt: skip
"""Long texts that become passages nobody asks for."""
