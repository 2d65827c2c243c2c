"""Credit rules: hand-computed trees for every option, and properties on random trees."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import random_tree

from megatron_treeopsd import config
from megatron_treeopsd.credit import Outcome, TreeBackup, build
from megatron_treeopsd.credit.outcome import advantages, leaf_advantages, leaves_below
from megatron_treeopsd.credit.tree_backup import backed_up_values, sibling_weights
from megatron_treeopsd.tree import ROOT, Question, RolloutTree, TreeError, Turn

pytestmark = pytest.mark.fast

BACKUPS = ("likelihood", "uniform", "surprisal", "leaves")
LN2, LN3 = math.log(2), math.log(3)


def turn(parent: int, logprobs: list[float], reward: float | None = None, multiplicity: int = 1) -> Turn:
    return Turn(
        parent,
        [1] * len(logprobs),
        logprobs,
        terminal=reward is not None,
        reward=reward,
        multiplicity=multiplicity,
    )


def tree_of(*turns: Turn) -> RolloutTree:
    return RolloutTree(Question("q7", "text", ("a",)), [1], list(turns))


def forked() -> RolloutTree:
    """Rewards 1, 0, 0, drawn once, once and twice.

    turn 0 ── turn 1 (reward 1, probability 1/3 a token)
          └── turn 2 (reward 0, probability 1 a token)
    turn 3 (reward 0, drawn twice)
    """
    return tree_of(
        turn(ROOT, [-LN2]),
        turn(0, [-LN3, -LN3], 1.0),
        turn(0, [0.0], 0.0),
        turn(ROOT, [-LN2, -LN2, -LN2], 0.0, 2),
    )


# ----------------------------------------------------------------------------------------------------------- outcome
def test_advantages_by_hand() -> None:
    """Rewards 1, 0, 0, 0: mean 1/4, population standard deviation sqrt(3)/4."""
    rewards, deviation = np.array([1.0, 0, 0, 0]), math.sqrt(3) / 4
    assert advantages(rewards, "mean_std") == pytest.approx(
        [0.75 / (deviation + 1e-6), *[-0.25 / (deviation + 1e-6)] * 3], rel=1e-15
    )
    assert advantages(rewards, "mean").tolist() == [0.75, -0.25, -0.25, -0.25]
    assert advantages(rewards, "leave_one_out") == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3], rel=1e-15)
    assert advantages(rewards, "none").tolist() == [1, 0, 0, 0]


def test_leave_one_out_is_the_mean_of_the_others() -> None:
    rewards = np.random.default_rng(0).normal(size=7)
    others = [reward - np.delete(rewards, i).mean() for i, reward in enumerate(rewards)]
    assert advantages(rewards, "leave_one_out") == pytest.approx(others, abs=1e-14)


@pytest.mark.parametrize("baseline", ["mean_std", "mean", "leave_one_out"])
def test_equal_rewards_give_exact_zeros(baseline: str) -> None:
    for rewards in ([], [0.3], [0.1] * 3, [1.0] * 12):  # the mean of three 0.1 is not 0.1
        assert advantages(np.array(rewards), baseline).tolist() == [0.0] * len(rewards)


def test_an_unknown_baseline_is_refused() -> None:
    with pytest.raises(ValueError, match="leave_one_out"):
        advantages(np.array([0.0, 1.0]), "median")


def test_outcome_of_a_shared_turn_is_the_mean_over_its_trajectories() -> None:
    """Four trajectories; turn 0 lies on those with advantages 3/4 and -1/4."""
    assert Outcome("mean")(forked()).tolist() == [0.25, 0.75, -0.25, -0.25]
    assert Outcome("none")(forked()).tolist() == [0.5, 1.0, 0.0, 0.0]


def test_outcome_of_chains_is_the_advantage_of_each_chain() -> None:
    tree = tree_of(turn(ROOT, [-1.0]), turn(0, [-1.0], 1.0), turn(ROOT, [-1.0], 0.0), turn(ROOT, [-1.0], 0.0))
    high, low = advantages(np.array([1.0, 0, 0]), "mean_std")[:2]
    assert Outcome("mean_std")(tree).tolist() == [high, high, low, low]


def test_leaf_counts() -> None:
    assert leaves_below(forked()).tolist() == [2, 1, 1, 2]


# ------------------------------------------------------------------------------------------------------- tree back-up
@pytest.mark.parametrize(
    ("backup", "inner", "root"),
    [
        # turns 1 and 2 weigh 1/3 : 1, turns 0 and 3 weigh 1/2 : 2 * 1/2
        ("likelihood", [1 / 4, 3 / 4], [1 / 3, 2 / 3]),
        ("uniform", [1 / 2, 1 / 2], [1 / 3, 2 / 3]),
        ("surprisal", [3 / 4, 1 / 4], [1 / 3, 2 / 3]),
        ("leaves", [1 / 2, 1 / 2], [1 / 2, 1 / 2]),
    ],
)
def test_backup_by_hand(backup: str, inner: list[float], root: list[float]) -> None:
    tree = forked()
    high, low = advantages(np.array([1.0, 0, 0, 0]), "mean_std")[:2]
    assert sibling_weights(tree, backup) == pytest.approx([root[0], *inner, root[1]], rel=1e-14)
    middle = inner[0] * high + inner[1] * low
    top = root[0] * middle + root[1] * low
    assert TreeBackup(backup, "pointwise")(tree) == pytest.approx([middle, high, low, low], rel=1e-13)
    assert TreeBackup(backup, "listwise")(tree) == pytest.approx(
        [middle - top, high - middle, low - middle, low - top], rel=1e-12
    )


def test_a_turn_without_sampled_tokens_weighs_like_its_siblings_and_passes_its_value_through() -> None:
    """Siblings have lambda -1 (drawn twice) and -4: the empty one gets their mean over draws, -2."""
    tree = tree_of(
        turn(ROOT, [], multiplicity=3),
        turn(0, [-9.0], 1.0),
        turn(ROOT, [-1.0, -1.0], 0.0, 2),
        turn(ROOT, [-4.0], 0.0),
    )
    raw = np.array([3 * math.exp(-2), 2 * math.exp(-1), math.exp(-4)])
    assert sibling_weights(tree, "likelihood")[[0, 2, 3]] == pytest.approx(raw / raw.sum(), rel=1e-14)
    credit = TreeBackup()(tree)
    assert credit[0] == credit[1]


def test_siblings_without_any_sampled_token_weigh_alike() -> None:
    tree = tree_of(turn(ROOT, [], 1.0), turn(ROOT, [], 0.0))
    assert sibling_weights(tree, "likelihood").tolist() == [0.5, 0.5]


def test_very_unlikely_turns_do_not_underflow() -> None:
    tree = tree_of(turn(ROOT, [-2000.0], 1.0), turn(ROOT, [-2000.0 - LN3], 0.0))
    assert sibling_weights(tree, "likelihood") == pytest.approx([3 / 4, 1 / 4], rel=1e-9)
    assert sibling_weights(tree, "surprisal") == pytest.approx([1 / 4, 3 / 4], rel=1e-9)


def test_deep_chains_need_no_recursion() -> None:
    deep = [turn(index - 1, [-0.5]) for index in range(5000)]
    tree = tree_of(*deep, turn(4999, [-0.5], 1.0), turn(ROOT, [-0.5], 0.0))
    credit = TreeBackup()(tree)
    assert (credit[:5001] == credit[5000]).all()  # passed through unchanged, to the last bit
    assert credit[5000] == pytest.approx(1 / (1 + 2e-6), rel=1e-12)
    assert (TreeBackup(mode="listwise")(tree)[1:5001] == 0).all()
    assert Outcome()(tree)[0] == credit[0]


@pytest.mark.parametrize("rule", [Outcome(), Outcome("leave_one_out"), *[TreeBackup(b, "listwise") for b in BACKUPS]])
def test_zero_variance_and_empty_trees_give_zeros(rule: Outcome | TreeBackup) -> None:
    tree = forked()
    for index in tree.terminals():
        tree.turns[index].reward = 0.1
    assert rule(tree).tolist() == [0.0] * 4
    assert rule(tree_of()).tolist() == []


@pytest.mark.parametrize("rule", [Outcome("none"), TreeBackup()])
def test_bad_trees_are_refused(rule: Outcome | TreeBackup) -> None:
    missing, infinite, unfinished = forked(), forked(), forked()
    missing.turns[1].reward = None
    infinite.turns[1].reward = math.nan
    unfinished.turns.append(turn(0, [-1.0]))
    for tree, message in ((missing, "turn 1 has no reward"), (infinite, "finite"), (unfinished, "turn 4 is not term")):
        with pytest.raises(TreeError, match=f"question q7: .*{message}"):
            rule(tree)


def test_log_probs_that_are_not_finite_are_refused() -> None:
    tree = forked()
    tree.turns[2].sampled_logprobs = [-math.inf]
    with pytest.raises(TreeError, match="question q7: the log-probs of turn 2"):
        TreeBackup()(tree)


def test_sections_build_their_rules() -> None:
    assert build(config.Outcome(name="outcome", baseline="leave_one_out")) == Outcome("leave_one_out")
    section = config.TreeBackup(name="tree_backup", backup="leaves", mode="listwise")
    assert build(section) == TreeBackup("leaves", "listwise")
    assert build(config.Outcome(name="outcome")) == Outcome()
    assert build(config.TreeBackup(name="tree_backup")) == TreeBackup()


# --------------------------------------------------------------------------------------------------------- properties
@st.composite
def trees(draw: st.DrawFn) -> RolloutTree:
    """Any shape, with multiplicities and turns without sampled tokens."""
    count = draw(st.integers(1, 14))
    parents = [draw(st.integers(ROOT, index - 1)) for index in range(count)]
    numbers = st.floats(-8, 0, allow_nan=False)
    turns = []
    for index, parent in enumerate(parents):
        logprobs = draw(st.lists(numbers, max_size=3))
        reward = None if index in parents else draw(st.sampled_from([0.0, 0.25, 1.0]))
        turns.append(turn(parent, logprobs, reward, draw(st.integers(1, 3))))
    return tree_of(*turns)


ALL_RULES = [Outcome(), Outcome("mean"), *[TreeBackup(b, m) for b in BACKUPS for m in ("pointwise", "listwise")]]


def plain_value(tree: RolloutTree, backup: str, node: int, leaf: np.ndarray) -> float:
    """V by recursion, child by child, as the definition reads."""
    children = tree.children()[node]
    if not children:
        return float(leaf[node])

    def draws_below(index: int) -> int:
        item = tree.turns[index]
        return item.multiplicity if item.terminal else sum(draws_below(c) for c in tree.children()[index])

    known = [tree.turns[c] for c in children if tree.turns[c].sampled_ids]
    draws = sum(item.multiplicity for item in known)
    fallback = sum(item.multiplicity * item.mean_logprob for item in known) / draws if known else 0.0
    weights = []
    for c in children:
        item = tree.turns[c]
        lam = item.mean_logprob if item.sampled_ids else fallback
        power = {"likelihood": 1, "uniform": 0, "surprisal": -1, "leaves": 0}[backup]
        weights.append(draws_below(c) if backup == "leaves" else item.multiplicity * math.exp(power * lam))
    values = [plain_value(tree, backup, c, leaf) for c in children]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


@settings(max_examples=60, deadline=None)
@given(trees(), st.sampled_from(BACKUPS))
def test_backup_equals_the_recursive_definition(tree: RolloutTree, backup: str) -> None:
    leaf = leaf_advantages(tree, "mean_std")
    values = [plain_value(tree, backup, node, leaf) for node in [*range(len(tree.turns)), ROOT]]
    assert TreeBackup(backup)(tree) == pytest.approx(values[:-1], abs=1e-12)
    above = [values[item.parent] for item in tree.turns]
    assert TreeBackup(backup, "listwise")(tree) == pytest.approx(np.subtract(values[:-1], above), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(trees(), st.sampled_from(BACKUPS))
def test_values_are_convex_combinations_and_listwise_credits_sum_to_zero(tree: RolloutTree, backup: str) -> None:
    leaf = leaf_advantages(tree, "mean_std")
    weights = sibling_weights(tree, backup)
    values = backed_up_values(tree, leaf, weights)
    listwise = TreeBackup(backup, "listwise")(tree)
    for node, children in zip([*range(len(tree.turns)), ROOT], tree.children(), strict=True):
        below = [i for i in tree.terminals() if node == ROOT or node in tree.path(i)]
        assert min(leaf[below]) - 1e-12 <= values[node] <= max(leaf[below]) + 1e-12
        if children:
            assert weights[children].sum() == pytest.approx(1, abs=1e-12)
            assert (weights[children] * listwise[children]).sum() == pytest.approx(0, abs=1e-12)
    assert np.abs(values).max() <= math.sqrt(max(tree.leaf_count - 1, 0)) + 1e-12


@settings(max_examples=60, deadline=None)
@given(trees())
def test_outcome_equals_the_mean_over_flattened_trajectories(tree: RolloutTree) -> None:
    leaf = leaf_advantages(tree, "mean_std")
    for index, credit in enumerate(Outcome()(tree)):
        through = [
            leaf[end]
            for end in tree.terminals()
            if index in tree.path(end)
            for _ in range(tree.turns[end].multiplicity)
        ]
        assert credit == pytest.approx(np.mean(through), abs=1e-12)
    assert TreeBackup("leaves")(tree) == pytest.approx(Outcome()(tree), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(trees(), st.sampled_from(ALL_RULES), st.integers(0, 2**32))
def test_credit_does_not_depend_on_the_order_of_turns(tree: RolloutTree, rule: Outcome | TreeBackup, seed: int) -> None:
    rng, order = random.Random(seed), []
    ready = list(tree.children()[ROOT])
    while ready:
        index = ready.pop(rng.randrange(len(ready)))
        order.append(index)
        ready += tree.children()[index]
    place = {old: new for new, old in enumerate(order)} | {ROOT: ROOT}
    moved = copy.deepcopy(tree)
    moved.turns = [copy.copy(tree.turns[old]) for old in order]
    for item in moved.turns:
        item.parent = place[item.parent]
    assert rule(moved) == pytest.approx(rule(tree)[order], abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(trees(), st.sampled_from(ALL_RULES), st.data())
def test_merging_identical_subtrees_equals_counting_them_twice(
    tree: RolloutTree, rule: Outcome | TreeBackup, data: st.DataObject
) -> None:
    top = data.draw(st.integers(0, len(tree.turns) - 1))
    subtree = [index for index in range(len(tree.turns)) if top in tree.path(index)]
    merged, split = copy.deepcopy(tree), copy.deepcopy(tree)
    for index in subtree:
        merged.turns[index].multiplicity *= 2
    twin = {index: len(tree.turns) + place for place, index in enumerate(subtree)}
    for index in subtree:
        item = copy.copy(tree.turns[index])
        item.parent = twin.get(item.parent, item.parent)
        split.turns.append(item)
    expected = rule(merged)
    assert rule(split) == pytest.approx([*expected, *expected[subtree]], abs=1e-11)


@pytest.mark.parametrize("seed", range(5))
def test_trees_as_expansions_grow_them(seed: int) -> None:
    tree = random_tree(seed)
    bound = math.sqrt(tree.leaf_count - 1)
    for rule in ALL_RULES:
        credit = rule(tree)
        assert credit.shape == (len(tree.turns),)
        assert credit.dtype == np.float64
        assert np.abs(credit).max() <= 2 * bound
