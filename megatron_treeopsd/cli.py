"""`treeopsd`: the command line. Each command says what it does, what it writes, and what to run next."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_treeopsd.config import Recipe, RecipeError
from megatron_treeopsd.convert.cli import add_parser as add_convert
from megatron_treeopsd.recipes import GROUPS, RECIPES, load_recipe

DESCRIPTION = """\
Train search agents by reinforcement learning on tree rollouts.

A run is a recipe: a model, a task, a method and a cluster (files in launch/recipes), and any key of it
set on the command line:

  treeopsd prepare task=factbook                          make the data folder of a task
  treeopsd train method=treeopsd seed=1 budget=120        train for 120 seconds (training clock)
  treeopsd train method=grpo update.epochs=1 steps=50     another method, one key changed, 50 rollout batches
  treeopsd train method=grpo steps=50 --dry-run           print the resolved recipe and plan; start nothing
  treeopsd train ... resume=true                          continue a run folder from its last checkpoint
  treeopsd show runs/factbook-treeopsd-1                  print a sampled tree with credits and targets
  treeopsd report runs/factbook-treeopsd-1                write report.html again

Several processes: ./launch/local.sh 2 train layout.tp=2 ... (torchrun on this machine).
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 done, 2 a mistake in what was asked, 1 anything else that failed."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], None] = arguments.command
    try:
        command(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        return _report(error)
    return 0


def _report(error: Exception) -> int:
    """Say what went wrong: mistakes of the user in plain words, anything else with the whole traceback."""
    from megatron_treeopsd.errors import is_user_error

    where = f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    if is_user_error(error) and "TREEOPSD_TRACEBACK" not in os.environ:
        print(f"{where}error: {error}", file=sys.stderr, flush=True)
        return 2
    text = "".join(traceback.format_exception(error))
    print("".join(f"{where}{line}" for line in text.splitlines(keepends=True)), file=sys.stderr, flush=True)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="treeopsd", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = _add(commands, "train", _train, "train a policy; writes a run folder")
    train.add_argument("--dry-run", action="store_true", help="print the resolved recipe and the plan, start nothing")
    train.epilog = _recipe_help()
    _words(train)

    prepare = _add(commands, "prepare", _prepare, "make the data folder of a task (task.data)")
    prepare.add_argument("--force", action="store_true", help="make it again if it exists")
    _words(prepare)

    create = _add(commands, "create-policy", _create_policy, "write a fresh random tiny policy in Hugging Face format")
    create.add_argument("destination", type=Path)
    create.add_argument("--seed", type=int, default=0)
    _words(create)

    export = _add(commands, "export", _export, "write the last checkpoint of a run in Hugging Face format")
    export.add_argument("run", type=Path)
    export.add_argument("destination", type=Path)

    add_convert(commands)

    show = _add(commands, "show", _show, "print sampled trees of a run with turns, rewards, credits and targets")
    show.add_argument("run", type=Path)
    show.add_argument("--step", type=int, help="which saved step (default: the last)")
    show.add_argument("--tree", type=int, help="which tree of that step (default: the one whose leaves differ most)")
    show.add_argument("--question", help="the tree of this question id instead")
    show.add_argument("--list", action="store_true", help="list the saved steps and their questions")
    show.add_argument("--full", action="store_true", help="whole observations instead of their beginnings")

    report = _add(commands, "report", _write_report, "write report.html of a run folder again")
    report.add_argument("run", type=Path)
    return parser


def _add(
    commands: argparse._SubParsersAction, name: str, run: Callable[[argparse.Namespace], None], text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=text, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(command=run)
    return parser


def _words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="*", metavar="key=value", help="recipe choices and keys")


def _recipe_help() -> str:
    lines = ["recipes (launch/recipes; a path to a YAML file works too):"]
    for group in GROUPS:
        names = sorted(path.stem for path in (RECIPES / group).glob("*.yaml"))
        lines.append(f"  {group}=  {', '.join(names)}")
    lines.append("top-level keys and sections of a recipe:")
    for key, field in Recipe.model_fields.items():
        lines.append(f"  {key:<12} {field.description or ''}".rstrip())
    return "\n".join(lines)


def _train(arguments: argparse.Namespace) -> None:
    recipe = load_recipe(arguments.recipe)
    if arguments.dry_run:
        from megatron_treeopsd.plan import describe

        print(describe(recipe))
        return
    from megatron_treeopsd.train import train

    summary = train(recipe)
    if summary is not None:
        print(f"summary: {summary}", flush=True)


def _task_recipe(words: Sequence[str]) -> Recipe:
    """A recipe for commands that only need its task: no end of the run has to be given."""
    return load_recipe([*words, "steps=0"])


def _prepare(arguments: argparse.Namespace) -> None:
    from megatron_treeopsd.environment.factbook.prepare import prepare

    task = _task_recipe(arguments.recipe).task
    if task.data.exists() and not arguments.force:
        print(f"data: {task.data} (exists; --force makes it again)")
        return
    print(prepare(task, task.data))
    print(f"data: {task.data}")


def _create_policy(arguments: argparse.Namespace) -> None:
    from megatron_treeopsd.environment.factbook.prepare import create_policy

    if arguments.destination.exists():
        raise RecipeError(f"{arguments.destination} exists; choose another folder or remove it")
    create_policy(arguments.destination, data=_task_recipe(arguments.recipe).task.data, seed=arguments.seed)
    print(f"policy: {arguments.destination}")


def _export(arguments: argparse.Namespace) -> None:
    from megatron_treeopsd.export import export

    export(arguments.run, arguments.destination)
    print(f"policy: {arguments.destination}")


def _show(arguments: argparse.Namespace) -> None:
    from megatron_treeopsd.observe.show import show

    show(
        arguments.run,
        step=arguments.step,
        tree=arguments.tree,
        question=arguments.question,
        listing=arguments.list,
        full=arguments.full,
    )


def _write_report(arguments: argparse.Namespace) -> None:
    from megatron_treeopsd.observe.report import write_report

    print(f"report: {write_report(arguments.run)}")


if __name__ == "__main__":
    sys.exit(main())
