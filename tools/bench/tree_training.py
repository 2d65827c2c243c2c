"""How much faster is training on trees than on their flattened trajectories?

    python tools/bench/tree_training.py [--quick] [--growth] [--repeats N] [--json]

Both arms are whole updates of the same policy (`Policy.update`: forward, objective, backward, optimizer) on the same
trajectories, each packed into one micro-batch: once with every token unique, once with each trajectory as a sequence
of its own. Calling the flattened arm trajectory by trajectory would make it look worse than it is. One thread, arms in
turn, processor time of this process; ratios are flattened over tree, of the smallest time of each arm, with the median
of the paired ratios beside it. Loss and gradient norm of both arms are compared in every repeat.

Beside the time stand the ratios that explain it: tokens, query-key pairs, and floating point operations. Those are
of the matrix products, 3 passes over the weights for each token and 3.5 passes over queries and keys for each pair
(forward 1, backward 2.5); norms, rotations, routing and the optimizer are not counted.

A tree has 4 trunks and 2 forks of each, leaving the trunks after turns spread evenly over its length, behind a prompt
of a tenth of the trajectory; half of each turn is sampled. Cases differ in how much of the work is attention; --growth
follows one policy to longer trajectories instead (1k to 16k tokens, minutes of processor time and several GB).

With --json the last line is one object: {"cases": [{"attention_share", "token_ratio", "pair_ratio", "flop_ratio",
"cpu_ratio", ...}, ...]}.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

# Read when torch is first imported.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_treeopsd.backend import parallel
from megatron_treeopsd.backend.parallel import ParallelState
from megatron_treeopsd.backend.policy import Policy, UpdateResult
from megatron_treeopsd.batch.pack import TrainedTree, pack
from megatron_treeopsd.batch.packed import PackedTrees
from megatron_treeopsd.batch.pieces import cut
from megatron_treeopsd.config import Layout, Recipe
from megatron_treeopsd.objective import Clipped
from megatron_treeopsd.recipes import build_recipe
from megatron_treeopsd.tree import ROOT, Question, RolloutTree, Turn

TRUNKS, FORKS, PROMPT = 4, 2, 0.1
UNCUT = 1 << 40


@dataclass(frozen=True, slots=True)
class Shape:
    """A policy, and the length of the trajectories that it is trained on."""

    tokens: int
    turns: int
    hidden: int
    heads: int
    groups: int = 2
    width: int = 32
    layers: int = 2
    experts: int = 8
    active: int = 2
    expert_size: int = 128
    vocabulary: int = 512
    trees: int = 1

    @property
    def per_token(self) -> int:
        """Forward operations of one row: projections, router, experts."""
        projections = self.hidden * self.width * (2 * self.heads + 2 * self.groups)
        experts = self.active * 3 * self.hidden * self.expert_size
        return 2 * self.layers * (projections + self.hidden * self.experts + experts)

    @property
    def per_pair(self) -> int:
        return 4 * self.width * self.heads * self.layers

    def flop(self, packed: PackedTrees) -> tuple[float, float]:
        """(all, of which attention) of forward and backward pass."""
        attention = 3.5 * self.per_pair * packed.pair_count
        head = 2 * self.hidden * self.vocabulary * packed.edge_labels.numel()
        return 3.0 * (self.per_token * packed.token_count + head) + attention, attention


SHAPES = (
    Shape(tokens=512, turns=16, hidden=256, heads=8, expert_size=256),
    Shape(tokens=1024, turns=16, hidden=192, heads=8, expert_size=192),
    Shape(tokens=3072, turns=16, hidden=128, heads=12, expert_size=96),
)
QUICK = (Shape(tokens=192, turns=8, hidden=64, heads=4, expert_size=64, trees=2),)
GROWTH = tuple(
    Shape(tokens=n, turns=16, hidden=64, heads=4, layers=1, expert_size=64) for n in (1024, 2048, 4096, 8192, 16384)
)


@dataclass(frozen=True, slots=True)
class Case:
    """Ratios are flattened over tree. Seconds are of processor time, of the fastest update."""

    tokens_per_leaf: int
    unique_tokens: int
    attention_share: float
    token_ratio: float
    pair_ratio: float
    flop_ratio: float
    cpu_ratio: float
    cpu_ratio_median: float
    tree_seconds: float
    flattened_seconds: float
    largest_difference: float
    repeats: int


def sample_tree(shape: Shape, seed: int) -> RolloutTree:
    rng = random.Random(seed)
    tree = RolloutTree(Question(f"q{seed}", "", ()), _ids(rng, int(PROMPT * shape.tokens), shape))
    length = (shape.tokens - len(tree.prompt_ids)) // shape.turns

    def play(node: int, first: int, chain: int) -> int:
        for index in range(first, shape.turns):
            last = index == shape.turns - 1
            sampled = _ids(rng, length if last else length // 2, shape)
            observed = _ids(rng, length - len(sampled), shape)
            logprobs = [-rng.uniform(5.5, 6.5) for _ in sampled]
            node = tree.add(Turn(node, sampled, logprobs, observed, terminal=last, chain=chain), merge=False)
        return node

    ends = [play(ROOT, 0, chain) for chain in range(TRUNKS)]
    for fork in range(TRUNKS * FORKS):
        first = 1 + int((fork + 0.5) / (TRUNKS * FORKS) * (shape.turns - 1))
        play(tree.path(ends[fork % TRUNKS])[first - 1], first, TRUNKS + fork)
    return tree


def _ids(rng: random.Random, count: int, shape: Shape) -> list[int]:
    return [rng.randrange(shape.vocabulary) for _ in range(count)]


def arms(trees: Sequence[RolloutTree]) -> tuple[PackedTrees, PackedTrees]:
    """The trees as one micro-batch, and their trajectories as another one that has the same loss."""
    rng = np.random.default_rng(0)
    count = sum(len(tree.turns) for tree in trees)
    whole, weights, alone, shares = [], [], [], []
    for tree in trees:
        behaviour = [np.array(turn.sampled_logprobs) for turn in tree.turns]
        whole.append(TrainedTree(tree, rng.normal(size=len(tree.turns)), behaviour))
        weights.append(np.full(len(tree.turns), 1 / count))
        paths = [tree.path(leaf) for leaf in tree.terminals()]
        repeats = np.bincount(np.concatenate(paths), minlength=len(tree.turns))
        for path in paths:
            turns = [replace(tree.turns[v], parent=i - 1, chain=0) for i, v in enumerate(path)]
            single = RolloutTree(tree.question, tree.prompt_ids, turns)
            alone.append(TrainedTree(single, whole[-1].credit[path], [behaviour[v] for v in path]))
            shares.append((weights[-1] / repeats)[path])
    return _one_micro_batch(whole, weights), _one_micro_batch(alone, shares)


def _one_micro_batch(items: Sequence[TrainedTree], weights: Sequence[np.ndarray]) -> PackedTrees:
    pieces = [piece for index, item in enumerate(items) for piece in cut(item.tree, index, UNCUT)]
    return pack(pieces, items, weights)


def make_policy(shape: Shape, folder: Path, state: ParallelState) -> Policy:
    """A random policy of this shape, through a checkpoint folder as always."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        head_dim=shape.width,
        num_experts=shape.experts,
        num_experts_per_tok=shape.active,
        moe_intermediate_size=shape.expert_size,
        norm_topk_prob=True,
        max_position_embeddings=shape.tokens,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return Policy(recipe(folder), state)


