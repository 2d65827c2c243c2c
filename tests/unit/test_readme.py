"""What the README says exists and works: links, scripts, recipes, commands, the quoted error."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from megatron_treeopsd import cli
from megatron_treeopsd.config import RecipeError
from megatron_treeopsd.recipes import load_recipe

pytestmark = pytest.mark.fast

REPOSITORY = Path(__file__).resolve().parents[2]
README = re.sub(r"<!--.*?-->", "", (REPOSITORY / "README.md").read_text(), flags=re.DOTALL)
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+)\)", README))))
def test_links_lead_somewhere(target: str) -> None:
    assert (REPOSITORY / target).exists()


def test_the_map_names_folders_that_exist() -> None:
    rows = re.findall(r"^\| (`.*?) \|", README.split("## How it works")[1].split("##")[0], flags=re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`([\w/.]+)`", row)]
    assert len(names) > 8
    assert [name for name in names if not (REPOSITORY / "megatron_treeopsd" / name).exists()] == []


@pytest.mark.parametrize("word", sorted(set(re.findall(r"`([a-z_]+\.[a-z_]+=[\w.]+)`", README))))
def test_keys_in_the_text_can_be_set(word: str) -> None:
    load_recipe([word, "steps=1", *(["engine=sglang"] if word.startswith("engine.") else [])])


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 10


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_are_understood(command: list[str]) -> None:
    """Scripts exist and may be executed, commands parse, and the recipes that they name load."""
    program, *words = [word for word in command if not re.match(r"[A-Z_]+=", word)]
    if program.startswith(("./", ".venv/bin/python")):
        script = REPOSITORY / (words.pop(0) if "python" in program else program)
        assert script.is_file()
        assert "python" in program or os.access(script, os.X_OK)
        words = words[1:] if script.name == "local.sh" else []
    else:
        assert program == "treeopsd"
    if words:
        arguments = cli._parser().parse_args(words)
        if words[0] == "train":
            load_recipe(arguments.recipe)


def test_the_quoted_error_is_what_is_said() -> None:
    quoted = re.search(r"\$ treeopsd train (.*)\n    error: (.*)\n", README)
    assert quoted is not None
    with pytest.raises(RecipeError) as caught:
        load_recipe(quoted[1].split())
    assert str(caught.value) == quoted[2]


def test_every_method_recipe_is_mentioned() -> None:
    methods = [path.stem for path in (REPOSITORY / "launch" / "recipes" / "method").glob("*.yaml")]
    assert [name for name in methods if f"`{name}`" not in README] == []
