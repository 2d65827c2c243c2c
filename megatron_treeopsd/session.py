"""Everything a run needs, built from its recipe and torn down in order; the words that `train.py` is written in."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np

from megatron_treeopsd import credit, environment, mismatch, objective, reward
from megatron_treeopsd.backend import checkpoint, failure, parallel
from megatron_treeopsd.backend.policy import Policy
from megatron_treeopsd.collect import Collector, Share
from megatron_treeopsd.config import Recipe, RecipeError
from megatron_treeopsd.engine.build import build_engine
from megatron_treeopsd.engine.nap import nap_metrics
from megatron_treeopsd.environment.data import load_questions
from megatron_treeopsd.learn import Learner
from megatron_treeopsd.observe.journal import Journal
from megatron_treeopsd.observe.spans import Spans
from megatron_treeopsd.observe.turn_notes import TurnNotes
from megatron_treeopsd.observe.wording import duration
from megatron_treeopsd.published import check_probes, sample_probe
from megatron_treeopsd.questions import QuestionSource, stable_seed
from megatron_treeopsd.recipes import read_recipe
from megatron_treeopsd.tokenizer import load_tokenizer
from megatron_treeopsd.tree import Question, RolloutTree

FREE_TO_CHANGE = frozenset({"resume", "run", "steps", "budget", "checkpoint", "evaluation", "logging"})
"""Recipe keys that may differ when a run is continued; any other change would make it another run."""
ENDING = (
    b"\ninterrupted: the run ends behind this step, with a checkpoint and its report; Ctrl-C again ends it at once\n"
)


class Session:
    """One run on one rank. Use as a context manager."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.spans = Spans()
        self._cleanup = ExitStack()
        self._first_step = 0
        self._interrupted = False
        self._publishes = 0
        self._asleep = self._told_what_sleep_frees = False
        self._alarm = mismatch.Alarm(recipe.mismatch)
        self._evaluations: list[dict[str, Any]] = []
        self._tokens: dict[str, int] = {"generated": 0, "cached": 0, "computed_prompt": 0}

    # ------------------------------------------------------------------------------------------------- start and end
    def __enter__(self) -> Session:
        try:
            with self.spans.paused("startup"):
                self._start()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _start(self) -> None:
        recipe = self.recipe
        self.parallel = parallel.initialize(recipe.layout, seed=recipe.seed)
        self._cleanup.callback(parallel.shutdown)
        if recipe.resume and (recipe.run / "recipe.yaml").is_file():
            check_same_run(read_recipe(recipe.run / "recipe.yaml"), recipe)
        self.journal = self._cleanup.enter_context(Journal(recipe, self.parallel.rank == 0))
        self._catch_signals()

        tokenizer = load_tokenizer(recipe.model.checkpoint)
        world = environment.build(recipe.task, tokenizer)
        self._cleanup.callback(world.close)
        self._train_questions = QuestionSource(load_questions(recipe.task.data / "train.jsonl"), seed=recipe.seed)
        self._test_questions = evaluation_sample(
            load_questions(recipe.task.data / f"{recipe.evaluation.split}.jsonl"), recipe.evaluation.questions
        )
        self.credit = credit.build(recipe.credit)
        self._objective = objective.build(recipe.objective)
        self.policy = Policy(recipe, self.parallel, total_steps=recipe.optimizer_steps)
        self._engine = build_engine(
            recipe.engine,
            checkpoint=recipe.model.checkpoint,
            dtype=recipe.model.dtype,
            rank=self.parallel.rank,
            routes=recipe.mismatch.routes != "ignore",
        )
        self._cleanup.callback(self._engine.close)
        self.collector = Collector(
            recipe,
            engine=self._engine,
            environment=world,
            reward=reward.build(recipe.reward),
            share=Share(
                self.parallel.rank, self.parallel.world, parallel.all_gather_objects, recipe.engine.ranks_per_engine
            ),
        )
        self.learner = Learner(
            recipe, policy=self.policy, objective=self._objective, gather=parallel.all_gather_objects
        )
        self._version = 0
        if recipe.resume:
            self._resume()
        self.journal.start(self._first_step, parameters=self.policy.parameter_count, attention=self.policy.attention)
        if self.collector.training.needs_engine:
            self.publish(version=self._version)

    def _resume(self) -> None:
        folder = checkpoint.latest(self.recipe.run / "checkpoints")
        if folder is None:
            self.journal.note(f"no checkpoint in {self.recipe.run / 'checkpoints'}: the run begins at step 0")
            return
        extra = checkpoint.load(folder, self.policy)
        self._first_step = self._version = extra["step"]
        self._evaluations = extra["evaluations"]
        self._tokens = extra["tokens"]
        self.spans.load(extra["spans"])

    def _catch_signals(self) -> None:
        """SIGTERM, or Ctrl-C once, end the run behind the step that it is in; Ctrl-C again ends it at once."""

        def note(signum: int, frame: FrameType | None) -> None:
            if self._interrupted and signum == signal.SIGINT:
                raise KeyboardInterrupt
            if not self._interrupted and self.parallel.rank == 0:
                os.write(2, ENDING)  # no print, in which the signal may have come
            self._interrupted = True

        for number in (signal.SIGTERM, signal.SIGINT):
            self._cleanup.callback(signal.signal, number, signal.signal(number, note))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reported = failure.explain(error) if error is not None else None
        self._cleanup.close()
        if reported is not None and reported is not error:
            raise reported from None

    # ---------------------------------------------------------------------------------------------------- the loop
    def steps(self) -> Iterator[int]:
        """Step numbers until the steps or the budget are used up, or the run is told to end (SIGTERM, Ctrl-C)."""
        step = self._first_step
        while not self._over(step):
            yield step
            step += 1

    def _over(self, step: int) -> bool:
        recipe = self.recipe
        out_of_budget = recipe.budget is not None and self.spans.training_seconds >= recipe.budget
        votes = parallel.all_gather_objects((out_of_budget, self._interrupted))
        self._interrupted = any(interrupted for _, interrupted in votes)
        return (recipe.steps is not None and step >= recipe.steps) or votes[0][0] or self._interrupted

    def draw(self, step: int) -> list[Question]:
        """The questions of a step; a curriculum may change their mix with progress."""
        recipe, expansion = self.recipe, self.collector.training
        progress = step / recipe.steps if recipe.steps else self.spans.training_seconds / (recipe.budget or 1.0)
        expansion.set_progress(min(progress, 1.0))
        weights = expansion.question_weights(min(progress, 1.0)) or recipe.task.hop_weights
        return self._train_questions.draw(step, recipe.update.questions_per_step, weights)

    def sleep(self) -> None:
        """The engines give memory back to training; the next publish wakes them."""
        self._asleep = True
        self._engine.sleep()

    def publish(self, *, version: int) -> None:
        """Hand the weights to the engine, if anything will be sampled from them before the next update."""
        self._version = version
        if self.collector.training.needs_engine:
            self._publish()

    def _publish(self) -> None:
        self._engine.publish(self.policy.named_tensors(), version=self._version)
        self._asleep = False
        self._publishes += 1
        every = self.recipe.engine.verify_every
        if every and self._publishes % every == 0 and self._objective.uses_behaviour:
            self._verify()

    def _verify(self) -> None:
        """All ranks score what each engine samples, so that all end with the same error if one is wrong."""
        recipe, holds_engine = self.recipe, self.parallel.rank % self.recipe.engine.ranks_per_engine == 0
        vocabulary, temperature = self.policy.hf_config.vocab_size, recipe.rollout.temperature
        routes = recipe.mismatch.routes != "ignore"
        mine = []
        if holds_engine:
            mine.append(sample_probe(self._engine, vocabulary=vocabulary, temperature=temperature, routes=routes))
        probes = [probe for part in parallel.all_gather_objects(mine) for probe in part]
        tolerance = recipe.engine.verify_tolerance
        check_probes(probes, self.learner.behaviour(probes), version=self._version, tolerance=tolerance)

    def evaluate(self, when: str) -> None:
        """Score the fixed evaluation questions; the training clock stands still. Once for each `when` and step."""
        done = any(e["when"] == when for e in self._evaluations) and when == "before"
        if done or not self._test_questions or (when == "after" and self._interrupted):
            return
        with self.spans.paused("evaluation"), self.journal.busy(f"evaluating {len(self._test_questions)} questions"):
            if self._engine.version != self._version or self._asleep:
                self._publish()
            scores = self.collector.evaluate(self._test_questions, repeats=self.recipe.evaluation.sampled_repeats)
            self._engine.counters.reset()
            if not self.collector.training.needs_engine:
                self.sleep()
        entry = {"when": when, "step": self._version, "training_seconds": self.spans.training_seconds, **scores}
        self._evaluations.append(entry)
        self.journal.evaluation(entry)

    def record(
        self, step: int, trees: Sequence[RolloutTree], credits: Sequence[np.ndarray],
        behaviour: Sequence[Sequence[np.ndarray]], learned: dict[str, float],
    ) -> None:  # fmt: skip
        """Close the step: metrics, sample trees, and a checkpoint or evaluation where one is due."""
        seconds = self.spans.finish_step()
        tokens = self._count_tokens()
        values = {
            **rollout_metrics(trees),
            **{f"rollout/{name}_tokens": float(count) for name, count in tokens.items()},
            "rollout/tokens_per_second": tokens["generated"] / max(seconds.get("rollout", 0.0), 1e-9),
            **learned,
            **self._count_naps(),
            **{f"span/{name}": value for name, value in seconds.items()},
        }
        if self._objective.uses_behaviour:
            values |= mismatch.measure(trees, behaviour)
            values |= self._alarm.note(step, values["mismatch/logprob_abs_mean"])
        self.journal.step(
            step,
            values,
            training_seconds=self.spans.training_seconds,
            total_seconds=self.spans.total_seconds,
        )
        self.journal.trees(step, trees, TurnNotes.from_arrays(**self.learner.notes()))
        checkpointing, evaluation = self.recipe.checkpoint, self.recipe.evaluation
        if evaluation.every_steps and (step + 1) % evaluation.every_steps == 0:
            self.evaluate("during")
        if checkpointing.every_steps and (step + 1) % checkpointing.every_steps == 0:
            self._save()

    def _count_tokens(self) -> dict[str, int]:
        counters = self._engine.counters
        mine = {
            "generated": counters.generated_tokens,
            "cached": counters.cached_tokens,
            "computed_prompt": counters.computed_tokens,
        }
        counters.reset()
        everyone = parallel.all_gather_objects(mine)
        total = {name: sum(part[name] for part in everyone) for name in mine}
        self._tokens = {name: self._tokens[name] + total[name] for name in total}
        return total

    def _count_naps(self) -> dict[str, float]:
        """What sleeping cost and freed since the last step; said in words the first time."""
        found = nap_metrics(parallel.all_gather_objects(self._engine.naps))
        self._engine.naps.reset()
        if not self._told_what_sleep_frees and found["engine/sleep_seconds"]:
            self.journal.note(what_sleep_frees(found))
            self._told_what_sleep_frees = True
        return found

    def _save(self) -> None:
        with self.spans("checkpoint"):
            checkpoint.save(
                self.recipe.run / "checkpoints",
                self.policy,
                step=self._version,
                extra={
                    "step": self._version,
                    "evaluations": self._evaluations,
                    "tokens": self._tokens,
                    "spans": self.spans.state(),
                },
                keep=self.recipe.checkpoint.keep,
            )

    def finish(self) -> Path | None:
        """Last checkpoint, summary, report. Returns the summary's path on rank 0."""
        latest = checkpoint.latest(self.recipe.run / "checkpoints")
        if latest is None or checkpoint.step_of(latest) != self._version:
            self._save()
        return self.journal.finish(
            steps=self._version,
            spans=self.spans,
            evaluations=self._evaluations,
            tokens=self._tokens,
            interrupted=self._interrupted,
        )


