"""Only what the policy sampled is trained: observations and prompts are labels of nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from trees import random_tree

from megatron_treeopsd.batch.pack import TrainedTree, pack
from megatron_treeopsd.batch.packed import PackedTrees
from megatron_treeopsd.batch.pieces import cut
from megatron_treeopsd.batch.weights import loss_weights
from megatron_treeopsd.config import Update
from megatron_treeopsd.objective.bernoulli_kl import BernoulliKL
from megatron_treeopsd.tree import RolloutTree

pytestmark = pytest.mark.fast

VOCABULARY = 50
"""Sampled ids are below this; the ids of prompts and observations are moved above it."""


def marked_tree(seed: int) -> RolloutTree:
    tree = random_tree(seed, vocabulary=VOCABULARY)
    tree.prompt_ids = [token + VOCABULARY for token in tree.prompt_ids]
    for turn in tree.turns:
        turn.observation_ids = [token + VOCABULARY for token in turn.observation_ids]
    return tree


def packed(tree: RolloutTree) -> PackedTrees:
    credit = np.linspace(-1, 1, len(tree.turns))
    behaviour = [np.full(len(turn.sampled_ids), -3.0) for turn in tree.turns]
    pieces = cut(tree, 0, 10_000)
    return pack(pieces, [TrainedTree(tree, credit, behaviour)], loss_weights([tree], Update()), dtype=torch.float64)


def loss_gradient(batch: PackedTrees) -> torch.Tensor:
    """[T, 2 VOCABULARY]: gradient with respect to a free table of logits, one row a token, in place of a model."""
    logits = torch.randn(batch.token_count, 2 * VOCABULARY, dtype=torch.float64, requires_grad=True)
    rows = torch.log_softmax(logits[batch.edge_rows], -1)
    loss, _ = BernoulliKL(kappa=1.0, max_log_ratio=1e9)(rows.gather(1, batch.edge_labels[:, None])[:, 0], batch.turns)
    (gradient,) = torch.autograd.grad(loss, logits)
    return gradient


@pytest.mark.parametrize("seed", range(8))
def test_gradient_reaches_the_rows_in_front_of_sampled_tokens_and_no_other(seed: int) -> None:
    batch = packed(marked_tree(seed))
    in_front = set()
    for path in batch.key_rows.split(batch.key_offsets.diff().tolist()):
        sampled = batch.ids[path] < VOCABULARY
        in_front |= set(path[:-1][sampled[1:]].tolist())
    touched = set(torch.nonzero(loss_gradient(batch).abs().sum(1))[:, 0].tolist())
    assert touched == in_front
    assert len(touched) < batch.token_count


@pytest.mark.parametrize("seed", range(8))
def test_observations_are_no_labels_and_samples_are(seed: int) -> None:
    tree = marked_tree(seed)
    before = packed(tree)
    assert before.edge_labels.numel() == tree.sampled_count
    assert bool((before.edge_labels < VOCABULARY).all())
    for turn in tree.turns:
        turn.observation_ids = [token + 1 for token in turn.observation_ids]
    assert torch.equal(packed(tree).edge_labels, before.edge_labels)
    tree.turns[-1].sampled_ids = [(token + 1) % VOCABULARY for token in tree.turns[-1].sampled_ids]
    changed = packed(tree).edge_labels != before.edge_labels
    assert int(changed.sum()) == len(tree.turns[-1].sampled_ids)
