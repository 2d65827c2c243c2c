"""Does the credit of a turn tell good searches from bad ones?

    python tools/bench/credit.py RUN [RUN ...] [--step N] [--json]

Reads the rollout trees that runs saved (RUN/trees) and computes every credit rule on them anew, whatever the run was
trained with. A search is *gold* if its query is the query of one hop of the chain behind the question
(`metadata["chain"]`, which the Factbook tasks provide). For each number of hops and each rule the table shows how far
the credits of gold searches lie above those of all other searches:

    AUC        probability that a gold search has more credit than another one, ties counted half; 0.5: credit is blind
    Cohen's d  difference of the means in pooled standard deviations

Questions whose trajectories all got the same reward give no credit to anything; they are counted and left out. A turn
that was drawn several times counts as often. To compare rollouts (chains against trees), give a run of each.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from megatron_treeopsd.config import RecipeError
from megatron_treeopsd.credit import Credit, Outcome, TreeBackup
from megatron_treeopsd.environment.factbook.questions import chain_of
from megatron_treeopsd.environment.search import parse_action
from megatron_treeopsd.observe.run_folder import RunFolderError, RunPaths
from megatron_treeopsd.recipes import read_recipe
from megatron_treeopsd.tree import RolloutTree, TreeError, load_trees

RULES: Mapping[str, Credit] = {
    "outcome": Outcome(),
    **{
        f"{backup} {mode}": TreeBackup(backup, mode)
        for mode in ("pointwise", "listwise")
        for backup in ("likelihood", "uniform", "surprisal", "leaves")
    },
}


class DiagnosticError(ValueError):
    """Trees that this diagnostic cannot judge; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Separation:
    """How well one rule separates gold searches from others. None where a group is empty; d also if none varies."""

    gold: int
    other: int
    gold_mean: float | None
    other_mean: float | None
    cohens_d: float | None
    auc: float | None


@dataclass(frozen=True, slots=True)
class HopReport:
    """All rules on the questions with one number of hops."""

    questions: int
    zero_variance_share: float
    rules: dict[str, Separation]


def auc(gold: np.ndarray, other: np.ndarray) -> float:
    """P(gold > other) + P(gold = other) / 2 over all pairs of float64 [n] and [m] (the Mann-Whitney statistic)."""
    ordered = np.sort(other)
    below = np.searchsorted(ordered, gold, side="left")
    not_above = np.searchsorted(ordered, gold, side="right")
    return float((below + not_above).mean() / (2 * len(other)))


def cohens_d(gold: np.ndarray, other: np.ndarray) -> float | None:
    """Difference of means over the root of the mean variance; None if neither group varies."""
    if np.ptp(gold) == 0 and np.ptp(other) == 0:
        return None
    return float(gold.mean() - other.mean()) / math.sqrt((gold.var() + other.var()) / 2)


def separation(gold: np.ndarray, other: np.ndarray) -> Separation:
    both = len(gold) > 0 and len(other) > 0
    return Separation(
        gold=len(gold),
        other=len(other),
        gold_mean=float(gold.mean()) if len(gold) else None,
        other_mean=float(other.mean()) if len(other) else None,
        cohens_d=cohens_d(gold, other) if both else None,
        auc=auc(gold, other) if both else None,
    )


def judge_searches(tree: RolloutTree, tokenizer: Tokenizer) -> Iterator[tuple[int, bool]]:
    """Index of every search turn of a tree, and whether it is gold.

    Raises `DiagnosticError` for a question without a chain, or a search that the tokenizer does not read as one.
    """
    if "chain" not in tree.question.metadata:
        raise DiagnosticError(
            f"question {tree.question.id}: its metadata has no 'chain' to judge searches by; "
            "only tasks that compose their questions (the Factbook ones) have it"
        )
    gold = {_as_sampled(hop.query, tokenizer) for hop in chain_of(tree.question)}
    for index, turn in enumerate(tree.turns):
        if turn.action == "search":
            yield index, _query(tree, index, tokenizer) in gold


def _query(tree: RolloutTree, index: int, tokenizer: Tokenizer) -> str:
    text = tokenizer.decode(tree.turns[index].sampled_ids, skip_special_tokens=False)
    action, query = parse_action(text)
    if action != "search":
        raise DiagnosticError(
            f"question {tree.question.id}: turn {index} was a search but now reads {text!r}; "
            "is model.checkpoint of the run's recipe.yaml still the tokenizer of its policy?"
        )
    return _normalised(query)


