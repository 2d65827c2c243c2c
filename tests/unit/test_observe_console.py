from __future__ import annotations

import io
import json
import random
import re
from pathlib import Path

import pytest
from fake_run import evaluation, fake_recipe, step_values, write_fake_run

from megatron_treeopsd.observe.comparison import compare
from megatron_treeopsd.observe.console import LOG_WIDTH, Console
from megatron_treeopsd.observe.wording import compact, duration, number, printable, shorten, signed, visible

pytestmark = pytest.mark.fast


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_has_plain_lines_that_can_be_read_alone(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(fake_recipe(tmp_path), file=out)
    console.header(parameters=1_770_000, attention="the fast one (it is there)")
    values = {
        "rollout/reward_mean": 0.4123, "rollout/exact_match": 0.4, "rollout/turns_mean": 3.1, "train/loss": -0.0123,
        "train/grad_norm": 0.43, "rollout/tokens_per_second": 1900.0, "span/rollout": 1.0, "span/rollout/prefill": 0.5,
        "span/update": 0.9, "span/other": 0.1,
    }  # fmt: skip
    console.step(11, training_seconds=37.5, values=values)
    console.step(12, training_seconds=75.0, values={k: v for k, v in values.items() if k != "train/loss"})
    console.close()
    text = out.getvalue()
    assert "\x1b" not in text
    header, _, steps = text.partition("\n\n")
    assert "factbook · treeopsd" in header
    assert "1.8M parameters" in header
    assert "attention the fast one (it is there)" in header
    assert "initialize_then_expand" in header
    assert "after 1000 steps or 2 min 30 s of training" in header
    first, second = steps.splitlines()
    assert re.sub(" +", " ", first) == (
        "step 11 38 s 25 % reward 0.412 turns 3.10 loss -0.0123 grad 0.430 1.9k tok/s rollout 50 update 45 other 5 %"
    )
    assert re.sub(" +", " ", second).startswith("step 12 75 s 50 % reward")
    assert re.search(r"loss –\s+grad", second)
    assert max(map(len, steps.splitlines())) <= LOG_WIDTH


def test_supervised_steps_show_what_they_have(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(fake_recipe(tmp_path, method="sft"), file=out)
    console.step(0, training_seconds=1.0, values=step_values(0, 10, random.Random(0), supervised=True))
    console.close()
    assert "loss" in out.getvalue()
    assert "reward" not in out.getvalue()


def test_a_terminal_gets_a_bar_that_goes_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    out = Terminal()
    console = Console(fake_recipe(tmp_path), file=out, width=120)
    with console.busy("evaluating 256 questions"):
        pass
    console.step(11, training_seconds=75.0, values={"train/loss": 0.5})
    console.close()
    console.close()
    text = out.getvalue()
    assert "evaluating 256 questions" in text
    assert "50 %, 12 steps, about 75 s of training left" in text
    assert text.rstrip().endswith("\x1b[2K")  # the last thing on the terminal is the bar's line being cleared


def test_the_end_tells_before_after_and_where_to_look(tmp_path: Path) -> None:
    run = write_fake_run(tmp_path)
    out = io.StringIO()
    console = Console(fake_recipe(tmp_path), file=out)
    console.evaluation(evaluation("before", 0, 0.0, 0.432))
    console.finish(json.loads(run.summary.read_text()), run)
    text = out.getvalue()
    assert "evaluation before training on 256 questions: exact match, greedy 43.2 %" in text
    assert re.search(r"exact match, greedy +43.2 % +71.1 % +\+27.9", text)
    assert re.search(r"no answer, greedy +6.8 % +3.5 % +−3.3", text)
    assert re.search(r"trained 2 min \d\d s: rollout \d\d.\d %, update .*other 0.\d %\n", text)
    assert "not on the training clock: startup 4.0 s, evaluation 21 s" in text
    assert f"treeopsd show {run.root}" in text
    assert f"tensorboard --logdir {run.root}/tensorboard" in text
    assert str(run.report) not in text  # there is none yet


def test_comparison_rows_and_verdicts() -> None:
    rows = {row.label: row for row in compare(evaluation("before", 0, 0.0, 0.5), evaluation("after", 9, 9.0, 0.4))}
    assert list(rows)[:3] == ["exact match, greedy", "exact match, sampled", "F1, greedy"]
    assert rows["exact match, greedy"].verdict == -1
    assert rows["exact match, greedy"].shown_change == "−10.0"
    assert rows["no answer, greedy"].verdict == -1  # more of it is worse
    assert rows["turns, greedy"].shown_change == "0.00"
    assert "exact match, 1 hop" in rows
    assert "exact match, 2 hops" in rows
    assert not {"questions", "step", "training seconds"} & rows.keys()
    assert compare(None, None) == []
    only = compare({"exact_match_greedy": 0.5}, None)[0]
    assert (only.shown(only.after), only.shown_change, only.verdict) == ("–", "", 0)
    hops = [row.label for row in compare({"hops_10": 0.1, "hops_2": 0.2}, None)]
    assert hops == ["exact match, 2 hops", "exact match, 10 hops"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.42, "0.42 s"), (0.999, "1.0 s"), (3.14, "3.1 s"), (38.4, "38 s"), (119.6, "2 min 00 s"), (252, "4 min 12 s"),
     (7199.6, "2 h 00 min"), (11100, "3 h 05 min")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (7, "7"), (7.25, "7.2"), (950, "950"), (999.8, "1k"), (1900, "1.9k"), (24_100, "24k"), (3.1e6, "3.1M")],
)
def test_counts(value: float, text: str) -> None:
    assert compact(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.41234, "0.412"),
        (-0.0123, "-0.0123"),
        (4.2e-5, "4.2e-05"),
        (1234.4, "1234"),
        (float("nan"), "nan"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_credits_have_no_negative_zero() -> None:
    assert [signed(value) for value in (0.42, -1.3, -0.001, 0.0)] == ["+0.42", "−1.30", "0.00", "0.00"]


def test_foreign_text_cannot_steer_a_terminal() -> None:
    assert visible("a\x1b[31mb\nc\td\u202ee\x00 ") == "a·[31mb ⏎ c de·"
    assert printable("a\n\ud800") == "a\n·"
    assert visible("日本 état") == "日本 état"
    assert shorten("abcdef", 4) == "abc…"
    assert shorten("abcd", 4) == "abcd"
