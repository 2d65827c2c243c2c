"""How fast is one reinforcement-learning step of ours, beside trl's GRPOTrainer on the same machine in the same run?

    ./launch/env.sh cpu bench && .venv/bin/python tools/bench/step.py [--steps N] [--json]

A GRPO step of equal size in both: the same policy, questions, prompts (checked token by token) and group size, one turn
of the same token limit that ends at the same tokens, the same number of epochs and mini-batches, hence the same number
of optimizer steps, no reference model, no tools, every group trained on. The reward costs nothing in either.

    this process ─┬─ step_ours.py   {"ready"} ◄─ go ─► {"cpu_seconds", "wall_seconds"}   one step each,
                  └─ step_trl.py    {"ready"} ◄─ go ─► {"cpu_seconds", "wall_seconds"}   in turn: A B B A A B ...

Only one of them works at a time, on one thread, so what else the machine does hits both alike; seconds are processor
time of the process that worked, which other load disturbs least. What is compared is seconds per generated token, since
sampled turns differ a little in length. Ratios are medians over the pairs of steps; the first step of each arm warms it
up and is not counted. The wall clock of the same steps is shown beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_treeopsd import environment
from megatron_treeopsd.config import Chains, Recipe, RecipeError
from megatron_treeopsd.environment.data import load_questions
from megatron_treeopsd.observe.history import read_metrics
from megatron_treeopsd.questions import QuestionSource
from megatron_treeopsd.recipes import load_recipe
from megatron_treeopsd.tokenizer import load_tokenizer

HERE = Path(__file__).resolve().parent
WARM_UP = 1


class BenchmarkError(RuntimeError):
    """An arm that failed, with what it said."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one rollout step cost: seconds, and tokens sampled. Trained tokens are these times the epochs."""

    cpu_seconds: float
    wall_seconds: float
    generated_tokens: int