def what_sleep_frees(found: Mapping[str, float]) -> str:
    """One line about the first sleep of a run."""
    if not found["engine/freed_bytes"]:
        return "engine: sleeping frees no memory here (a CPU), so that sleep and wake are no-ops"
    seconds = duration(found["engine/sleep_seconds"] + found["engine/wake_seconds"])
    return f"engine: sleeping gives back {found['engine/freed_bytes'] / 2**20:.0f} MiB; it takes {seconds} with waking"


def evaluation_sample(questions: Sequence[Question], count: int) -> list[Question]:
    """The same questions for every run of a task, whatever its seed."""
    rng = random.Random(stable_seed("evaluation questions"))
    return rng.sample(list(questions), min(count, len(questions)))


def check_same_run(old: Recipe, new: Recipe) -> None:
    """Raise `RecipeError` listing the keys in which a continued run differs from what it was started with."""
    before, after = (_keys(recipe.model_dump(mode="json", exclude=set(FREE_TO_CHANGE))) for recipe in (old, new))
    changed = [key for key in before | after if before.get(key) != after.get(key)]
    if changed:
        details = "; ".join(f"{key}: {before.get(key)} -> {after.get(key)}" for key in changed)
        raise RecipeError(f"{new.run}: the run was started with another recipe, so it cannot be resumed. {details}")


