"""Turn weights, pieces and packed rows against the trees they came from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from trees import random_tree

from megatron_treeopsd.batch.pack import TrainedTree, pack
from megatron_treeopsd.batch.pieces import cut
from megatron_treeopsd.batch.plan import plan_micro_batches
from megatron_treeopsd.batch.weights import loss_weights, turn_multiplicities
from megatron_treeopsd.config import Update
from megatron_treeopsd.tree import ROOT, Question, RolloutTree, TreeError, Turn

pytestmark = pytest.mark.fast


def example() -> RolloutTree:
    tree = RolloutTree(Question("q", "text", ("a",)), [1, 7])
    tree.add(Turn(ROOT, [5, 8, 6], [-1.0, -2.0, -0.3], [9, 9]))
    tree.add(Turn(0, [3, 4], [-0.1, -0.2], terminal=True, reward=1.0))
    tree.add(Turn(0, [3, 2], [-0.1, -0.3], terminal=True, reward=0.0, chain=1))
    return tree


def trained(tree: RolloutTree) -> TrainedTree:
    credit = np.arange(len(tree.turns)) / 10 - 0.2
    return TrainedTree(tree, credit, [np.asarray(turn.sampled_logprobs) for turn in tree.turns])


def test_the_example_of_the_docstring() -> None:
    tree = example()
    packed = pack(cut(tree, 0, 100), [trained(tree)], loss_weights([tree], Update()))
    assert packed.ids.tolist() == [1, 7, 5, 8, 6, 9, 9, 3, 4, 3, 2]
    assert packed.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 7, 8]
    assert packed.query_offsets.tolist() == [0, 9, 11]
    assert packed.key_rows.tolist() == [*range(9), 0, 1, 2, 3, 4, 5, 6, 9, 10]
    assert packed.key_offsets.tolist() == [0, 9, 18]
    assert packed.edge_rows.tolist() == [1, 2, 3, 6, 7, 6, 9]
    assert packed.edge_labels.tolist() == [5, 8, 6, 3, 4, 3, 2]
    assert packed.turns.offsets.tolist() == [0, 3, 5, 7]
    assert packed.turns.sequence.tolist() == [0, 0, 1]
    torch.testing.assert_close(packed.turns.behaviour, torch.tensor([-1, -2, -0.3, -0.1, -0.2, -0.1, -0.3]))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("budget", [66, 90, 10_000])
def test_every_turn_is_trained_once_behind_its_own_path(seed: int, budget: int) -> None:
    trees = [random_tree(seed * 10 + i) for i in range(3)]
    items = [trained(tree) for tree in trees]
    weights = loss_weights(trees, Update())
    seen = []
    for micro in plan_micro_batches(trees, ranks=1, budget=budget)[0]:
        packed = pack(micro, items, weights)
        assert packed.token_count == sum(piece.tokens for piece in micro) <= budget
        assert packed.pair_count == sum(piece.pairs for piece in micro)
        paths = packed.key_rows.split(packed.key_offsets.diff().tolist())
        rows_of = {int(path[-1]): path for path in paths}
        for turn, (owner, index) in enumerate(packed.origin):
            tree = trees[owner]
            start, stop = packed.turns.offsets[turn : turn + 2].tolist()
            edges, labels = packed.edge_rows[start:stop], packed.edge_labels[start:stop]
            assert labels.tolist() == tree.turns[index].sampled_ids
            assert packed.name(turn) == f"question {tree.question.id} turn {index}"
            prefix = tree.path_ids(tree.turns[index].parent) + tree.turns[index].sampled_ids[:-1]
            path = next(p for p in rows_of.values() if int(edges[-1]) in p.tolist())
            upto = path[: path.tolist().index(int(edges[-1])) + 1]
            assert packed.ids[upto].tolist() == prefix
            assert packed.positions[upto].tolist() == list(range(len(prefix)))
            assert float(packed.turns.weight[turn]) == pytest.approx(weights[owner][index])
            assert float(packed.turns.peak[turn]) == pytest.approx(np.abs(items[owner].credit).max())
            seen.append((owner, index))
        queries = packed.query_offsets
        for chain, path in enumerate(paths):  # the queries of a chain are the end of its keys
            rows = torch.arange(int(queries[chain]), int(queries[chain + 1]))
            assert torch.equal(path[len(path) - len(rows) :], rows)
    assert sorted(seen) == [(t, i) for t, tree in enumerate(trees) for i in range(len(tree.turns))]


def test_a_micro_batch_without_pieces() -> None:
    tree = example()
    empty = pack([], [trained(tree)], loss_weights([tree], Update()))
    assert empty.token_count == 1
    assert empty.turns.turn_count == 0
    assert empty.edge_rows.numel() == 0
    assert pack([], [], []).token_count == 1


def test_a_tree_of_one_leaf() -> None:
    tree = RolloutTree(Question("q", "text", ("a",)), [1, 7])
    tree.add(Turn(ROOT, [5, 8], [-1.0, -2.0], terminal=True, reward=1.0))
    packed = pack(cut(tree, 0, 100), [trained(tree)], loss_weights([tree], Update()))
    assert packed.ids.tolist() == [1, 7, 5, 8]
    assert packed.key_rows.tolist() == [0, 1, 2, 3]
    assert packed.edge_rows.tolist() == [1, 2]
    assert packed.turns.weight.tolist() == [1.0]


def test_a_turn_without_sampled_tokens_is_context() -> None:
    tree = example()
    tree.turns[0].sampled_ids, tree.turns[0].sampled_logprobs = [], []
    packed = pack(cut(tree, 0, 100), [trained(tree)], loss_weights([tree], Update()))
    assert packed.ids.tolist() == [1, 7, 9, 9, 3, 4, 3, 2]
    assert packed.origin == ((0, 1), (0, 2))
    assert packed.edge_rows.tolist() == [3, 4, 3, 6]
    assert packed.turns.weight.tolist() == [0.5, 0.5]


def test_turns_are_named() -> None:
    tree = example()
    packed = pack(cut(tree, 0, 100), [trained(tree)], loss_weights([tree], Update()))
    assert [packed.name(turn) for turn in range(3)] == ["question q turn 0", "question q turn 1", "question q turn 2"]


def test_mismatched_lengths_name_question_and_turn() -> None:
    tree = example()
    good = trained(tree)
    with pytest.raises(TreeError, match="question q: 2 credits for 3 turns"):
        TrainedTree(tree, good.credit[:2], good.behaviour)
    with pytest.raises(TreeError, match="question q: 2 lists of behaviour log-probs for 3 turns"):
        TrainedTree(tree, good.credit, good.behaviour[:2])
    with pytest.raises(TreeError, match="question q: turn 1 has 2 sampled tokens but 3 behaviour log-probs"):
        TrainedTree(tree, good.credit, [good.behaviour[0], np.zeros(3), good.behaviour[2]])
    with pytest.raises(TreeError, match="question q: 2 weights for 3 turns"):
        pack(cut(tree, 0, 100), [good], [np.ones(2)])


def test_weights_by_hand() -> None:
    tree = example()
    tree.turns[0].multiplicity = 2
    (turn_mean,) = loss_weights([tree], Update(aggregation="turn_mean", turn_weight="multiplicity"))
    np.testing.assert_allclose(turn_mean, [2 / 4, 1 / 4, 1 / 4])
    (token_mean,) = loss_weights([tree], Update(aggregation="token_mean", turn_weight="one"))
    np.testing.assert_allclose(token_mean, [3 / 7, 2 / 7, 2 / 7])
    # chain 0 owns turns 0 and 1 (5 tokens), chain 1 owns turn 2 (2 tokens): a half for each sequence
    (sequence_mean,) = loss_weights([tree], Update(aggregation="sequence_mean", turn_weight="one"))
    np.testing.assert_allclose(sequence_mean, [0.5 * 3 / 5, 0.5 * 2 / 5, 0.5])
    np.testing.assert_allclose(turn_multiplicities(tree, "leaves"), [2, 1, 1])


@pytest.mark.parametrize("aggregation", ["turn_mean", "token_mean", "sequence_mean"])
@pytest.mark.parametrize("rule", ["multiplicity", "leaves", "one"])
def test_weights_sum_to_one_over_a_mini_batch(aggregation: str, rule: str) -> None:
    trees = [random_tree(seed) for seed in range(5)]
    trees[0].turns[-1].sampled_ids, trees[0].turns[-1].sampled_logprobs = [], []
    weights = loss_weights(trees, Update(aggregation=aggregation, turn_weight=rule))
    assert sum(w.sum() for w in weights) == pytest.approx(1.0)
    assert weights[0][-1] == 0.0
    assert all((w >= 0).all() for w in weights)


def test_leaves_below_count_every_trajectory() -> None:
    for seed in range(10):
        tree = random_tree(seed)
        below = turn_multiplicities(tree, "leaves")
        first = [i for i, turn in enumerate(tree.turns) if turn.parent == ROOT]
        assert below[first].sum() == tree.leaf_count