class Arm:
    """One of the two processes. Use as a context manager."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self._command = list(command)
        self._log = log

    def __enter__(self) -> Arm:
        one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env={**os.environ, **one_thread, "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
        try:
            self.versions: dict[str, str] = self._receive()["versions"]
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def step(self) -> dict[str, Any]:
        """Let the arm take one step and return what it reports."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{") and line.rstrip().endswith("}"):
                try:
                    return json.loads(line)
                except json.JSONDecodeError:
                    continue  # a dictionary printed by a library
        status = self._process.wait()
        raise BenchmarkError(f"the arm {self.name} ended with status {status}:\n{self._log.read_text()[-4000:]}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._process.communicate(timeout=300)
        else:
            self._process.kill()
            self._process.wait()


def recipe_words(options: argparse.Namespace, run: Path) -> list[str]:
    """A step of GRPO that does as much as trl's: one turn, nothing left out, nothing written but what every run is."""
    return [
        "method=grpo",
        f"run={run}",
        f"steps={options.steps + WARM_UP}",
        f"expansion.chains={options.chains}",
        f"update.questions_per_step={options.questions}",
        f"update.epochs={options.epochs}",
        f"update.mini_batches={options.mini_batches}",
        "update.drop_zero_variance=false",
        "task.max_turns=1",
        f"task.max_turn_tokens={options.max_new_tokens}",
        "task.hop_weights=null",
        "evaluation.questions=0",
        "logging.report=false",
        *options.recipe,
    ]


def trl_job(recipe: Recipe, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """What step_trl.py needs to do the same: the questions that our arm is going to draw, in its order."""
    assert isinstance(recipe.expansion, Chains)
    world = environment.build(recipe.task, load_tokenizer(recipe.model.checkpoint))
    source = QuestionSource(load_questions(recipe.task.data / "train.jsonl"), seed=recipe.seed)
    count = recipe.update.questions_per_step
    rounds = options.steps + WARM_UP
    questions = [question for step in range(rounds) for question in source.draw(step, count, None)]
    return {
        "checkpoint": str(recipe.model.checkpoint.resolve()),
        "scratch": str(scratch),
        "seed": recipe.seed,
        "attention": options.trl_attention,
        "experts": options.trl_experts,
        "stop_ids": sorted(world.stop_ids),
        "questions": [question.text for question in questions],
        "prompt_ids": [world.prompt(question) for question in questions],
        "questions_per_step": count,
        "chains": recipe.expansion.chains,
        "epochs": recipe.update.epochs,
        "mini_batches": recipe.update.mini_batches,
        "max_new_tokens": recipe.task.max_turn_tokens,
        "learning_rate": recipe.optimizer.lr,
        "rounds": rounds,
    }


def measure(recipe: Recipe, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run both arms in turn and return everything that was found."""
    job = folder / "job.json"
    job.write_text(json.dumps(trl_job(recipe, options, folder / "trl")))
    words = recipe_words(options, recipe.run)
    ours = Arm("ours", [sys.executable, str(HERE / "step_ours.py"), *words], folder / "ours.log")
    trl = Arm("trl", [options.trl_python, str(HERE / "step_trl.py"), str(job)], folder / "trl.log")
    reports: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
    with ours, trl:
        for number in range(options.steps + WARM_UP):
            for arm in (ours, trl) if number % 2 else (trl, ours):
                reports[arm.name].append(arm.step())
                if not options.json:
                    done = reports[arm.name][-1]
                    print(f"step {number} {arm.name:>5} {done['cpu_seconds']:6.2f} s", file=sys.stderr)
    rows = [row.values for row in read_metrics(recipe.run / "metrics.jsonl")][WARM_UP:]
    for report, row in zip(reports["ours"][WARM_UP:], rows, strict=True):
        report["generated_tokens"] = int(row["rollout/generated_tokens"])
        if row["train/trained_tokens"] != row["rollout/generated_tokens"]:
            raise BenchmarkError(f"our arm did not train on every token that it generated: {row}")
    steps = {name: [Step(**report) for report in found[WARM_UP:]] for name, found in reports.items()}
    spans = {tag.removeprefix("span/"): 0.0 for row in rows for tag in row if tag.startswith("span/")}
    for name in spans:
        spans[name] = round(statistics.fmean(row.get(f"span/{name}", 0.0) for row in rows), 4)
    return summarise(steps, spans=spans, epochs=recipe.update.epochs) | {"versions": ours.versions | trl.versions}


def summarise(steps: dict[str, list[Step]], *, spans: dict[str, float], epochs: int) -> dict[str, Any]:
    """Ratios and rates. A ratio is the median over pairs of steps of trl's seconds per token over ours."""

    def ratio(clock: str) -> list[float]:
        per_token = {
            name: [getattr(step, clock) / step.generated_tokens for step in found] for name, found in steps.items()
        }
        return [theirs / ours for theirs, ours in zip(per_token["trl"], per_token["ours"], strict=True)]

    def mean(name: str, what: str) -> float:
        return statistics.fmean(getattr(step, what) for step in steps[name])

    pairs = ratio("cpu_seconds")
    tokens = mean("ours", "generated_tokens")
    rollout = spans.get("rollout", 0.0)
    return {
        "ours_over_trl": round(statistics.median(pairs), 3),
        "ours_over_trl_pairs": [round(pair, 3) for pair in pairs],
        "ours_over_trl_wall": round(statistics.median(ratio("wall_seconds")), 3),
        "spans": spans,
        "generated_tokens_per_second": round(tokens / rollout, 1) if rollout else None,
        "trained_tokens_per_second": round(tokens * epochs / spans["update"], 1) if spans.get("update") else None,
        "seconds_per_step": {name: round(mean(name, "cpu_seconds"), 3) for name in steps},
        "wall_seconds_per_step": {name: round(mean(name, "wall_seconds"), 3) for name in steps},
        "generated_tokens_per_step": {name: round(mean(name, "generated_tokens"), 1) for name in steps},
    }


def table(found: dict[str, Any]) -> str:
    lines = [f"{'':28}{'ours':>10}{'trl':>10}"]
    for title, key in (
        ("processor seconds a step", "seconds_per_step"),
        ("wall seconds a step", "wall_seconds_per_step"),
        ("generated tokens a step", "generated_tokens_per_step"),
    ):
        lines.append(f"{title:28}{found[key]['ours']:>10}{found[key]['trl']:>10}")
    lines += [
        "",
        f"trl's seconds over ours, per token: {found['ours_over_trl']} (median of {len(found['ours_over_trl_pairs'])} "
        f"pairs, {min(found['ours_over_trl_pairs'])} to {max(found['ours_over_trl_pairs'])}); "
        f"by the wall clock {found['ours_over_trl_wall']}",
        f"ours: {found['generated_tokens_per_second']} generated tokens/s in rollout, "
        f"{found['trained_tokens_per_second']} trained tokens/s in update (wall clock)",
        "ours, wall seconds by span: " + ", ".join(f"{name} {value}" for name, value in found["spans"].items()),
        "versions: " + ", ".join(f"{name} {value}" for name, value in found["versions"].items()),
    ]
    return "\n".join(lines)


def options_from(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "recipe", nargs="*", metavar="key=value", help="recipe keys: model.checkpoint=..., task.data=..."
    )
    parser.add_argument("--steps", type=int, default=8, help="counted steps of each arm")
    parser.add_argument("--questions", type=int, default=16, help="questions a step")
    parser.add_argument("--chains", type=int, default=8, help="completions a question")
    parser.add_argument("--max-new-tokens", type=int, default=14, help="token limit of a completion")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--mini-batches", type=int, default=2)
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter that has trl (extra bench)")
    parser.add_argument("--trl-attention", default="sdpa", help="transformers' attention in trl's arm")
    parser.add_argument(
        "--trl-experts", default="eager", help="transformers' experts in trl's arm; the fastest on a CPU"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line instead of a table")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_from(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-step-") as name:
        try:
            recipe = load_recipe(recipe_words(options, Path(name) / "run"))
            found = measure(recipe, options, Path(name))
        except (RecipeError, BenchmarkError) as error:
            print(f"step.py: {error}", file=sys.stderr)
            return 1
    print(json.dumps(found) if options.json else table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
