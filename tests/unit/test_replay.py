"""Router replay in the Megatron policy: against transformers with the same experts forced on it, and what is counted.

That it works with packed trees, recomputation and every layout is tested with all gradients (test_tree_exactness.py and
test_tree_layouts.py, method "replayed").
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backend_models import make_policy, recipe
from exactness import UNCUT, MiniBatch, build, cases, difference, float64, gradients
from torch import Tensor, nn
from transformers import PreTrainedModel
from trees import random_tree, with_random_routes

from megatron_treeopsd.backend.parallel import ParallelState
from megatron_treeopsd.backend.policy import Policy
from megatron_treeopsd.batch.pack import TrainedTree, pack
from megatron_treeopsd.batch.packed import PackedTrees
from megatron_treeopsd.batch.pieces import cut
from megatron_treeopsd.config import RecipeError
from megatron_treeopsd.learn import Learner
from megatron_treeopsd.objective import BernoulliKL
from megatron_treeopsd.routes import UNROUTED, add_routes
from megatron_treeopsd.tree import RolloutTree, TreeError

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("policy")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return make_policy(folder)


def policy(folder: Path, state: ParallelState, routes: str) -> Policy:
    return Policy(recipe(folder, mismatch={"routes": routes}), state)


def packed(*trees: RolloutTree) -> PackedTrees:
    items = [TrainedTree(t, np.zeros(len(t.turns)), [np.zeros(len(v.sampled_ids)) for v in t.turns]) for t in trees]
    pieces = [piece for index, tree in enumerate(trees) for piece in cut(tree, index, UNCUT)]
    return pack(pieces, items, [np.zeros(len(tree.turns)) for tree in trees])


def routers(model: PreTrainedModel) -> list[nn.Module]:
    return [layer.mlp.gate for layer in model.model.layers]


def path_routes(tree: RolloutTree, leaf: int) -> np.ndarray:
    """[tokens, layers, k] of the whole path to `leaf`."""
    return np.concatenate([tree.prompt_routes, *(tree.turns[v].routes for v in tree.path(leaf))])  # type: ignore[list-item]


def forced(model: PreTrainedModel, ids: list[int], routes: np.ndarray) -> Tensor:
    """Log-probs [tokens, vocabulary] of transformers' model whose tokens go where `routes` say, if they say it."""

    def force(layer: int) -> Any:
        def hook(router: nn.Module, arguments: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
            logits, _, own = output
            target = torch.from_numpy(routes[:, layer].astype(np.int64))
            chosen = torch.where(target == UNROUTED, own, target)
            scores = logits.softmax(-1).gather(1, chosen)
            return logits, scores / scores.sum(-1, keepdim=True), chosen

        return hook

    hooks = [router.register_forward_hook(force(layer)) for layer, router in enumerate(routers(model))]
    with torch.no_grad():
        out = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    for hook in hooks:
        hook.remove()
    return out


def own_routes(model: PreTrainedModel, tree: RolloutTree) -> None:
    """Give the tokens of `tree` the routes that transformers' routers choose, in another order."""
    chosen: list[Tensor] = []
    hooks = [router.register_forward_hook(lambda _, __, out: chosen.append(out[-1])) for router in routers(model)]
    for leaf in tree.terminals():
        chosen.clear()
        with torch.no_grad():
            model(torch.tensor([tree.path_ids(leaf)]))
        add_routes(tree, leaf, 0, torch.stack(chosen, 1).flip(-1).to(torch.int8).numpy()[:-1])
    for hook in hooks:
        hook.remove()


def test_log_probs_are_those_of_transformers_with_the_same_experts(
    model: PreTrainedModel, folder: Path, state: ParallelState
) -> None:
    trees = [with_random_routes(random_tree(seed, vocabulary=200)) for seed in range(3)]
    batch = packed(*trees)
    [replayed] = policy(folder, state, "replay").log_probs([batch])
    [free] = policy(folder, state, "compare").log_probs([batch])
    assert (replayed - free).abs().max() > 0.1  # these routes are not the routers' own
    for (t, v), values in zip(batch.origin, replayed.split(batch.turns.lengths.tolist()), strict=True):
        tree, sampled = trees[t], trees[t].turns[v].sampled_ids
        leaf = next(leaf for leaf in tree.terminals() if v in tree.path(leaf))
        start = tree.depth(v)
        rows = forced(model, tree.path_ids(leaf), path_routes(tree, leaf))[start - 1 : start - 1 + len(sampled)]
        expected = rows.gather(1, torch.tensor(sampled)[:, None])[:, 0]
        assert (values - expected).abs().max() <= 1e-5


def test_differing_routes_are_counted_and_replayed_ones_are_the_engines(
    model: PreTrainedModel, folder: Path, state: ParallelState
) -> None:
    tree = random_tree(4, vocabulary=200)
    own_routes(model, tree)
    batch = packed(tree)
    assert batch.routes is not None
    routed = int((batch.routes[:, 0, 0] != UNROUTED).sum())
    assert routed == tree.token_count - len(tree.terminals())
    for routes in ("compare", "replay"):
        here = policy(folder, state, routes)
        assert here.routing is not None
        here.log_probs([batch, batch])
        counts = here.routing.take_counts(state.device)
        assert (counts.known, counts.own, counts.taken) == (4 * routed, 4 * routed, 4 * routed)
        assert here.routing.take_counts(state.device).known == 0  # taken

    elsewhere = deepcopy(tree)
    assert elsewhere.prompt_routes is not None
    for row in elsewhere.prompt_routes[:, 1]:  # in the last layer, so that nothing else changes its route by it
        row[0] = next(expert for expert in range(8) if expert not in row)
    moved = len(elsewhere.prompt_ids)
    for routes, taken in (("compare", 2 * routed - moved), ("replay", 2 * routed)):
        here = policy(folder, state, routes)
        assert here.routing is not None
        here.log_probs([packed(elsewhere)])
        counts = here.routing.take_counts(state.device)
        assert (counts.known, counts.own, counts.taken) == (2 * routed, 2 * routed - moved, taken)


def test_without_replay_routes_change_nothing(folder: Path, state: ParallelState) -> None:
    plain, routed = random_tree(1, vocabulary=200), with_random_routes(random_tree(1, vocabulary=200))
    [expected] = policy(folder, state, "ignore").log_probs([packed(plain)])
    for batch in (packed(plain), packed(routed)):
        assert torch.equal(policy(folder, state, "compare").log_probs([batch])[0], expected)
    assert torch.equal(policy(folder, state, "replay").log_probs([packed(plain)])[0], expected)


def test_the_gradient_tests_would_see_routes_of_another_token(folder: Path, state: ParallelState) -> None:
    """Negative control of the method "replayed" of test_tree_exactness.py."""
    with float64():
        here = build(folder, state, recompute=True)
        batch = MiniBatch.around(here, cases()["replayed"])
        expected = gradients(here, [batch.flattened()], batch.case.objective)
        for tree in batch.case.trees:
            for turn in tree.turns:
                if turn.routes is not None and len(turn) > 1 and not turn.terminal:
                    turn.routes[:] = np.roll(turn.routes, 1, axis=0)
        moved = gradients(here, batch.packed(1, 0, UNCUT), batch.case.objective)
    assert difference(moved, expected) > 0.01


def test_missing_routes_end_the_step_and_dense_models_have_none(
    folder: Path, state: ParallelState, tmp_path: Path
) -> None:
    chosen = recipe(folder, mismatch={"routes": "replay"})
    learner = Learner(chosen, policy=Policy(chosen, state), objective=BernoulliKL(), gather=lambda x: [x])
    tree = random_tree(2)
    with pytest.raises(TreeError, match=r"question q2: the engine returned the routes of 0 tokens .* mismatch\.routes"):
        learner.behaviour([tree])
    with pytest.raises(TreeError, match="some of the trees"):
        packed(with_random_routes(random_tree(3)), tree)
    make_policy(tmp_path, moe=False)
    with pytest.raises(RecipeError, match=r"mismatch\.routes=compare: this model has no experts"):
        policy(tmp_path, state, "compare")


def test_importance_weighs_the_gradient_of_each_token(folder: Path, state: ParallelState) -> None:
    """One factor for all tokens of a turn does what the same factor of its weight does, but to the loss itself."""
    with float64():
        here = build(folder, state, recompute=False)
        for method in ("bernoulli_kl", "clipped_token"):
            batch = MiniBatch.around(here, cases()[method])
            rng = np.random.default_rng(0)
            factors = [rng.uniform(0.2, 2, len(item.tree.turns)) for item in batch.items]
            plain = MiniBatch(batch.case, batch.items, batch.weights)
            plain.weights = [weight * factor for weight, factor in zip(batch.weights, factors, strict=True)]
            weighed = MiniBatch(batch.case, [], batch.weights)
            weighed.items = [
                TrainedTree(
                    item.tree,
                    item.credit,
                    item.behaviour,
                    [np.full(len(turn.sampled_ids), f) for turn, f in zip(item.tree.turns, factor, strict=True)],
                )
                for item, factor in zip(batch.items, factors, strict=True)
            ]
            expected, found, off = (
                gradients(here, each.packed(1, 0, UNCUT), batch.case.objective) for each in (plain, weighed, batch)
            )
            assert found.pop("loss") == off.pop("loss")  # values are as they were
            del expected["loss"]
            assert difference(found, expected) <= 1e-10
            assert difference(found, off) > 0.01
