"""Whole runs: what they leave behind, for every method and for several processes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from runs import ROOT, metrics, trained, treeopsd, without_clocks, words

from megatron_treeopsd.observe.turn_notes import TurnNotes
from megatron_treeopsd.recipes import load_recipe, read_recipe
from megatron_treeopsd.tree import load_trees

METHODS = sorted(path.stem for path in (ROOT / "launch" / "recipes" / "method").glob("*.yaml"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, factbook: Path) -> Path:
    folder = tmp_path_factory.mktemp("run") / "treeopsd"
    trained(folder, factbook, "steps=3", "evaluation.questions=16", "logging.trees_every_steps=2")
    return folder


def test_summary_has_what_comparisons_read(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["method"] == "treeopsd"
    assert summary["seed"] == 1
    assert summary["steps"] == 3
    assert summary["questions_evaluated"] == 16
    for when in ("before", "after"):
        assert 0 <= summary[f"exact_match_{when}"] <= 1
    assert summary["generated_tokens"] > 0
    assert summary["cached_tokens"] > 0
    assert summary["versions"]["megatron-core"] == "0.19.2"
    assert sum(summary["spans"].values()) == pytest.approx(summary["train_seconds"])
    assert {"rollout", "credit", "behaviour", "update", "publish", "other"} <= set(summary["spans"])
    assert summary["train_seconds"] < summary["total_seconds"]


def test_spans_partition_each_step(run: Path) -> None:
    rows = metrics(run)
    assert [row["step"] for row in rows] == [0, 1, 2]
    clock = 0.0
    for row in rows:
        seconds = sum(value for name, value in row.items() if name.startswith("span/"))
        assert row["training_seconds"] - clock == pytest.approx(seconds, abs=0.05)
        clock = row["training_seconds"]


def test_metrics_tell_what_was_rolled_out_and_trained(run: Path) -> None:
    for row in metrics(run):
        assert row["rollout/leaves"] == 4 * 12
        assert row["rollout/generated_tokens"] > 0
        assert row["train/optimizer_steps"] in (0, 2, 4)  # two epochs; a mini-batch may have nothing to train
        assert row["mismatch/logprob_abs_max"] < 1e-5
    assert any(row.get("train/grad_norm", 0) > 0 for row in metrics(run))


def test_trees_of_sampled_steps_can_be_read_and_shown(run: Path) -> None:
    trees = load_trees(run / "trees" / "step_000002.safetensors")
    assert len(trees) == 4
    assert [tree.leaf_count for tree in trees] == [12] * 4
    notes = TurnNotes.read(run / "trees" / "step_000002.json", trees)
    for tree, turns in zip(trees, notes.trees, strict=True):
        varied = np.ptp(tree.leaf_rewards()) > 0
        for turn, note in zip(tree.turns, turns, strict=True):
            assert note.credit is not None
            assert (note.target is not None and note.log_ratio is not None) == (varied and bool(turn.sampled_ids))
    shown = treeopsd("show", str(run), "--tree", "0")
    assert shown.returncode == 0, shown.stderr
    assert trees[0].question.id in shown.stdout
    assert "✓" in shown.stdout or "✗" in shown.stdout


def test_the_report_opens_offline(run: Path) -> None:
    page = (run / "report.html").read_text()
    assert "<svg" in page
    for outside in ('src="http', "src='http", 'href="http', "@import", "url(http"):
        assert outside not in page


def test_the_recipe_of_the_run_is_kept(run: Path) -> None:
    recipe = read_recipe(run / "recipe.yaml")
    assert recipe.steps == 3
    assert recipe.objective == load_recipe(["steps=3"]).objective


@pytest.mark.methods
@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs(method: str, factbook: Path, tmp_path: Path) -> None:
    summary = trained(tmp_path / "run", factbook, f"method={method}", "steps=2", "optimizer.warmup_steps=0")
    assert summary["method"] == method
    assert summary["steps"] == 2
    assert all(np.isfinite(value) for row in metrics(tmp_path / "run") for value in row.values())


def test_an_engine_that_only_evaluates_sleeps_in_between(factbook: Path, tmp_path: Path) -> None:
    """Without rollouts nothing is published but for evaluations, each of which finds a sleeping engine."""
    summary = trained(
        tmp_path / "run", factbook, "method=sft", "steps=2", "optimizer.warmup_steps=0", "evaluation.questions=2",
        "evaluation.every_steps=1",
    )  # fmt: skip
    assert [(e["when"], e["step"]) for e in summary["evaluations"]] == [
        ("before", 0), ("during", 1), ("during", 2), ("after", 2),
    ]  # fmt: skip
    assert [row["engine/sleep_seconds"] > 0 for row in metrics(tmp_path / "run")] == [True, True]


def test_a_budget_ends_the_run(factbook: Path, tmp_path: Path) -> None:
    summary = trained(tmp_path / "run", factbook, "budget=4")
    longest = max(
        sum(value for name, value in row.items() if name.startswith("span/")) for row in metrics(tmp_path / "run")
    )
    assert summary["steps"] > 0
    assert 4 <= summary["train_seconds"] <= 4 + longest + 2


def test_a_dry_run_prints_the_recipe_and_starts_nothing(factbook: Path, tmp_path: Path) -> None:
    done = treeopsd("train", *words(tmp_path / "run", factbook, "steps=5", "--dry-run"))
    assert done.returncode == 0, done.stderr
    assert "trunks: 4" in done.stdout
    assert "48 trajectories" in done.stdout
    assert "parameters" in done.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("layout", ["layout.ep=2", "layout.tp=2", "layout.ep=1", "layout.pp=2"])
def test_two_processes_do_what_one_does(layout: str, factbook: Path, tmp_path: Path) -> None:
    """The same trees in the first step, the same losses to rounding. pp=2 needs an even number of layers: refused."""
    run = tmp_path / "two"
    if layout == "layout.pp=2":
        done = treeopsd("train", *words(run, factbook, "steps=1", layout), processes=2)
        assert done.returncode != 0
        assert "layout.pp=2 does not divide" in done.stderr
        return
    trained(tmp_path / "one", factbook, "steps=1")
    trained(run, factbook, "steps=1", layout, processes=2)
    (one,), (two,) = without_clocks(metrics(tmp_path / "one")), without_clocks(metrics(run))
    assert one.keys() == two.keys()
    # Two engines share fewer prefixes between questions than one; shares count turns whose ratio is one up to rounding.
    skipped = ("rollout/cached_tokens", "rollout/computed_prompt_tokens")
    for name, value in one.items():
        if name in skipped or (name.startswith("objective/") and name.endswith("_share")):
            continue
        assert two[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def test_tokens_go_to_the_engines_experts(factbook: Path, tmp_path: Path) -> None:
    """Compared, hardly a route differs in float32; replayed, none does, and a first optimizer step is as it was."""
    rows = {}
    for routes in ("ignore", "compare", "replay"):
        run = tmp_path / routes
        once = ("update.epochs=1", "update.mini_batches=1")  # later ones replay routes of a policy that has changed
        trained(run, factbook, "steps=2", "layout.ep=2", f"mismatch.routes={routes}", *once, processes=2)
        rows[routes] = without_clocks(metrics(run))
    for plain, compared, replayed in zip(rows["ignore"], rows["compare"], rows["replay"], strict=True):
        differ = compared.pop("mismatch/routes_differ_share")
        assert 0 <= differ < 1e-3
        assert compared.pop("mismatch/routes_replayed_share") == 1 - differ
        assert compared == plain
        assert replayed.pop("mismatch/routes_differ_share") < 1e-3
        assert replayed.pop("mismatch/routes_replayed_share") == 1
        assert replayed.keys() == plain.keys()
        assert replayed["train/loss"] == pytest.approx(plain["train/loss"], rel=1e-3, abs=1e-5)


def test_the_long_variant_runs(tmp_path: Path) -> None:
    """Up to 12 turns, 3 to 6 hops, one passage a search; its data are made by the command that a user types."""
    data = tmp_path / "data"
    made = treeopsd("prepare", "task=factbook_long", f"task.data={data}")
    assert made.returncode == 0, made.stderr
    summary = trained(tmp_path / "run", data, "task=factbook_long", "steps=1")
    assert summary["steps"] == 1
    (row,) = metrics(tmp_path / "run")
    assert row["rollout/turns_mean"] > 3
