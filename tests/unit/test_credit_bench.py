"""tools/bench/credit.py on synthetic trees with known answers."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import WhitespaceSplit

from megatron_treeopsd import recipes
from megatron_treeopsd.environment.factbook.questions import Hop
from megatron_treeopsd.tree import ROOT, Question, RolloutTree, Turn, save_trees

pytestmark = pytest.mark.fast

WORDS = [
    "<unk>", "<search>", "</search>", "<answer>", "</answer>",
    "capital", "mali", "partner", "export", "bamako", "gold",
]  # fmt: skip
CHAIN = (Hop("forward", "export partner", "Mali", "China"), Hop("forward", "capital", "China", "Beijing"))


def word_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.normalizer = Lowercase()
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return tokenizer


TOKENIZER = word_tokenizer()


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "tools" / "bench" / "credit.py"
    spec = importlib.util.spec_from_file_location("bench_credit", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def turn(parent: int, text: str, reward: float | None = None, multiplicity: int = 1) -> Turn:
    ids = [WORDS.index(word) for word in text.split()]
    action = "answer" if "<answer>" in text else "search"
    return Turn(
        parent, ids, [-0.5] * len(ids), action=action, terminal=reward is not None, reward=reward,
        multiplicity=multiplicity,
    )  # fmt: skip


def two_hop_tree(rewards: tuple[float, float, float] = (1.0, 0.0, 0.0)) -> RolloutTree:
    """A gold search (drawn twice) that leads to a right and a wrong answer; another one that leads to a wrong one."""
    right, wrong, lost = rewards
    return RolloutTree(
        Question("q3", "text", ("beijing",), {"hops": 2, "chain": [list(hop) for hop in CHAIN]}),
        [1],
        [
            turn(ROOT, "<search> export partner mali </search>", multiplicity=2),
            turn(0, "<answer> gold </answer>", right),
            turn(0, "<answer> bamako </answer>", wrong),
            turn(ROOT, "<search> capital mali </search>"),
            turn(3, "<answer> mali </answer>", lost),
        ],
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    checkpoint = tmp_path / "policy"
    checkpoint.mkdir()
    TOKENIZER.save(str(checkpoint / "tokenizer.json"))
    root = tmp_path / "run"
    root.mkdir()
    recipes.save_recipe(recipes.load_recipe([f"model.checkpoint={checkpoint}", "steps=1"]), root / "recipe.yaml")
    save_trees(root / "trees" / "step_000001.safetensors", [two_hop_tree(), two_hop_tree((1.0, 1.0, 1.0))])
    save_trees(root / "trees" / "step_000002.safetensors", [two_hop_tree((1.0, 1.0, 0.0)), two_hop_tree()])
    return root


def test_auc_counts_pairs(bench: ModuleType) -> None:
    rng = np.random.default_rng(0)
    gold, other = rng.integers(0, 5, 40).astype(float), rng.integers(-2, 4, 60).astype(float)
    pairs = (gold[:, None] > other).mean() + 0.5 * (gold[:, None] == other).mean()
    assert bench.auc(gold, other) == pytest.approx(pairs, rel=1e-14)
    assert bench.auc(np.array([1.0, 2]), np.array([0.0])) == 1
    assert bench.auc(np.array([0.0]), np.array([0.0])) == 0.5


def test_cohens_d_by_hand(bench: ModuleType) -> None:
    assert bench.cohens_d(np.array([1.0, 3]), np.array([0.0, 0, 3, 3])) == pytest.approx(0.5 / np.sqrt(3.25 / 2))
    assert bench.cohens_d(np.array([0.1] * 3), np.array([0.7] * 3)) is None  # their computed variance is not zero


def test_searches_are_judged_by_the_gold_chain(bench: ModuleType) -> None:
    assert list(bench.judge_searches(two_hop_tree(), TOKENIZER)) == [(0, True), (3, False)]


def test_measures_of_a_known_tree(bench: ModuleType) -> None:
    """Advantages of rewards 1, 0, 0 are sqrt 2 and twice -1/sqrt 2. The gold search has the mean of the first two."""
    report = bench.measure([two_hop_tree(), two_hop_tree((0.0, 0.0, 0.0))], TOKENIZER)
    assert list(report) == [2]
    group = report[2]
    assert group.questions == 2
    assert group.zero_variance_share == 0.5
    assert set(group.rules) == set(bench.RULES)
    assert len(group.rules) == 9
    for name, result in group.rules.items():
        assert (result.gold, result.other) == (2, 1)  # the gold search was drawn twice
        assert result.auc == 1
        assert result.cohens_d is None  # neither group varies
        if "listwise" not in name:
            assert result.gold_mean == pytest.approx(1 / np.sqrt(8), abs=1e-5)
            assert result.other_mean == pytest.approx(-1 / np.sqrt(2), abs=1e-5)


def test_command_reads_a_run_and_ends_with_json(
    bench: ModuleType, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main([str(run), "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    group = json.loads(last)["runs"][str(run)]["2"]
    assert (group["questions"], group["zero_variance_share"]) == (4, 0.25)
    assert (group["rules"]["outcome"]["gold"], group["rules"]["outcome"]["other"]) == (6, 3)
    assert any(line.split()[:3] == ["likelihood", "pointwise", "1.000"] for line in lines)

    assert bench.main([str(run), "--step", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["runs"][str(run)]["2"]["questions"] == 2


def test_mistakes_are_explained(
    bench: ModuleType, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def message(*words: str) -> str:
        assert bench.main([*words]) == 2
        return capsys.readouterr().err

    assert "does not exist" in message(str(tmp_path / "nowhere"))
    assert "steps [1, 2]" in message(str(run), "--step", "9")
    tree = two_hop_tree()
    tree.question.metadata.pop("chain")
    save_trees(run / "trees" / "step_000003.safetensors", [tree])
    assert "question q3: its metadata has no 'chain'" in message(str(run), "--step", "3")
    tree = two_hop_tree()
    tree.turns[3].sampled_ids = [5]
    tree.turns[3].sampled_logprobs = [-1.0]
    save_trees(run / "trees" / "step_000003.safetensors", [tree])
    assert "turn 3 was a search but now reads 'capital'" in message(str(run), "--step", "3")
    (tmp_path / "policy" / "tokenizer.json").unlink()
    assert "tokenizer.json" in message(str(run))
