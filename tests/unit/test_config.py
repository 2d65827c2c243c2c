"""Recipes: merging, overrides, and errors that say which key is wrong and what is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from megatron_treeopsd.config import BernoulliKL, Chains, Clipped, InitializeThenExpand, Recipe, RecipeError
from megatron_treeopsd.recipes import GROUPS, RECIPES, build_recipe, load_recipe, read_recipe, save_recipe

pytestmark = pytest.mark.fast

RECIPE_FILES = sorted(RECIPES.glob("*/*.yaml"))


def recipe(*words: str) -> Recipe:
    return load_recipe(["steps=1", *words])


def error_of(*words: str) -> str:
    with pytest.raises(RecipeError) as caught:
        recipe(*words)
    return str(caught.value)


# --------------------------------------------------------------------------------------------------- files of the tree
def test_every_group_has_recipes() -> None:
    assert {path.parent.name for path in RECIPE_FILES} == set(GROUPS)


@pytest.mark.parametrize("path", RECIPE_FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_recipe_file_loads_and_is_read_back_equal(path: Path, tmp_path: Path) -> None:
    loaded = recipe(f"{path.parent.name}={path.stem}")
    save_recipe(loaded, tmp_path / "recipe.yaml")
    assert read_recipe(tmp_path / "recipe.yaml") == loaded


@pytest.mark.parametrize("path", RECIPE_FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_recipe_file_says_what_it_is_for(path: Path) -> None:
    assert path.read_text().startswith("# ")


def test_a_recipe_file_sets_what_it_says() -> None:
    """Every leaf value of a method's file arrives in the recipe."""
    for path in (RECIPES / "method").glob("*.yaml"):
        loaded = load_recipe([f"method={path.stem}", "budget=1"]).model_dump(mode="json")
        for key, value in _leaves(yaml.safe_load(path.read_text())):
            assert dict(_leaves(loaded))[key] == value, f"{path.name}: {key}"


def _leaves(values: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# ------------------------------------------------------------------------------------------------ choices and overrides
def test_no_words_need_an_end() -> None:
    with pytest.raises(RecipeError, match="set steps=N or budget=SECONDS"):
        load_recipe()


def test_overrides_win_over_files_and_types_follow_the_schema() -> None:
    loaded = recipe(
        "method=treeopsd", "expansion.trunks=7", "model.dtype=bfloat16", "run=runs/x", "budget=30", "seed=4"
    )
    assert isinstance(loaded.expansion, InitializeThenExpand)
    assert (loaded.expansion.trunks, loaded.model.dtype, loaded.run) == (7, "bfloat16", Path("runs/x"))
    assert (loaded.budget, loaded.seed, loaded.method) == (30.0, 4, "treeopsd")
    unchanged = recipe("method=treeopsd").expansion
    assert loaded.expansion == unchanged.model_copy(update={"trunks": 7}), "the rest of the section must stay"


def test_the_last_of_two_equal_words_wins() -> None:
    assert recipe("seed=3", "seed=4").seed == 4
    assert recipe("method=grpo", "method=gspo").method == "gspo"


def test_run_folder_names_task_method_and_seed() -> None:
    assert recipe("method=grpo", "seed=7").run == Path("runs/factbook-grpo-7")


def test_later_groups_win_over_earlier_ones(tmp_path: Path) -> None:
    method = tmp_path / "mine.yaml"
    method.write_text((RECIPES / "method" / "grpo.yaml").read_text() + "task: {max_turns: 9}\n")
    loaded = recipe(f"method={method}")
    assert loaded.task.max_turns == 9
    assert loaded.task.max_turn_tokens == recipe("method=grpo").task.max_turn_tokens
    assert loaded.method == "mine"


def test_another_strategy_on_the_command_line_replaces_the_whole_section() -> None:
    """The old strategy's keys would be unknown to the new one."""
    assert isinstance(recipe("method=treeopsd").objective, BernoulliKL)
    loaded = recipe("method=treeopsd", "objective.name=clipped", "objective.clip_low=0.1", "expansion.name=chains")
    assert loaded.objective == Clipped(name="clipped", clip_low=0.1)
    assert loaded.expansion == Chains(name="chains")


def test_the_same_strategy_on_the_command_line_keeps_its_keys() -> None:
    before = recipe("method=gspo").objective
    assert recipe("method=gspo", "objective.name=clipped").objective == before


def test_yaml_1_1_reads_exponents_without_a_point_as_text_but_recipes_do_not() -> None:
    assert yaml.safe_load("3e-4") == "3e-4", "the trap is gone: the special case in recipes.py can go too"
    assert recipe("optimizer.lr=3e-4").optimizer.lr == 3e-4
    objective = recipe("method=treeopsd", "objective.kappa=2e0").objective
    assert isinstance(objective, BernoulliKL)
    assert objective.kappa == 2.0


def test_exponents_in_recipe_files(tmp_path: Path) -> None:
    cluster = tmp_path / "c.yaml"
    cluster.write_text("optimizer: {lr: 1e-3}\nupdate: {epochs: 3}\n")
    assert recipe(f"cluster={cluster}").optimizer.lr == 1e-3


@pytest.mark.parametrize("text", ["nan", "inf", ".nan", ".inf", "-inf", "1e999"])
def test_numbers_that_are_not_finite_are_refused(text: str) -> None:
    assert "optimizer.lr" in error_of(f"optimizer.lr={text}")


def test_null_unsets_an_optional_value() -> None:
    assert recipe("task.hop_weights=null").task.hop_weights is None


def test_one_entry_of_a_mapping_can_be_set() -> None:
    weights = recipe("task.hop_weights={1: 0.5, 2: 0.5}", "task.hop_weights.2=0.25").task.hop_weights
    assert weights is not None
    assert (weights[1], weights[2]) == (0.5, 0.25)


def test_leaves_of_an_expansion() -> None:
    assert InitializeThenExpand(name="initialize_then_expand", trunks=4, forks=2).leaves == 12
    assert Chains(name="chains", chains=8).leaves == 8


def test_recipes_cannot_be_changed_after_they_were_checked() -> None:
    with pytest.raises(ValueError, match="frozen"):
        recipe().seed = 3  # type: ignore[misc]


# --------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("method=treopsd", ["method=treopsd", "did you mean method=treeopsd", "Known:", "grpo"]),
        ("task=nowhere/else.yaml", ["task=nowhere/else.yaml", "there is no recipe"]),
        ("seeed=1", ["seeed", "unknown key", "did you mean seed?", "Allowed here:"]),
        ("layout.cpp=2", ["layout.cpp", "unknown key", "tp"]),
        ("objective.radus=0.1", ["objective.radus", "did you mean radius?", "kappa"]),
        ("objective.name=hinge", ["objective.name", "'hinge'", "'bernoulli_kl'", "'clipped'", "'likelihood'"]),
        ("objective=clipped", ["objective", "section", "objective.KEY=VALUE", "'clipped'"]),
        ("task.retrieval=bm25", ["task.retrieval", "section", "task.retrieval.KEY=VALUE"]),
        ("objective.kappa=foo", ["objective.kappa: 'foo'", "'sqrt_leaves'", "'max'", "a number above 0"]),
        ("objective.kappa=-1", ["objective.kappa: -1", "a number above 0"]),
        ("objective.radius=0.5", ["objective.radius", "less than 0.5", "0.5"]),
        ("objective.ratio=median", ["objective.ratio", "'sum'", "'mean'", "'sqrt'", "'median'"]),
        ("model.dtype=float16", ["model.dtype", "'float32'", "'bfloat16'", "'float16'"]),
        ("layout.tp=0", ["layout.tp", "greater than or equal to 1", "0"]),
        ("layout.tp=two", ["layout.tp", "integer", "'two'"]),
        ("steps=1.5", ["steps", "integer", "1.5"]),
        ("resume=maybe", ["resume", "boolean", "'maybe'"]),
        ("task.hop_weights={one: 1.0}", ["task.hop_weights", "integer", "'one'", "key"]),
        ("task.hop_weights={1: many}", ["task.hop_weights.1", "number", "'many'"]),
        ("update.mini_batches=99", ["update.mini_batches=99", "update.questions_per_step=16"]),
        ("seed.x=1", ["seed", "integer"]),
        ("run=[1", ["run=[1", "not valid YAML"]),
        ("steps", ["'steps'", "key=value"]),
        ("=3", ["'=3'", "key=value"]),
    ],
)
def test_errors_name_the_key_and_what_is_allowed(word: str, says: list[str]) -> None:
    message = error_of(word)
    assert [part for part in says if part not in message] == [], message
    assert "function-" not in message
    assert "constrained-" not in message