def _keys(section: Mapping[str, Any], lead: str = "") -> dict[str, Any]:
    """The values of a recipe by their full keys."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        found |= _keys(value, f"{lead}{key}.") if isinstance(value, dict) else {f"{lead}{key}": value}
    return found


def rollout_metrics(trees: Sequence[RolloutTree]) -> dict[str, float]:
    """What the trees of one step show, over their leaves."""
    leaves = [(tree, index, tree.turns[index]) for tree in trees for index in tree.terminals()]
    repeat = np.array([turn.multiplicity for _, _, turn in leaves], dtype=np.float64)

    def mean(values: Sequence[float]) -> float:
        return float(np.average(values, weights=repeat))

    return {
        "rollout/reward_mean": mean([turn.reward or 0.0 for _, _, turn in leaves]),
        "rollout/exact_match": mean([float((turn.reward or 0.0) >= 1.0) for _, _, turn in leaves]),
        "rollout/turns_mean": mean([float(len(tree.path(index))) for tree, index, _ in leaves]),
        "rollout/no_answer_share": mean([float(turn.prediction is None) for _, _, turn in leaves]),
        "rollout/zero_variance_share": float(np.mean([np.ptp(tree.leaf_rewards()) == 0 for tree in trees])),
        "rollout/leaves": float(repeat.sum()),
    }
