"""Trees train what flattened trajectories train: loss and every gradient, through the whole Megatron policy.

Grouped-query attention, rotary embedding, qk-norm, experts, recomputation, several micro-batches. Three objectives, and
mistakes that have to be seen.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from backend_models import make_policy
from exactness import UNCUT, MiniBatch, build, cases, difference, float64, gradients

from megatron_treeopsd.backend.parallel import ParallelState
from megatron_treeopsd.batch.packed import PackedTrees
from megatron_treeopsd.batch.weights import loss_weights
from megatron_treeopsd.config import Update
from megatron_treeopsd.objective import BernoulliKL, Clipped

pytestmark = pytest.mark.fast

METHODS = ["bernoulli_kl", "clipped_turn_sum", "clipped_token", "replayed"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    make_policy(folder, tied=False)
    return folder


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("method", METHODS)
def test_loss_and_every_gradient_in_float64(method: str, seed: int, state: ParallelState, checkpoint: Path) -> None:
    with float64():
        policy = build(checkpoint, state, recompute=True)
        batch = MiniBatch.around(policy, cases(seed)[method], seed)
        objective = batch.case.objective
        expected = gradients(policy, [batch.flattened()], objective)
        for budget in (UNCUT, 120):  # one micro-batch, and trees cut into several
            micro_batches = batch.packed(1, 0, budget)
            assert (len(micro_batches) > 1) == (budget != UNCUT)
            assert difference(gradients(policy, micro_batches, objective), expected) <= 1e-10


@pytest.mark.parametrize("method", METHODS)
def test_float32(method: str, state: ParallelState, checkpoint: Path) -> None:
    policy = build(checkpoint, state, recompute=True)
    batch = MiniBatch.around(policy, cases()[method])
    expected = gradients(policy, [batch.flattened()], batch.case.objective)
    assert difference(gradients(policy, batch.packed(1, 0, UNCUT), batch.case.objective), expected) <= 1e-5


def positions_in_packing_order(packed: PackedTrees) -> PackedTrees:
    return replace(packed, positions=torch.arange(packed.token_count))


def edges_from_the_row_in_front(packed: PackedTrees) -> PackedTrees:
    """The first token of a fork is predicted from the row that happens to stand in front of it."""
    starts = packed.turns.offsets[:-1][packed.turns.lengths > 1]
    edges = packed.edge_rows.clone()
    edges[starts] = packed.edge_rows[starts + 1] - 1  # the second token is predicted from the row of the first
    return replace(packed, edge_rows=edges)


@pytest.mark.parametrize("method", METHODS[:2])
def test_mistakes_are_seen(method: str, state: ParallelState, checkpoint: Path) -> None:
    """Negative controls of the tests above: each of them moves a gradient by more than a percent."""
    with float64():
        policy = build(checkpoint, state, recompute=False)
        batch = MiniBatch.around(policy, cases()[method])
        expected = gradients(policy, [batch.flattened()], batch.case.objective)
        (packed,) = batch.packed(1, 0, UNCUT)
        assert difference(gradients(policy, [packed], batch.case.objective), expected) <= 1e-10
        for wrong in (positions_in_packing_order(packed), edges_from_the_row_in_front(packed)):
            assert difference(gradients(policy, [wrong], batch.case.objective), expected) > 1e-2
        batch.weights = loss_weights(batch.case.trees, Update(aggregation="turn_mean", turn_weight="one"))
        (packed,) = batch.packed(1, 0, UNCUT)
        assert difference(gradients(policy, [packed], batch.case.objective), expected) > 1e-2


def test_weighting_by_leaves_is_flattened_training(state: ParallelState, checkpoint: Path) -> None:
    """`turn_weight: leaves` gives what training on the trajectories as they come would give, each as often as drawn."""
    with float64():
        policy = build(checkpoint, state, recompute=False)
        case = replace(cases()["clipped_turn_sum"], update=Update(aggregation="turn_mean", turn_weight="leaves"))
        batch = MiniBatch.around(policy, case)
        packed = batch.flattened()
        drawn = [
            float(tree.turns[leaf].multiplicity) for tree in case.trees for leaf in tree.terminals()
            for _ in tree.path(leaf)
        ]  # fmt: skip
        natural = torch.tensor(drawn, dtype=torch.float64) / sum(drawn)
        natural_batch = replace(packed, turns=replace(packed.turns, weight=natural))
        expected = gradients(policy, [natural_batch], case.objective)
        assert difference(gradients(policy, batch.packed(1, 0, UNCUT), case.objective), expected) <= 1e-10


def test_residual_and_policy_gradient_agree_where_turns_were_sampled(state: ParallelState, checkpoint: Path) -> None:
    """With the affine map and scale kappa / delta, the two have the same gradient at ratio one (ALGORITHMS.md §1.3)."""
    with float64():
        policy = build(checkpoint, state, recompute=False)
        batch = MiniBatch.around(policy, cases()["bernoulli_kl"])
        (packed,) = batch.packed(1, 0, UNCUT)
        (sampled,) = policy.log_probs([packed])
        kappa = float(packed.turns.credit.abs().max())
        packed = replace(packed, turns=replace(packed.turns, behaviour=sampled.double()))
        residual = gradients(policy, [packed], BernoulliKL(radius=0.3, kappa=kappa))
        clipped = gradients(policy, [packed], Clipped(ratio="turn_sum"))
        del residual["loss"], clipped["loss"]
        assert difference(residual, clipped) <= 1e-12
        assert max(float(value.norm()) for value in clipped.values()) > 1e-3


def test_both_sides_of_the_clip_are_exercised(state: ParallelState, checkpoint: Path) -> None:
    policy = build(checkpoint, state, recompute=False)
    for method, case in cases().items():
        batch = MiniBatch.around(policy, case)
        result = policy.update(batch.packed(1, 0, UNCUT), case.objective)
        moved = np.abs(result.reports[0]["log_ratio"].numpy())
        assert moved.min() < 0.1 < 0.3 < moved.max(), method