def test_a_cache_without_room_for_a_trajectory_is_refused() -> None:
    message = error_of("engine=sglang", "engine.cache_tokens=300")
    assert "engine.cache_tokens=300 cannot hold one trajectory of task.max_context_tokens=320" in message


def test_a_failed_union_is_one_line() -> None:
    assert error_of("objective.kappa=foo").count("\n") == 0


def test_every_mistake_is_reported_at_once() -> None:
    message = error_of("layout.tp=0", "seed=-1", "model.dtype=int8")
    assert [line.partition(":")[0] for line in message.splitlines()] == ["seed", "model.dtype", "layout.tp"]


def test_rules_across_keys() -> None:
    words = ("method=treeopsd", "objective.teacher=affine_odds")
    assert "objective: radius must be below 0.25" in error_of(*words, "objective.radius=0.3")
    recipe(*words, "objective.radius=0.2")
    assert "mixture_weight" in error_of("method=treeopsd", "objective.mixture_weight=true")
    with pytest.raises(RecipeError, match=r"optimizer\.schedule=cosine needs to know its end"):
        load_recipe(["budget=10", "optimizer.schedule=cosine"])


def test_an_override_below_a_value_names_the_value() -> None:
    assert "seed is a value, not a section" in error_of("seed=1", "seed.x=1")


def test_missing_keys_say_how_to_set_them() -> None:
    values = recipe().model_dump(mode="json")
    del values["model"]["checkpoint"]
    del values["objective"]["name"]
    with pytest.raises(RecipeError) as caught:
        build_recipe(values)
    assert "model.checkpoint: missing; set it in a recipe file or as model.checkpoint=VALUE" in str(caught.value)
    assert "objective.name: missing" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [("a: [", "not valid YAML"), ("- a\n- b\n", "mapping of sections"), ("", "mapping of sections")],
)
def test_broken_recipe_files_are_named(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    message = error_of(f"method={path}")
    assert str(path) in message
    assert says in message
