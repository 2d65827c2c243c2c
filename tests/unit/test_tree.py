"""Rollout trees: building, merging, checking, and the file format."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from megatron_treeopsd.tree import FORMAT, ROOT, Question, RolloutTree, TreeError, Turn, load_trees, save_trees

pytestmark = pytest.mark.fast


def turn(parent: int, sampled: list[int], observation: list[int] | None = None, **fields: Any) -> Turn:
    observation = [] if observation is None else observation
    return Turn(parent, sampled, [-0.5] * len(sampled), observation, **{"terminal": not observation, **fields})


def example() -> RolloutTree:
    """The worked example of tree.py's docstring."""
    tree = RolloutTree(Question("q", "capital of france", ("paris",), {"hops": 1}), [1, 7])
    tree.add(turn(ROOT, [5, 8, 6], [9, 9], action="search"))
    tree.add(turn(0, [3, 4], reward=1.0, prediction="paris", action="answer"))
    tree.add(turn(0, [3, 2], reward=0.0, prediction="rome", action="answer"))
    return tree


@st.composite
def trees(draw: st.DrawFn) -> RolloutTree:
    """Any tree that `add` accepts and `check` passes, with small token ids so that siblings do merge."""
    text = st.text(max_size=8)
    token = st.integers(0, 2**31 - 1) | st.integers(0, 2)
    ids = st.lists(token, max_size=4)
    question = Question(
        draw(text), draw(text), tuple(draw(st.lists(text, max_size=2))), draw(st.dictionaries(text, text, max_size=2))
    )
    tree = RolloutTree(question, draw(ids))
    for _ in range(draw(st.integers(0, 12))):
        sampled = draw(ids)
        new = Turn(
            parent=draw(st.integers(ROOT, len(tree.turns) - 1)),
            sampled_ids=sampled,
            sampled_logprobs=[draw(st.floats(-50, 0)) for _ in sampled],
            observation_ids=draw(ids),
            version=draw(st.integers(0, 9)),
            finish=draw(st.sampled_from(["stop", "length", "abort"])),
            action=draw(text),
            prediction=draw(st.none() | text),
            multiplicity=draw(st.integers(1, 3)),
            chain=draw(st.integers(0, 5)),
        )
        twins = [other for other in tree.turns if (other.parent, other.sampled_ids) == (new.parent, new.sampled_ids)]
        if not twins or twins[0].observation_ids == new.observation_ids:
            tree.add(new)
    inner = {each.parent for each in tree.turns}
    for index, each in enumerate(tree.turns):
        if index not in inner:
            each.terminal, each.reward = True, draw(st.floats(0, 1))
    return tree


# ----------------------------------------------------------------------------------------------------- shape and tokens
def test_worked_example() -> None:
    tree = example()
    tree.check()
    assert tree.path_ids(1) == [1, 7, 5, 8, 6, 9, 9, 3, 4]
    assert tree.path_ids(2) == [1, 7, 5, 8, 6, 9, 9, 3, 2]
    assert tree.path_ids(ROOT) == [1, 7]
    assert [tree.depth(i) for i in range(3)] == tree.turn_depths() == [2, 7, 7]
    assert tree.path(2) == [0, 2]
    assert tree.path(ROOT) == []
    assert tree.children() == [[1, 2], [], [], [0]]
    assert tree.children()[ROOT] == [0]
    assert tree.terminals() == [1, 2]
    assert (tree.token_count, tree.sampled_count, tree.leaf_count) == (11, 7, 2)
    assert [len(each) for each in tree.turns] == [5, 2, 2]
    np.testing.assert_array_equal(tree.leaf_rewards(), [1.0, 0.0])


def test_mean_logprob_is_over_sampled_tokens() -> None:
    assert Turn(ROOT, [1, 2], [-1.0, -2.0], [9, 9, 9]).mean_logprob == -1.5
    assert math.isnan(Turn(ROOT, [], []).mean_logprob)


@given(trees())
def test_random_trees_agree_with_themselves(tree: RolloutTree) -> None:
    tree.check()
    assert tree.turn_depths() == [tree.depth(i) for i in range(len(tree.turns))]
    assert tree.token_count == len(tree.prompt_ids) + sum(map(len, tree.turns))
    for index, each in enumerate(tree.turns):
        path = tree.path_ids(index)
        assert len(path) == tree.depth(index) + len(each)
        assert path[tree.depth(index) :] == each.sampled_ids + each.observation_ids
        assert path[: tree.depth(index)] == tree.path_ids(each.parent), "a path extends its parent's, token for token"
        assert index in tree.children()[each.parent]
    assert sum(map(len, tree.children())) == len(tree.turns)
    assert tree.leaf_rewards().shape == (tree.leaf_count,)


# --------------------------------------------------------------------------------------------------- adding and merging
def test_equal_siblings_are_counted_not_repeated() -> None:
    tree = example()
    assert tree.add(turn(0, [3, 4], multiplicity=2)) == 1
    assert len(tree.turns) == 3
    assert tree.turns[1].multiplicity == 3
    assert tree.turns[1].reward == 1.0, "what is known about the first draw stays"
    assert tree.leaf_count == 4
    np.testing.assert_array_equal(tree.leaf_rewards(), [1.0, 1.0, 1.0, 0.0])
    assert tree.sampled_count == 7


def test_without_merging_each_draw_is_a_node() -> None:
    tree = example()
    assert tree.add(turn(0, [3, 4], reward=1.0), merge=False) == 3
    assert [each.multiplicity for each in tree.turns] == [1, 1, 1, 1]
    tree.check()


