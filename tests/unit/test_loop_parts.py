"""The small pure parts of the loop: what a step reports, which questions are evaluated, what may change on resume."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from trees import random_tree

from megatron_treeopsd import config
from megatron_treeopsd.cli import main
from megatron_treeopsd.config import RecipeError
from megatron_treeopsd.engine.nap import NapCounters, nap_metrics
from megatron_treeopsd.errors import is_user_error
from megatron_treeopsd.mismatch import Alarm, corrections, measure
from megatron_treeopsd.plan import describe, missing
from megatron_treeopsd.recipes import load_recipe
from megatron_treeopsd.session import Session, check_same_run, evaluation_sample, rollout_metrics, what_sleep_frees
from megatron_treeopsd.tree import ROOT, Question, RolloutTree, TreeError, Turn

pytestmark = pytest.mark.fast


def two_leaves() -> RolloutTree:
    """One search turn, then an answer drawn three times (right) and a turn without an answer (wrong)."""
    tree = RolloutTree(Question("q", "text", ("a",)), [1])
    tree.add(Turn(ROOT, [2, 3], [-1.0, -2.0], [9]))
    tree.add(Turn(0, [4], [-0.5], terminal=True, reward=1.0, prediction="a", multiplicity=3))
    tree.add(Turn(0, [5], [-0.7], terminal=True, reward=0.0, chain=1))
    return tree


def test_rollout_metrics_count_trajectories_not_turns() -> None:
    even = RolloutTree(Question("e", "text", ("a",)), [1])
    even.add(Turn(ROOT, [4], [-0.5], terminal=True, reward=0.0, multiplicity=4))
    values = rollout_metrics([two_leaves(), even])
    assert values["rollout/leaves"] == 8
    assert values["rollout/reward_mean"] == pytest.approx(3 / 8)
    assert values["rollout/exact_match"] == pytest.approx(3 / 8)
    assert values["rollout/no_answer_share"] == pytest.approx(5 / 8)
    assert values["rollout/turns_mean"] == pytest.approx((4 * 2 + 4 * 1) / 8)
    assert values["rollout/zero_variance_share"] == 0.5


def test_mismatch_by_hand() -> None:
    tree = two_leaves()
    behaviour = [np.array([-1.1, -2.0]), np.array([-0.5]), np.array([-0.5])]
    values = measure([tree], [behaviour])
    assert values["mismatch/logprob_abs_mean"] == pytest.approx((0.1 + 0.2) / 4)
    assert values["mismatch/logprob_abs_max"] == pytest.approx(0.2)
    assert values["mismatch/turn_ratio_error_max"] == pytest.approx(1 - np.exp(-0.2))


def test_corrections_by_hand() -> None:
    """Turn 0 is half as likely in the engine as in the trainer, turn 1 twice, turn 2 nearly the same."""
    tree = two_leaves()
    engine = [np.array(turn.sampled_logprobs) for turn in tree.turns]
    shifts = [np.log(2.0), np.log(0.5), 0.01]
    behaviour = [values + shift / len(values) for values, shift in zip(engine, shifts, strict=True)]
    off = corrections([tree], [behaviour], config.Mismatch())
    assert (off.turns[0].tolist(), off.tokens, off.counts) == ([1.0, 1.0, 1.0], None, {})
    turns = corrections([tree], [behaviour], config.Mismatch(truncate="turn", cap=1.5))
    assert turns.turns[0] == pytest.approx([1.5, 0.5, np.exp(0.01)])
    assert (turns.tokens, turns.counts) == (None, {"mismatch/truncated_turns": 1.0})
    tokens = corrections([tree], [behaviour], config.Mismatch(truncate="token", cap=1.2))
    assert tokens.turns[0].tolist() == [1.0, 1.0, 1.0]
    assert tokens.tokens is not None
    assert np.concatenate(tokens.tokens[0]) == pytest.approx([1.2, 1.2, 0.5, np.exp(0.01)])  # sqrt(2) twice, cut
    assert tokens.counts == {"mismatch/truncated_tokens": 2.0}
    dropped = corrections([tree], [behaviour], config.Mismatch(drop_above=0.5))
    assert dropped.turns[0].tolist() == [0.0, 0.0, 1.0]
    assert dropped.counts == {"mismatch/dropped_turns": 2.0}


def test_the_alarm_is_about_growth_not_about_the_level(caplog: pytest.LogCaptureFixture) -> None:
    section = config.Mismatch(alarm_window=3, alarm_rise=3.0, alarm_floor=1e-3)

    def run(values: list[float]) -> list[dict[str, float]]:
        caplog.clear()
        alarm = Alarm(section)
        return [alarm.note(step, value) for step, value in enumerate(values)]

    assert run([0.1] * 8)[-1] == {"mismatch/trend": pytest.approx(1.0)}
    assert caplog.text == ""
    assert run([1e-6] * 3 + [1e-4] * 3)[-1]["mismatch/trend"] == pytest.approx(100.0)
    assert caplog.text == "", "still far too small to matter"
    noted = run([0.011, 0.012, 0.010, 0.02, 0.9, 0.03, 0.036, 0.038])
    assert [bool(values) for values in noted] == [False] * 5 + [True] * 3
    assert noted[-1] == {"mismatch/trend": pytest.approx(0.036 / 0.011)}
    assert caplog.text.count("drift apart") == 2
    assert "step 7: engine and trainer drift apart: 3.6e-02 nats a token, 3.3 times" in caplog.text
    section = config.Mismatch(alarm_rise=0)
    assert run([0.01] * 3 + [1.0] * 9)[-1] == {}


def test_the_first_interrupt_ends_the_run_and_the_second_ends_it_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    session = Session(load_recipe(["steps=1"]))
    session.parallel = SimpleNamespace(rank=0)  # type: ignore[assignment]
    with session._cleanup:
        session._catch_signals()
        signal.raise_signal(signal.SIGINT)
        assert session._interrupted
        assert "the run ends behind this step" in capfd.readouterr().err
        signal.raise_signal(signal.SIGTERM)  # which is no reason to hurry
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_evaluation_questions_are_the_same_for_every_run() -> None:
    questions = [Question(str(i), "text", ("a",)) for i in range(50)]
    chosen = evaluation_sample(questions, 10)
    assert chosen == evaluation_sample(questions, 10)
    assert len({question.id for question in chosen}) == 10
    assert len(evaluation_sample(questions, 80)) == 50


def test_a_resumed_run_may_end_later_but_not_learn_otherwise() -> None:
    old = load_recipe(["steps=5"])
    check_same_run(old, load_recipe(["steps=9", "checkpoint.every_steps=2", "logging.report=false"]))
    with pytest.raises(RecipeError, match=r"resumed\. optimizer\.lr: 0\.0002 -> 0\.1$"):
        check_same_run(old, load_recipe(["steps=5", "optimizer.lr=0.1"]))


def test_errors_of_this_package_are_for_users_and_others_are_not() -> None:
    assert is_user_error(RecipeError("x"))
    assert is_user_error(TreeError("x"))
    assert is_user_error(FileNotFoundError("x"))
    assert not is_user_error(ValueError("x"))
    assert not is_user_error(ZeroDivisionError("x"))


def test_a_plan_says_what_is_missing(tmp_path: Path) -> None:
    recipe = load_recipe([f"task.data={tmp_path}", f"run={tmp_path / 'run'}", "steps=2"])
    problems = missing(recipe)
    assert [problem.split(":")[0] for problem in problems] == ["task.data"] * 3
    text = describe(recipe)
    assert "16 questions x 12 leaves = 192 trajectories" in text
    assert "1.8 M, " in text


def test_the_command_line_answers_a_mistake_in_plain_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "objective.radios=1", "steps=1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: objective.radios")
    assert "Traceback" not in said


@pytest.mark.parametrize("seed", range(5))
def test_metrics_of_random_trees_are_in_range(seed: int) -> None:
    values = rollout_metrics([random_tree(seed), random_tree(seed + 100)])
    for name in ("reward_mean", "exact_match", "no_answer_share", "zero_variance_share"):
        assert 0 <= values[f"rollout/{name}"] <= 1


def test_sleeping_is_measured_over_all_engines_and_said_in_words() -> None:
    used = iter([100 * 2**20, 40 * 2**20, 7, 9])
    one, other = NapCounters(), NapCounters(wake_seconds=2.0)
    with one.sleeping(lambda: next(used)):
        pass
    with other.sleeping(lambda: next(used)):  # somebody else took memory meanwhile
        pass
    found = nap_metrics([one, other])
    assert found["engine/freed_bytes"] == 60 * 2**20
    assert found["engine/wake_seconds"] == 2.0
    assert found["engine/sleep_seconds"] == max(one.sleep_seconds, other.sleep_seconds) > 0
    assert what_sleep_frees({**found, "engine/sleep_seconds": 1.0}) == (
        "engine: sleeping gives back 60 MiB; it takes 3.0 s with waking"
    )
    nothing = nap_metrics([NapCounters(sleep_seconds=0.1)])
    assert what_sleep_frees(nothing).endswith("(a CPU), so that sleep and wake are no-ops")