def recipe(checkpoint: Path) -> Recipe:
    return build_recipe(
        {
            "steps": 1,
            "model": {"checkpoint": str(checkpoint)},
            "task": {"name": "none", "data": "none"},
            "expansion": {"name": "initialize_then_expand", "trunks": TRUNKS, "forks": FORKS},
            "credit": {"name": "tree_backup"},
            "objective": {"name": "clipped", "ratio": "turn"},
            "optimizer": {"lr": 1e-30},  # so small that both arms see the same weights in every repeat
        }
    )


def measure(shape: Shape, state: ParallelState, *, repeats: int) -> Case:
    tree, flat = arms([sample_tree(shape, seed) for seed in range(shape.trees)])
    objective = Clipped(ratio="turn")
    with tempfile.TemporaryDirectory() as folder:
        policy = make_policy(shape, Path(folder), state)

    def update(packed: PackedTrees) -> tuple[float, UpdateResult]:
        gc.collect()
        start = time.process_time()
        result = policy.update([packed], objective)
        return time.process_time() - start, result

    update(arms([sample_tree(replace(shape, tokens=128, turns=4), 0)])[0])  # warm up
    seconds: list[tuple[float, float]] = []
    difference = 0.0
    for repeat in range(repeats):
        if repeat % 2:
            (flat_seconds, flat_result), (tree_seconds, tree_result) = update(flat), update(tree)
        else:
            (tree_seconds, tree_result), (flat_seconds, flat_result) = update(tree), update(flat)
        seconds.append((tree_seconds, flat_seconds))
        for a, b in ((tree_result.loss, flat_result.loss), (tree_result.grad_norm, flat_result.grad_norm)):
            difference = max(difference, abs(a - b) / max(abs(b), 1e-6))
    (tree_flop, _), (flat_flop, flat_attention) = shape.flop(tree), shape.flop(flat)
    fastest_tree, fastest_flat = (min(times) for times in zip(*seconds, strict=True))
    return Case(
        tokens_per_leaf=shape.tokens,
        unique_tokens=tree.token_count,
        attention_share=flat_attention / flat_flop,
        token_ratio=flat.token_count / tree.token_count,
        pair_ratio=flat.pair_count / tree.pair_count,
        flop_ratio=flat_flop / tree_flop,
        cpu_ratio=fastest_flat / fastest_tree,
        cpu_ratio_median=statistics.median(b / a for a, b in seconds),
        tree_seconds=fastest_tree,
        flattened_seconds=fastest_flat,
        largest_difference=difference,
        repeats=repeats,
    )


