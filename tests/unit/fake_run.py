"""A run folder that no training wrote: made-up metrics, readable search trees and a word-level tokenizer."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_treeopsd.config import Recipe
from megatron_treeopsd.observe.metrics import MetricsWriter
from megatron_treeopsd.observe.run_folder import RunFolder, RunPaths
from megatron_treeopsd.observe.summary import write_summary
from megatron_treeopsd.observe.turn_notes import TurnNotes
from megatron_treeopsd.recipes import load_recipe, save_recipe
from megatron_treeopsd.tree import ROOT, Question, RolloutTree, Turn, save_trees

PARTNERS = {"mali": "china", "togo": "ghana", "chad": "germany", "peru": "brazil", "oman": "japan", "cuba": "spain"}
LEADERS = {
    "china": "xi jinping", "ghana": "john mahama", "germany": "friedrich merz", "brazil": "lula da silva",
    "japan": "sanae takaichi", "spain": "pedro sanchez",
}  # fmt: skip
_TEXT = (
    "<pad> <bos> <search> </search> <answer> </answer> <information> </information> question : who leads the largest "
    "export partner of . | is are chief state export import partners head capital 33 % in 2023 not known"
)
WORDS = sorted({*_TEXT.split(), *" ".join([*PARTNERS, *LEADERS, *LEADERS.values()]).split()})
IDS = {word: index for index, word in enumerate(WORDS)}


def encode(text: str) -> list[int]:
    return [IDS[word] for word in text.split()]


def write_tokenizer(folder: Path) -> None:
    """A word-level `tokenizer.json`, as a Hugging Face folder has one."""
    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def decode(ids: list[int]) -> str:
    return " ".join(WORDS[index] for index in ids)


def search_tree(seed: int, *, skill: float = 0.6, trunks: int = 4, forks: int = 2, max_turns: int = 5) -> RolloutTree:
    """Searches and answers about one country, grown trunks first; `skill` is the chance of each right move."""
    rng = random.Random(seed)
    country = rng.choice(list(PARTNERS))
    answer = LEADERS[PARTNERS[country]]
    question = Question(f"q-{seed:04d}", f"who leads the largest export partner of {country}", (answer,), {"hops": 2})
    tree = RolloutTree(question, encode(f"<bos> question : {question.text} ."))
    forkable: list[list[int]] = []
    for chain in range(trunks):
        forkable.append(_play(tree, ROOT, country, rng, skill, chain, max_turns))
    for chain, passed in enumerate([passed for passed in forkable for _ in range(forks)], start=trunks):
        _play(tree, rng.choice(passed) if passed else ROOT, country, rng, skill, chain, max_turns)
    for index in tree.terminals():
        tree.turns[index].reward = float(tree.turns[index].prediction == answer)
    tree.check()
    return tree


def _play(
    tree: RolloutTree, node: int, country: str, rng: random.Random, skill: float, chain: int, max_turns: int
) -> list[int]:
    """Continue a trajectory to its end; returns the search turns that it added or passed."""
    passed: list[int] = []
    while True:
        context = tree.path_ids(node)
        partner_known = IDS[PARTNERS[country]] in context
        leader_known = encode(LEADERS[PARTNERS[country]])[0] in context
        right = rng.random() < skill
        depth = len(tree.path(node)) + 1
        if depth == max_turns or (leader_known and right) or rng.random() < 0.08:
            leader = LEADERS[PARTNERS[country]] if leader_known and right else rng.choice(list(LEADERS.values()))
            sampled, observation, prediction = encode(f"<answer> {leader} </answer>"), [], leader
        else:
            subject = PARTNERS[country] if partner_known else country
            field = ("chief of state" if partner_known else "export partners") if right else "import partners"
            sampled, prediction = encode(f"<search> {field} {subject} </search>"), None
            observation = encode(_passages(field, subject))
        surprise = random.Random(str(sampled))
        turn = Turn(node, sampled, [-surprise.expovariate(4.0) for _ in sampled], observation, chain=chain)
        turn.action, turn.prediction, turn.terminal = "search" if observation else "answer", prediction, not observation
        node = tree.add(turn)
        if turn.terminal:
            return passed
        passed.append(node)


def _passages(field: str, subject: str) -> str:
    found = {"export partners": PARTNERS.get(subject), "chief of state": LEADERS.get(subject)}.get(field)
    fact = f"{subject} | the {field} is {found} 33 % in 2023 ." if found else f"{subject} | the {field} are not known ."
    return f"<information> {fact} {subject} | the capital of {subject} is not known . </information>"


def notes_for(trees: list[RolloutTree], *, moved: float = 0.7, radius: float = 0.25) -> TurnNotes:
    """Credits backed up with equal weights, their targets, and ratios that went `moved` of the way on average."""
    credits, targets, ratios = [], [], []
    for number, tree in enumerate(trees):
        rng = np.random.default_rng(number)
        rewards = tree.leaf_rewards()
        value = np.zeros(len(tree.turns))
        children = tree.children()
        for index in reversed(range(len(tree.turns))):
            turn = tree.turns[index]
            if turn.terminal:
                value[index] = ((turn.reward or 0.0) - rewards.mean()) / (rewards.std() + 1e-6)
            else:
                value[index] = np.mean([value[child] for child in children[index]])
        target = 0.5 + radius * np.clip(value, -1, 1)
        credits.append(value)
        targets.append(target)
        ratios.append(np.log(target / (1 - target)) * rng.normal(moved, 0.35, len(value)))
    return TurnNotes.from_arrays(credit=credits, target=targets, log_ratio=ratios)


def fake_recipe(root: Path, *, method: str = "treeopsd") -> Recipe:
    words = [
        f"method={method}",
        f"model.checkpoint={root / 'policy'}",
        f"run={root / 'run'}",
        "budget=150",
        "steps=1000",
    ]
    return load_recipe(words)


def step_values(step: int, steps: int, rng: random.Random, *, supervised: bool = False) -> dict[str, float]:
    """Metrics of a step of a run that learns."""
    way = 1 - math.exp(-3 * (step + 1) / steps)
    rollout, update = 1.8 + 0.2 * rng.random(), 1.2 + 0.1 * rng.random()
    values = {
        "train/loss": 2.0 * math.exp(-2 * way) + 0.05 * rng.random(),
        "train/grad_norm": 0.3 + 0.2 * rng.random() + (2.5 if rng.random() < 0.01 else 0.0),
        "train/lr": 3e-4,
        "train/trained_tokens": 2100.0,
        "train/unique_tokens": 7000.0,
        "span/update": update,
        "span/other": 0.03,
    }
    if supervised:
        return values | {"objective/nll": values["train/loss"]}
    reward = min(0.97, 0.15 + 0.45 * way + rng.gauss(0, 0.05))
    generated = 2600 + 300 * rng.random()
    return {
        "rollout/reward_mean": reward,
        "rollout/exact_match": reward,
        "rollout/turns_mean": 3.4 - 0.5 * way + rng.gauss(0, 0.1),
        "rollout/no_answer_share": max(0.0, 0.2 - 0.15 * way + rng.gauss(0, 0.02)),
        "rollout/zero_variance_share": 0.2 + 0.1 * rng.random(),
        "rollout/leaves": 192.0,
        "rollout/generated_tokens": generated,
        "rollout/cached_tokens": 12000.0 + 2000 * rng.random(),
        "rollout/computed_prompt_tokens": 4100.0,
        "rollout/tokens_per_second": generated / rollout,
        **values,
        "objective/progress_median": 0.6 + 0.2 * rng.random(),
        "objective/reversed_share": 0.2 + 0.1 * rng.random(),
        "objective/log_ratio_abs_median": 0.3 + 0.1 * rng.random(),
        "objective/kl_behaviour": 0.02 + 0.01 * rng.random(),
        "mismatch/logprob_abs_mean": 2e-6 + 1e-6 * rng.random(),
        "mismatch/logprob_abs_max": 2e-5 + 1e-5 * rng.random(),
        "span/rollout": rollout,
        "span/credit": 0.02,
        "span/behaviour": 0.35 + 0.05 * rng.random(),
        "span/publish": 0.05,
    }


def evaluation(when: str, step: int, seconds: float, score: float) -> dict[str, object]:
    return {
        "when": when, "step": step, "training_seconds": seconds, "questions": 256.0,
        "exact_match_greedy": score, "f1_greedy": score + 0.03, "no_answer_greedy": 0.12 * (1 - score),
        "turns_greedy": 3.1, "hops_1": min(1.0, score + 0.2), "hops_2": score, "hops_3": score - 0.15,
        "exact_match_sampled": score - 0.2, "f1_sampled": score - 0.17, "no_answer_sampled": 0.3 * (1 - score),
        "turns_sampled": 3.3,
    }  # fmt: skip


def write_fake_run(
    root: Path, *, steps: int = 40, trees: bool = True, supervised: bool = False, evaluations: bool = True
) -> RunPaths:
    """A finished run under `root` / "run", its policy's tokenizer under `root` / "policy"."""
    rng = random.Random(steps)
    write_tokenizer(root / "policy")
    recipe = fake_recipe(root, method="sft" if supervised else "treeopsd")
    spans: dict[str, float] = {}
    before, after = evaluation("before", 0, 0.0, 0.432), evaluation("after", steps, 0.0, 0.711)
    with RunFolder(recipe.run) as run, MetricsWriter(run) as metrics:
        save_recipe(recipe, run.recipe)
        if evaluations:
            metrics.evaluation(before)
        for step in range(steps):
            values = step_values(step, steps, rng, supervised=supervised)
            for tag, value in values.items():
                if tag.startswith("span/"):
                    spans[tag[5:]] = spans.get(tag[5:], 0.0) + value
            seconds = sum(spans.values())
            metrics.step(step, training_seconds=seconds, total_seconds=seconds + 12, values=values)
            if evaluations and steps >= 20 and (step + 1) % (steps // 4) == 0 and step + 1 < steps:
                score = 0.432 + 0.28 * (1 - math.exp(-3 * (step + 1) / steps))
                metrics.evaluation(evaluation("during", step + 1, seconds, score))
        after["training_seconds"] = sum(spans.values())
        if evaluations:
            metrics.evaluation(after)
        if trees:
            grown = [search_tree(seed) for seed in range(16)]
            save_trees(run.tree_file(steps - 1), grown)
            notes_for(grown).write(run.notes_file(steps - 1))
        write_summary(
            run.summary, method=recipe.method, seed=recipe.seed, steps=steps, spans=spans,
            excluded={"startup": 4.0, "evaluation": 21.0}, generated_tokens=2700 * steps, cached_tokens=13000 * steps,
            before=before if evaluations else None, after=after if evaluations else None,
        )  # fmt: skip
    return RunPaths(recipe.run)
