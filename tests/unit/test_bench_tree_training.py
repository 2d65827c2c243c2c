"""The benchmark of tree training: its trees, its operation counts, what it prints."""

from __future__ import annotations

import argparse
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.fast

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "bench" / "tree_training.py"


@pytest.fixture(scope="module")
def bench() -> Any:
    return argparse.Namespace(**runpy.run_path(str(SCRIPT)))


def test_operations_by_hand(bench: Any) -> None:
    """One layer: hidden 8, 2 heads and 1 group of width 4, 4 experts of 6 of which 2 are active, vocabulary 10."""
    shape = bench.Shape(
        tokens=20, turns=4, hidden=8, heads=2, groups=1, width=4, layers=1, experts=4, active=2, expert_size=6,
        vocabulary=10,
    )  # fmt: skip
    tree, _ = bench.arms([bench.sample_tree(shape, 0)])
    q, k, v, out = 8 * 8, 8 * 4, 8 * 4, 8 * 8
    row = 2 * (q + k + v + out + 8 * 4 + 2 * (3 * 8 * 6))
    pair = 2 * (4 + 4) * 2  # a product of a query and a key, one of a weight and a value, in two heads
    edges, rows, pairs = tree.edge_labels.numel(), tree.token_count, tree.pair_count
    everything, attention = shape.flop(tree)
    assert attention == 3.5 * pair * pairs
    assert everything == attention + 3 * (row * rows + 2 * 8 * 10 * edges)


def test_ratios_are_those_of_the_arithmetic(bench: Any) -> None:
    """PERFORMANCE.md §B, four trunks, two forks of each, prompt of a tenth: 1.644 in tokens and 1.329 in pairs."""
    shape = bench.Shape(tokens=2000, turns=40, hidden=8, heads=1)
    tree, flat = bench.arms([bench.sample_tree(shape, 0)])
    assert flat.token_count / tree.token_count == pytest.approx(1.644, rel=0.01)
    assert flat.pair_count / tree.pair_count == pytest.approx(1.329, rel=0.01)
    assert flat.query_offsets.numel() - 1 == 12
    assert float(flat.turns.weight.sum()) == pytest.approx(float(tree.turns.weight.sum()), rel=1e-5)


def test_quick_run(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--quick", "--repeats", "2", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (case,) = json.loads(lines[-1])["cases"]
    assert case["token_ratio"] > case["flop_ratio"] > case["pair_ratio"] > 1
    assert 0 < case["attention_share"] < 1
    assert case["cpu_ratio"] > 0.5
    assert case["largest_difference"] < 1e-4
    assert "flattened / tree" in lines[0]
