"""Recipes: one file each for model, task, method and cluster, merged, overridden, validated when loaded.

    treeopsd train model=tiny task=factbook method=treeopsd cluster=cpu  objective.radius=0.3 seed=2
                   └────────── four YAML files of launch/recipes ─────┘  └── any key of the Recipe ──┘

A recipe file holds any sections of `Recipe`; later groups win over earlier ones (model, task, method, cluster), and
command-line overrides win over files. Unknown keys and values raise `RecipeError`, which names the key, the place it
came from and what is allowed.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from megatron_treeopsd.config import (
    BernoulliKL,
    Chains,
    Clipped,
    Demonstrations,
    EmbeddedEngine,
    InitializeThenExpand,
    Likelihood,
    Outcome,
    Recipe,
    RecipeError,
    Section,
    SGLangEngine,
    TreeBackup,
)

GROUPS = ("model", "task", "method", "cluster")
DEFAULTS = {"model": "tiny", "task": "factbook", "method": "treeopsd", "cluster": "cpu"}
RECIPES = Path(__file__).resolve().parents[1] / "launch" / "recipes"


def load_recipe(arguments: Sequence[str] = (), *, folder: Path = RECIPES) -> Recipe:
    """Build a `Recipe` from `key=value` words.

    `model=`, `task=`, `method=` and `cluster=` name a file of their group in `folder` (or a path to a YAML file);
    every other key is a dotted path into `Recipe`, its value read as YAML; `engine=NAME` stands for
    `engine.name=NAME`. Raises `RecipeError`.
    """
    choices = dict(DEFAULTS)
    overrides: dict[str, Any] = {}
    for word in arguments:
        key, separator, text = word.partition("=")
        if not separator or not key:
            raise RecipeError(f"{word!r} is not of the form key=value")
        if key in GROUPS:
            choices[key] = text
        else:
            key = "engine.name" if key == "engine" else key
            _set(overrides, key, _yaml_value(key, text))
    values: dict[str, Any] = {"method": Path(choices["method"]).stem}
    for group in GROUPS:
        _merge(values, _read_group(folder, group, choices[group]))
    _merge(values, overrides)
    if "run" not in values:
        task, seed = Path(choices["task"]).stem, values.get("seed", Recipe.model_fields["seed"].default)
        values["run"] = f"runs/{task}-{values['method']}-{seed}"
    return build_recipe(values)


def build_recipe(values: Mapping[str, Any]) -> Recipe:
    """Validate a nested mapping (as `load_recipe` merges it, or as a run folder's `recipe.yaml` holds it)."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeError("\n".join(dict.fromkeys(_explain(item) for item in error.errors()))) from None


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Write the resolved recipe as YAML; `read_recipe` reads it back equal."""
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))


def read_recipe(path: Path) -> Recipe:
    return build_recipe(_read_yaml(path))


def _read_group(folder: Path, group: str, choice: str) -> dict[str, Any]:
    path = Path(choice) if choice.endswith((".yaml", ".yml")) else folder / group / f"{choice}.yaml"
    if not path.is_file():
        known = sorted(file.stem for file in (folder / group).glob("*.yaml"))
        hint = difflib.get_close_matches(choice, known, n=1)
        raise RecipeError(
            f"{group}={choice}: there is no recipe {path}"
            + (f"; did you mean {group}={hint[0]}?" if hint else ".")
            + f" Known: {', '.join(known)}."
        )
    return _read_yaml(path)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise RecipeError(f"{path}: a recipe file must hold a mapping of sections")
    return values


def _yaml_value(key: str, text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"{key}={text}: the value is not valid YAML: {error}") from None
    if isinstance(value, str):  # YAML 1.1 reads 3e-4 as a string
        try:
            number = float(value)
        except ValueError:
            return value
        return number if math.isfinite(number) else value
    return value


def _merge(base: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Merge `new` into `base`. A section that changes its `name` is another strategy and replaces the old one."""
    for key, value in new.items():
        old = base.get(key)
        if (
            isinstance(old, dict)
            and isinstance(value, Mapping)
            and value.get("name", old.get("name")) == old.get("name")
        ):
            _merge(old, value)
        else:
            base[key] = dict(value) if isinstance(value, Mapping) else value


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise RecipeError(f"{key}: {parent} is a value, not a section")
    values[last] = value


def _explain(item: Any) -> str:
    """One validation error in plain words: key, what is wrong, what is allowed."""
    location = [str(part) for part in item["loc"] if not str(part).startswith("function-")]
    parts = [part for i, part in enumerate(location) if not (i == 1 and part in _TAGS and location[0] in _TAGGED)]
    key = ".".join(parts) or "recipe"
    kind = item["type"]
    if kind == "extra_forbidden":
        allowed = sorted(_annotation_at(location[:-1]).model_fields)
        hint = difflib.get_close_matches(location[-1], allowed, n=1)
        return (f"{key}: unknown key" + (f", did you mean {hint[0]}?" if hint else ".")
                + f" Allowed here: {', '.join(allowed)}.")  # fmt: skip
    if kind == "missing":
        return f"{key}: missing; set it in a recipe file or as {key}=VALUE"
    if kind == "union_tag_invalid":
        return f"{key}.name: {item['ctx']['tag']!r} is unknown; allowed: {item['ctx']['expected_tags']}"
    if kind == "union_tag_not_found":
        return f"{key}.name: missing; it says which {key} to use"
    if kind in ("model_type", "model_attributes_type"):
        return f"{key}: is a section, set its keys as {key}.KEY=VALUE (got {item['input']!r})"
    *inside, last = location or [""]
    if last == "[key]":
        return f"{'.'.join(parts[:-2])}: {item['msg']} as a key (got {item['input']!r})"
    choices = get_args(_annotation_at(inside)) if get_origin(_annotation_at(inside)) in (Union, UnionType) else ()
    if last not in _TAGS and choices and NoneType not in choices:  # one error a choice, its name put behind the key
        return f"{'.'.join(parts[:-1])}: {item['input']!r} is none of: {', '.join(map(_choice, choices))}"
    message = item["msg"].removeprefix("Value error, ")
    return f"{key}: {message}" + (f" (got {item['input']!r})" if not isinstance(item["input"], (dict, Section)) else "")


_TAGGED = ("expansion", "credit", "objective", "engine")
_VARIANTS: tuple[type[Section], ...] = (
    Chains, InitializeThenExpand, Demonstrations, Outcome, TreeBackup, BernoulliKL, Clipped, Likelihood,
    EmbeddedEngine, SGLangEngine,
)  # fmt: skip
_TAGS = {variant.model_fields["name"].annotation.__args__[0]: variant for variant in _VARIANTS}  # type: ignore[union-attr]


def _annotation_at(location: Sequence[str]) -> Any:
    """The type that `Recipe` declares at `location`, or None where that is inside a plain value."""
    found: Any = Recipe
    for part in location:
        if part in _TAGS:
            found = _TAGS[part]
        elif isinstance(found, type) and issubclass(found, BaseModel) and part in found.model_fields:
            found = found.model_fields[part].annotation
        else:
            return None
    return found


def _choice(annotation: Any) -> str:
    """One member of a union in words: its literals, or its type and bounds."""
    if get_origin(annotation) is Literal:
        return ", ".join(map(repr, get_args(annotation)))
    schema = TypeAdapter(annotation).json_schema()
    words = {"exclusiveMinimum": "above", "minimum": "from", "exclusiveMaximum": "below", "maximum": "up to"}
    return " ".join([f"a {schema['type']}", *(f"{words[key]} {schema[key]:g}" for key in words if key in schema)])