def _as_sampled(query: str, tokenizer: Tokenizer) -> str:
    """What is left of `query` when a policy writes it in tokens: a word-level vocabulary knows no case or accents."""
    ids = tokenizer.encode(query, add_special_tokens=False).ids
    return _normalised(tokenizer.decode(ids, skip_special_tokens=False))


def _normalised(text: str) -> str:
    return " ".join(text.lower().split())


def measure(
    trees: Sequence[RolloutTree], tokenizer: Tokenizer, rules: Mapping[str, Credit] = RULES
) -> dict[int, HopReport]:
    """A report for each number of hops (`metadata["hops"]`, else the length of the chain), fewest first."""
    by_hops: dict[int, list[RolloutTree]] = {}
    for tree in trees:
        hops = tree.question.metadata.get("hops", len(tree.question.metadata.get("chain", ())))
        by_hops.setdefault(int(hops), []).append(tree)
    return {hops: _measure_group(by_hops[hops], tokenizer, rules) for hops in sorted(by_hops)}


def _measure_group(trees: Sequence[RolloutTree], tokenizer: Tokenizer, rules: Mapping[str, Credit]) -> HopReport:
    credits: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in rules}
    varied = [tree for tree in trees if np.ptp(tree.leaf_rewards()) > 0]
    for tree in varied:
        searches = list(judge_searches(tree, tokenizer))
        for name, rule in rules.items():
            credit = rule(tree).round(9)  # averages of equal advantages are ties, whatever their last bits
            gold, other = credits[name]
            for index, is_gold in searches:
                (gold if is_gold else other).extend([float(credit[index])] * tree.turns[index].multiplicity)
    return HopReport(
        questions=len(trees),
        zero_variance_share=1 - len(varied) / len(trees),
        rules={name: separation(np.array(gold), np.array(other)) for name, (gold, other) in credits.items()},
    )


def load_run(root: Path, step: int | None) -> tuple[list[RolloutTree], Tokenizer]:
    """Saved trees of a run (of all its saved steps, or of one) and the tokenizer of its policy."""
    run = RunPaths(root)
    run.require()
    saved = run.saved_tree_steps()
    chosen = [number for number in saved if step is None or number == step]
    if not chosen:
        raise RunFolderError(f"{run.trees} holds trees of the steps {saved}; train with logging.trees_every_steps=1")
    file = read_recipe(run.recipe).model.checkpoint / "tokenizer.json"
    if not file.is_file():
        raise RunFolderError(
            f"{file} (in model.checkpoint of {run.recipe}) is not there; "
            "run this where that path leads to the checkpoint"
        )
    return [tree for number in chosen for tree in load_trees(run.tree_file(number))], Tokenizer.from_file(str(file))


def table(name: str, report: Mapping[int, HopReport]) -> str:
    """The report of one run in readable lines."""
    lines = [f"{name}"]
    for hops, group in report.items():
        lines += [
            "",
            f"  {hops} hop{'s' if hops != 1 else ''}: {group.questions} questions, "
            f"{100 * group.zero_variance_share:.0f} % of them with equal rewards only",
            f"  {'credit':<22}{'AUC':>7}{'d':>8}{'mean gold':>11}{'other':>8}{'gold':>8}{'other':>7} searches",
        ]
        for rule, result in group.rules.items():
            lines.append(
                f"  {rule:<22}{_shown(result.auc):>7}{_shown(result.cohens_d):>8}{_shown(result.gold_mean):>11}"
                f"{_shown(result.other_mean):>8}{result.gold:>8}{result.other:>7}"
            )
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="+", help="run folders")
    parser.add_argument("--step", type=int, help="only the trees of this step (default: all saved ones)")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    arguments = parser.parse_args(argv)
    reports: dict[str, dict[int, HopReport]] = {}
    try:
        for root in arguments.run:
            trees, tokenizer = load_run(root, arguments.step)
            reports[str(root)] = measure(trees, tokenizer)
            print(table(str(root), reports[str(root)]) + "\n")
    except (DiagnosticError, RecipeError, RunFolderError, TreeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        runs = {run: {str(hops): asdict(group) for hops, group in report.items()} for run, report in reports.items()}
        print(json.dumps({"runs": runs}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