def table(cases: Sequence[Case]) -> str:
    head = (
        "tokens a leaf  unique  attention   tokens    pairs     FLOP |  CPU time (median)   of FLOP |"
        "   tree s   flat s  difference"
    )
    lines = ["ratios flattened / tree", head, "-" * len(head)]
    for case in cases:
        lines.append(
            f"{case.tokens_per_leaf:13d} {case.unique_tokens:7d} {case.attention_share:9.0%}  {case.token_ratio:8.3f} "
            f"{case.pair_ratio:8.3f} {case.flop_ratio:8.3f} | {case.cpu_ratio:9.3f} ({case.cpu_ratio_median:5.3f}) "
            f"{case.cpu_ratio / case.flop_ratio:11.3f} | {case.tree_seconds:8.2f} {case.flattened_seconds:8.2f} "
            f"{case.largest_difference:11.0e}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small case, seconds")
    parser.add_argument("--growth", action="store_true", help="longer and longer trajectories, minutes")
    parser.add_argument("--longest", type=int, default=16384, help="tokens of a trajectory at which --growth ends")
    parser.add_argument("--repeats", type=int, default=5, help="updates of each arm")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args(arguments)
    shapes = QUICK if options.quick else SHAPES
    if options.growth:
        shapes = tuple(shape for shape in GROWTH if shape.tokens <= options.longest)
    state = parallel.initialize(Layout(), seed=1)
    cases = []
    for shape in shapes:
        cases.append(measure(shape, state, repeats=options.repeats))
        print(table(cases[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    parallel.shutdown()
    print(table(cases))
    if options.json:
        print(json.dumps({"cases": [asdict(case) for case in cases]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
