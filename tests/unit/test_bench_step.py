"""The throughput benchmark without its arms: the exchange with a process, the arithmetic, what it writes."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_treeopsd.config import Chains
from megatron_treeopsd.recipes import load_recipe

pytestmark = pytest.mark.fast

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"


@pytest.fixture(scope="module")
def bench() -> Any:
    return argparse.Namespace(**runpy.run_path(str(BENCH / "step.py")))


ARM = """
import json, sys
print("{'a library': 'talks'}")
print(json.dumps({"ready": True, "versions": {"x": "1"}}), flush=True)
for number in range(2):
    sys.stdin.readline()
    print(json.dumps({"number": number}), flush=True)
print("oh no", file=sys.stderr)
"""


def test_an_arm_takes_a_step_when_it_is_told_to(bench: Any, tmp_path: Path) -> None:
    with bench.Arm("x", [sys.executable, "-c", ARM], tmp_path / "log") as arm:
        assert arm.versions == {"x": "1"}
        assert [arm.step(), arm.step()] == [{"number": 0}, {"number": 1}]


def test_an_arm_that_ends_is_named_with_its_last_words(bench: Any, tmp_path: Path) -> None:
    with bench.Arm("x", [sys.executable, "-c", ARM], tmp_path / "log") as arm:
        arm.step()
        arm.step()
        with pytest.raises(bench.BenchmarkError, match=r"(?s)arm x ended with status 0.*oh no"):
            arm.step()


def test_an_arm_that_does_not_start(bench: Any, tmp_path: Path) -> None:
    arm = bench.Arm("trl", [sys.executable, "-c", "import no_such_library"], tmp_path / "log")
    with pytest.raises(bench.BenchmarkError, match="no_such_library"), arm:
        pass


def test_ratios_are_medians_of_pairs_of_seconds_per_token(bench: Any) -> None:
    """Pairs: (4 s / 200) / (1 s / 100) = 2; (3 / 100) / (1 / 100) = 3; (4 / 100) / (2 / 200) = 4."""
    steps = {
        "ours": [bench.Step(1.0, 2.0, 100), bench.Step(1.0, 2.0, 100), bench.Step(2.0, 2.0, 200)],
        "trl": [bench.Step(4.0, 2.0, 200), bench.Step(3.0, 2.0, 100), bench.Step(4.0, 2.0, 100)],
    }
    found = bench.summarise(steps, spans={"rollout": 0.5, "update": 2.0}, epochs=3)
    assert found["ours_over_trl_pairs"] == [2.0, 3.0, 4.0]
    assert found["ours_over_trl"] == 3.0
    assert found["ours_over_trl_wall"] == 1.0, "wall clock: 0.5, 1 and 2"
    assert found["generated_tokens_per_step"]["ours"] == pytest.approx(400 / 3, abs=0.05)
    assert found["generated_tokens_per_second"] == pytest.approx(400 / 3 / 0.5, abs=0.05)
    assert found["trained_tokens_per_second"] == pytest.approx(3 * 400 / 3 / 2.0, abs=0.05)
    assert "3.0 (median of 3 pairs, 2.0 to 4.0)" in bench.table(found | {"versions": {"trl": "1"}})
    json.dumps(found)


def test_both_arms_are_asked_for_the_same_step(bench: Any, tmp_path: Path) -> None:
    options = bench.options_from(["--questions", "4", "--chains", "3", "--mini-batches", "2", "seed=5"])
    recipe = load_recipe(bench.recipe_words(options, tmp_path / "run"))
    assert isinstance(recipe.expansion, Chains)
    assert (recipe.expansion.chains, recipe.update.questions_per_step, recipe.seed) == (3, 4, 5)
    assert (recipe.task.max_turns, recipe.update.drop_zero_variance, recipe.steps) == (1, False, options.steps + 1)


def test_a_mistake_in_a_word_is_explained(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["sed=1"]) == 1
    assert "sed: unknown key, did you mean seed?" in capsys.readouterr().err
