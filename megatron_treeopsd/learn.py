"""The update phase: from trees and credits to optimizer steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron_treeopsd.batch.pack import TrainedTree, pack
from megatron_treeopsd.batch.packed import PackedTrees
from megatron_treeopsd.batch.plan import plan_micro_batches
from megatron_treeopsd.batch.weights import loss_weights
from megatron_treeopsd.config import Recipe
from megatron_treeopsd.mismatch import Corrections, corrections
from megatron_treeopsd.objective.base import Objective, Report
from megatron_treeopsd.questions import stable_seed
from megatron_treeopsd.routes import check_routed
from megatron_treeopsd.tree import RolloutTree

if TYPE_CHECKING:
    from megatron_treeopsd.backend.policy import Policy

Gather = Callable[[object], list]
"""Gathers one object from every rank (see `backend.parallel.all_gather_objects`)."""


class Learner:
    """Packs trees, lets the policy score and update on them, and reports what happened."""

    def __init__(self, recipe: Recipe, *, policy: Policy, objective: Objective, gather: Gather) -> None:
        self._recipe = recipe
        self._policy = policy
        self._objective = objective
        self._gather = gather
        self._dtype = torch.float32
        self._notes: dict[str, list[np.ndarray]] = {}
        self._credits: Sequence[np.ndarray] = ()
        self._routes: dict[str, float] = {}

    def notes(self) -> dict[str, list[np.ndarray]]:
        """What the last update knew of each turn: `credit`, `log_ratio` after it, and `target` where there is one.

        One array [n_turns] a tree, nan where a turn was not trained.
        """
        targets = [1 / (1 + np.exp(-values)) for values in self._notes["target_log_ratio"]]
        return {"credit": list(self._credits), "log_ratio": self._notes["log_ratio"], "target": targets}

    def behaviour(self, trees: Sequence[RolloutTree]) -> list[list[np.ndarray]]:
        """log pi_b of every sampled token, recomputed by the trainer at the version that sampled it.

        For each tree and turn float32 [L_v]. With these the ratio is one at the first mini-batch, and the difference
        to the engine's numbers is a measurement, not an error of the gradient.

        With `mismatch.routes` it is also counted how many tokens go to the experts that they went to in the engine.
        Raises `TreeError` naming a turn whose routes are missing.
        """
        blank = [TrainedTree(tree, np.zeros(len(tree.turns)), _zeros(tree)) for tree in trees]
        if not self._objective.uses_behaviour:
            return [list(item.behaviour) for item in blank]
        if self._policy.routing is not None:
            for tree in trees:
                check_routed(tree)
        micro_batches = self._pack(blank, [np.zeros(len(tree.turns)) for tree in trees])
        scored = self._policy.log_probs(micro_batches)
        self._routes = self._count_routes()
        out = [list(item.behaviour) for item in blank]
        for part in self._gather(
            [_by_turn(batch, values) for batch, values in zip(micro_batches, scored, strict=True)]
        ):
            for turns in part:
                for (tree, turn), values in turns.items():
                    out[tree][turn] = values
        return out

    def update(
        self, trees: Sequence[RolloutTree], credits: Sequence[np.ndarray], behaviour: Sequence[Sequence[np.ndarray]], *,
        step: int,
    ) -> dict[str, float]:  # fmt: skip
        """Epochs of mini-batches, one optimizer step each. Returns the metrics of the step, means over mini-batches.

        Questions whose leaves all got the same reward are left out first where the recipe says so. Without anything
        to train no optimizer step is taken.
        """
        update = self._recipe.update
        self._notes = {
            name: [np.full(len(t.turns), np.nan) for t in trees] for name in ("log_ratio", "target_log_ratio")
        }
        self._credits = credits
        corrected = Corrections([np.ones(len(tree.turns)) for tree in trees], None, {})
        if self._objective.uses_behaviour:
            corrected = corrections(trees, behaviour, self._recipe.mismatch)
        items = [
            TrainedTree(*parts, None if corrected.tokens is None else corrected.tokens[index])
            for index, parts in enumerate(zip(trees, credits, behaviour, strict=True))
        ]
        chosen = [
            index
            for index, tree in enumerate(trees)
            if tree.sampled_count and not (update.drop_zero_variance and np.ptp(tree.leaf_rewards()) == 0)
        ]
        metrics: list[dict[str, float]] = []
        for epoch in range(update.epochs):
            order = list(chosen)
            random.Random(stable_seed("mini-batches", self._recipe.seed, step, epoch)).shuffle(order)
            for part in np.array_split(np.array(order, dtype=np.int64), update.mini_batches):
                if len(part):
                    metrics.append(self._mini_batch([items[i] for i in part], corrected.turns, part.tolist()))
        return {
            "train/trained_tokens": float(sum(trees[i].sampled_count for i in chosen)),
            "train/unique_tokens": float(sum(trees[i].token_count for i in chosen)),
            "train/optimizer_steps": float(len(metrics)),
            **corrected.counts,
            **self._routes,
            **_means(metrics),
        }

    def _mini_batch(
        self, trees: Sequence[TrainedTree], factors: Sequence[np.ndarray], positions: Sequence[int]
    ) -> dict[str, float]:
        """One optimizer step on `trees`, which stand at `positions` in the step's list, as do their `factors`."""
        shares = loss_weights([item.tree for item in trees], self._recipe.update)
        weights = [share * factors[position] for share, position in zip(shares, positions, strict=True)]
        micro_batches = self._pack(trees, weights)
        result = self._policy.update(micro_batches, self._objective)
        # ranks that computed the same numbers as another one have no reports
        mine = [(m.origin, m.turns.lengths, r) for m, r in zip(micro_batches, result.reports, strict=False)]
        reported = [item for part in self._gather(mine) for item in part]
        for origin, lengths, report in reported:
            self._note(origin, lengths, report, positions)
        reports = [report for _, _, report in reported]
        return {
            "train/loss": result.loss,
            "train/grad_norm": result.grad_norm,
            "train/lr": result.lr,
            **self._objective.summarise(_concatenate(reports)),
        }

    def _note(
        self, origin: Sequence[tuple[int, int]], lengths: torch.Tensor, report: Report, positions: Sequence[int]
    ) -> None:
        """Keep each turn's ratio and target as of its latest mini-batch."""
        for name in ("log_ratio", "target_log_ratio"):
            values = report.get(name)
            if values is None:
                continue
            if values.numel() != len(origin):  # one value a token: their sum is the turn's
                values = torch.stack([part.sum() for part in values.split(lengths.tolist())])
            for (tree, turn), value in zip(origin, values.tolist(), strict=True):
                self._notes[name][positions[tree]][turn] = value

    def _count_routes(self) -> dict[str, float]:
        """Shares of the pairs of a token and a layer, from the pass that has just ended."""
        if self._policy.routing is None:
            return {}
        counts = self._policy.routing.take_counts(self._policy.parallel.device)
        pairs = max(counts.known, 1)
        return {
            "mismatch/routes_differ_share": 1 - counts.own / pairs,
            "mismatch/routes_replayed_share": counts.taken / pairs,
        }

    def _pack(self, trees: Sequence[TrainedTree], weights: Sequence[np.ndarray]) -> list[PackedTrees]:
        """This data-parallel rank's micro-batches."""
        parallel = self._policy.parallel
        planned = plan_micro_batches(
            [item.tree for item in trees], ranks=parallel.dp_size, budget=self._recipe.packing.micro_batch_tokens
        )
        return [pack(pieces, trees, weights, dtype=self._dtype) for pieces in planned[parallel.dp_rank]]


def _zeros(tree: RolloutTree) -> list[np.ndarray]:
    return [np.zeros(len(turn.sampled_ids), dtype=np.float32) for turn in tree.turns]


def _by_turn(batch: PackedTrees, values: torch.Tensor) -> dict[tuple[int, int], np.ndarray]:
    parts = values.split(batch.turns.lengths.tolist()) if batch.origin else ()
    return {origin: part.numpy() for origin, part in zip(batch.origin, parts, strict=True)}


def _concatenate(reports: Sequence[Report]) -> Report:
    names = sorted({name for report in reports for name in report})
    return {name: torch.cat([report[name].cpu() for report in reports if name in report]) for name in names}


def _means(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    names = sorted({name for values in metrics for name in values})
    return {name: float(np.mean([values[name] for values in metrics if name in values])) for name in names}
