"""Tree training beside flattened training: the same loss and the same gradient of every weight, through the policy.

The oracle is the textbook form: each trajectory is a sequence of its own, nothing is shared, and a turn that several
trajectories repeat is trained in each of them with a share of its weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from backend_models import recipe
from trees import random_tree, with_random_routes

from megatron_treeopsd.backend import policy as policies
from megatron_treeopsd.backend.parallel import ParallelState
from megatron_treeopsd.backend.policy import Policy
from megatron_treeopsd.batch.pack import TrainedTree, pack
from megatron_treeopsd.batch.packed import PackedTrees
from megatron_treeopsd.batch.pieces import Piece, cut
from megatron_treeopsd.batch.plan import plan_micro_batches
from megatron_treeopsd.batch.weights import loss_weights
from megatron_treeopsd.config import Update
from megatron_treeopsd.objective import BernoulliKL, Clipped, Objective
from megatron_treeopsd.tree import ROOT, Question, RolloutTree

UNCUT = 1 << 30


@dataclass(frozen=True, slots=True)
class Case:
    """One method's mini-batch: trees, what minimises them, how turns are weighted."""

    objective: Objective
    update: Update
    trees: list[RolloutTree]


def cases(seed: int = 0) -> dict[str, Case]:
    """Trees with merged siblings for the objectives of trees; a group of chains below one prompt for the other."""
    trees = [random_tree(10 * seed + i, vocabulary=200, max_length=9) for i in range(2)]
    chains = [random_tree(10 * seed + i, forks=0, trunks=5, vocabulary=200, max_length=9) for i in range(2)]
    assert any(turn.multiplicity > 1 for tree in trees for turn in tree.turns)
    by_turn = Update(aggregation="turn_mean", turn_weight="multiplicity")
    by_sequence = Update(aggregation="sequence_mean", turn_weight="one")
    return {
        "bernoulli_kl": Case(BernoulliKL(radius=0.3), by_turn, trees),
        "clipped_turn_sum": Case(Clipped(ratio="turn_sum"), by_turn, trees),
        "clipped_token": Case(Clipped(ratio="token"), by_sequence, chains),
        "replayed": Case(BernoulliKL(radius=0.3), by_turn, [with_random_routes(deepcopy(tree)) for tree in trees]),
    }


@dataclass(slots=True)
class MiniBatch:
    """A case with credits and behaviour log-probs: everything that training needs."""

    case: Case
    items: list[TrainedTree]
    weights: list[np.ndarray]

    @classmethod
    def around(cls, policy: Policy, case: Case, seed: int = 0) -> MiniBatch:
        """Random credits, and a behaviour policy so far from `policy` that some ratios are clipped and some are not."""
        rng = np.random.default_rng(seed)
        blank = [
            TrainedTree(tree, np.zeros(len(tree.turns)), [np.zeros(len(turn.sampled_ids)) for turn in tree.turns])
            for tree in case.trees
        ]
        weights = loss_weights(case.trees, case.update)
        batch = cls(case, blank, weights)
        (packed,) = batch.packed(1, 0, UNCUT)
        (logprobs,) = policy.log_probs([packed])
        by_turn = dict(zip(packed.origin, logprobs.double().split(packed.turns.lengths.tolist()), strict=True))
        batch.items = [
            TrainedTree(
                tree,
                rng.normal(size=len(tree.turns)),
                [by_turn[t, v].numpy() + rng.normal(0, 0.15, len(turn)) for v, turn in enumerate(_samples(tree))],
            )
            for t, tree in enumerate(case.trees)
        ]
        return batch

    def packed(self, ranks: int, rank: int, budget: int) -> list[PackedTrees]:
        """The micro-batches of a data-parallel rank, as `Learner` packs them."""
        planned = plan_micro_batches(self.case.trees, ranks=ranks, budget=budget)[rank]
        return [pack(pieces, self.items, self.weights, dtype=torch.float64) for pieces in planned]

    def flattened(self) -> PackedTrees:
        """Every trajectory as a tree of one chain, all in one micro-batch."""
        items, weights, turns, sources = [], [], [], []
        for t, (item, weight) in enumerate(zip(self.items, self.weights, strict=True)):
            leaves = item.tree.terminals()
            shares = np.zeros(len(item.tree.turns))
            for leaf in leaves:
                shares[item.tree.path(leaf)] += 1
            for leaf in leaves:
                path = item.tree.path(leaf)
                alone = RolloutTree(Question(f"{item.tree.question.id} leaf {leaf}", "", ()), item.tree.prompt_ids)
                alone.prompt_routes = item.tree.prompt_routes
                alone.turns = [
                    replace(item.tree.turns[v], parent=i - 1 if i else ROOT, chain=0) for i, v in enumerate(path)
                ]
                items.append(TrainedTree(alone, item.credit[path], [item.behaviour[v] for v in path]))
                weights.append(weight[path] / shares[path])
                turns += path
                sources += [t] * len(path)
        pieces: list[Piece] = [piece for i, item in enumerate(items) for piece in cut(item.tree, i, UNCUT)]
        packed = pack(pieces, items, weights, dtype=torch.float64)
        # what an objective reads of the question is that of the whole tree
        trees = [self.case.trees[t] for t in sources]
        peaks = [float(np.abs(self.items[t].credit).max()) for t in sources]
        table = replace(
            packed.turns,
            leaves=torch.tensor([tree.leaf_count for tree in trees]),
            peak=torch.tensor(peaks, dtype=torch.float64),
        )
        return replace(packed, turns=table)


def _samples(tree: RolloutTree) -> list[list[int]]:
    return [turn.sampled_ids for turn in tree.turns]


@contextmanager
def float64() -> Iterator[None]:
    """Policies of dtype float32 are built in float64.

    Megatron's router takes its softmax in float32 whatever its input; here all of it has to be in float64.
    """
    softmax = torch.softmax

    def wide(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return softmax(x, dim=dim, dtype=x.dtype if x.dtype == torch.float64 else dtype)

    with patch.object(torch, "softmax", wide), patch.dict(policies.DTYPES, float32=torch.float64):
        yield


def build(checkpoint: Path, state: ParallelState, *, recompute: bool, **layout: int) -> Policy:
    """A policy that follows the routes of trees that have any."""
    sections: dict[str, dict[str, object]] = {"model": {"recompute": recompute}, "mismatch": {"routes": "replay"}}
    return Policy(recipe(checkpoint, **sections, layout=dict(layout)), state)


Gradients = dict[str, torch.Tensor]
"""By the Hugging Face name of the weight, whole, whatever the layout; and `loss`."""


def gradients(policy: Policy, micro_batches: Sequence[PackedTrees], objective: Objective) -> Gradients:
    """What `Policy.update` would hand to the optimizer. The policy is left as it was."""
    parameters = list(policy.model.parameters())
    before = [parameter.detach().clone() for parameter in parameters]

    def keep() -> tuple[bool, float, None]:
        for parameter in parameters:
            parameter.data.copy_(parameter.main_grad)
        return True, 0.0, None

    with patch.object(policy.optimizer, "step", keep):
        result = policy.update(micro_batches, objective)
    found = {name: tensor.clone() for name, tensor in policy.named_tensors()}
    for parameter, value in zip(parameters, before, strict=True):
        parameter.data.copy_(value)
    return found | {"loss": torch.tensor(result.loss, dtype=torch.float64)}


def difference(found: Gradients, expected: Gradients) -> float:
    """The largest relative difference of the loss and of the gradient of any weight."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - value).norm() / value.norm()) for name, value in expected.items())