def test_equal_tokens_under_other_parents_are_other_turns() -> None:
    tree = example()
    assert tree.add(turn(ROOT, [3, 4])) == 3


@pytest.mark.parametrize(
    "twin", [turn(ROOT, [5, 8, 6], [9, 8]), turn(ROOT, [5, 8, 6], [9, 9], terminal=True)], ids=["observation", "end"]
)
def test_siblings_answered_differently_do_not_merge(twin: Turn) -> None:
    tree = example()
    with pytest.raises(TreeError, match=r"question q: turn 0 .* expansion\.merge_siblings=false"):
        tree.add(twin)
    assert tree.turns[0].multiplicity == 1
    assert tree.add(twin, merge=False) == 3


@pytest.mark.parametrize("parent", [-2, 3, 99])
def test_a_parent_that_does_not_exist(parent: int) -> None:
    with pytest.raises(TreeError, match=f"question q: parent {parent} .* does not exist"):
        example().add(turn(parent, [1]))


def test_terminal_turns_have_no_children() -> None:
    with pytest.raises(TreeError, match="turn 1 is terminal"):
        example().add(turn(1, [4]))


def test_every_sampled_token_has_a_logprob() -> None:
    with pytest.raises(TreeError, match="2 sampled tokens but 1 log-probabilities"):
        example().add(Turn(0, [1, 2], [-1.0]))


# ------------------------------------------------------------------------------------------------------------- checking
def _self_parent(tree: RolloutTree) -> None:
    tree.turns[2].parent = 2


def _later_parent(tree: RolloutTree) -> None:
    tree.turns[0].parent = 1


def _below_root(tree: RolloutTree) -> None:
    tree.turns[0].parent = -2


def _leaf_not_terminal(tree: RolloutTree) -> None:
    tree.turns[2].terminal = False


def _inner_terminal(tree: RolloutTree) -> None:
    tree.turns[0].terminal = True


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_self_parent, "turn 2 has parent 2"),
        (_later_parent, "turn 0 has parent 1"),
        (_below_root, "turn 0 has parent -2"),
        (_leaf_not_terminal, "turn 2 is not terminal but has no children"),
        (_inner_terminal, "turn 0 is terminal but has children"),
    ],
)
def test_check_finds(damage: Callable[[RolloutTree], None], says: str) -> None:
    tree = example()
    damage(tree)
    with pytest.raises(TreeError, match=f"question q: {says}"):
        tree.check()


def test_a_missing_reward_is_never_taken_for_zero() -> None:
    tree = example()
    tree.turns[2].reward = None
    with pytest.raises(TreeError, match="question q: terminal turn 2 has no reward"):
        tree.leaf_rewards()


# ---------------------------------------------------------------------------------------------------------------- files
@given(st.lists(trees(), max_size=3))
def test_files_are_read_back_equal(tmp_path_factory: pytest.TempPathFactory, forest: list[RolloutTree]) -> None:
    path = tmp_path_factory.mktemp("trees") / "forest.safetensors"
    save_trees(path, forest)
    assert load_trees(path) == forest


def test_saving_makes_folders_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "trees.safetensors"
    save_trees(path, [example(), example()])
    save_trees(path, [example()])
    assert load_trees(path) == [example()]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_files_can_be_inspected_without_this_package(tmp_path: Path) -> None:
    path = tmp_path / "trees.safetensors"
    save_trees(path, [example()])
    assert load_file(path)["ids"].tolist() == [1, 7, 5, 8, 6, 9, 9, 3, 4, 3, 2]
    with safe_open(str(path), framework="numpy") as file:
        records = json.loads(file.metadata()["trees"])
    assert records[0]["question"]["text"] == "capital of france"


def _saved(tmp_path: Path) -> Path:
    path = tmp_path / "trees.safetensors"
    save_trees(path, [example()])
    return path


@pytest.mark.parametrize("keep", [0, 4, 0.5, 0.99])
def test_a_file_cut_off_is_named(keep: float, tmp_path: Path) -> None:
    path = _saved(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: int(keep if keep >= 1 else keep * len(data))])
    with pytest.raises(TreeError, match=r"trees\.safetensors: cannot be read"):
        load_trees(path)


@pytest.mark.parametrize("tensor", ["ids", "logprobs"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_whose_parts_disagree_is_refused(tensor: str, change: int, tmp_path: Path) -> None:
    path = _saved(tmp_path)
    with safe_open(str(path), framework="numpy") as file:
        metadata = file.metadata()
    arrays = load_file(path)
    arrays[tensor] = np.resize(arrays[tensor], arrays[tensor].size + change)
    save_file(arrays, path, metadata=metadata)
    with pytest.raises(TreeError, match=r"trees\.safetensors: .*(fewer|more) tokens than its header"):
        load_trees(path)


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"w": np.zeros(2, dtype=np.float32)}, path)
    with pytest.raises(TreeError, match=r"weights\.safetensors: not a tree file \(format None, expected"):
        load_trees(path)


def test_a_file_of_a_later_format_says_so(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    save_file(load_file(path), path, metadata={"format": "megatron_treeopsd.trees/9", "trees": "[]"})
    with pytest.raises(TreeError, match=f"trees/9.*{FORMAT}"):
        load_trees(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TreeError, match="nowhere"):
        load_trees(tmp_path / "nowhere")
