"""Tiny policies and random micro-batches for the tests of the Megatron backend."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_treeopsd.batch.packed import PackedTrees
from megatron_treeopsd.config import Recipe
from megatron_treeopsd.objective.base import Objective, Report, TurnTable
from megatron_treeopsd.recipes import build_recipe

VOCAB = 256


def make_policy(folder: Path, *, moe: bool = True, tied: bool = True, seed: int = 0) -> PreTrainedModel:
    """Save a random tiny Qwen3(-MoE) checkpoint to `folder` and return it in float32, ready for evaluation.

    Weights are large enough for attention and routing to depend on every input.
    """
    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "initializer_range": 0.15,
    }
    if moe:
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
        model: PreTrainedModel = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.eval().save_pretrained(folder)
    return model


def recipe(checkpoint: Path, **sections: dict[str, object]) -> Recipe:
    """A complete recipe around `checkpoint`; only model, optimizer and layout matter to the backend."""
    values: dict[str, object] = {
        "steps": 10,
        "model": {"checkpoint": str(checkpoint)},
        "task": {"name": "none", "data": "none"},
        "expansion": {"name": "chains"},
        "credit": {"name": "outcome"},
        "objective": {"name": "clipped"},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}  # type: ignore[dict-item]
    return build_recipe(values)


def random_forest(
    rng: np.random.Generator, *, trees: int = 2, turns: int = 6, length: int = 9
) -> list[list[list[int]]]:
    """Random trees as lists of (parent, tokens): node 0 is the prompt, every later node forks from an earlier one."""
    forest = []
    for _ in range(trees):
        nodes = [[-1, *rng.integers(0, VOCAB, rng.integers(2, length)).tolist()]]
        for index in range(1, turns + 1):
            nodes.append([int(rng.integers(0, index)), *rng.integers(0, VOCAB, rng.integers(1, length)).tolist()])
        forest.append(nodes)
    return forest


def paths(tree: list[list[int]]) -> list[list[int]]:
    """Node indices of every root-to-leaf path."""
    parents = {node[0] for node in tree}
    out = []
    for leaf in range(len(tree)):
        if leaf not in parents:
            path = [leaf]
            while tree[path[0]][0] >= 0:
                path.insert(0, tree[path[0]][0])
            out.append(path)
    return out


def pack_forest(forest: list[list[list[int]]], *, share: bool, dtype: torch.dtype = torch.float32) -> PackedTrees:
    """Pack trees, with every node after the prompt a trained turn of weight 1 and credit (node index % 3) - 1.

    With `share` each node is one run of rows and a turn is trained once. Without it every path is flattened into a
    sequence of its own, and a turn's weight is divided among the paths that repeat it: the same loss.
    """
    ids: list[int] = []
    positions: list[int] = []
    query_offsets, key_rows, key_offsets = [0], [], [0]
    edge_rows: list[int] = []
    labels: list[int] = []
    lengths: list[int] = []
    weight: list[float] = []
    credit: list[float] = []
    origin: list[tuple[int, int]] = []
    for t, tree in enumerate(forest):
        rows_of: dict[int, list[int]] = {}
        counts = [sum(node in path for path in paths(tree)) for node in range(len(tree))]
        for path in paths(tree):
            if not share:
                rows_of = {}
            keys: list[int] = []
            for node in path:
                tokens = tree[node][1:]
                if node not in rows_of:
                    rows_of[node] = list(range(len(ids), len(ids) + len(tokens)))
                    ids += tokens
                    positions += range(len(keys), len(keys) + len(tokens))
                    if node > 0:
                        edge_rows += [keys[-1], *rows_of[node][:-1]]
                        labels += tokens
                        lengths.append(len(tokens))
                        weight.append(1.0 if share else 1.0 / counts[node])
                        credit.append(node % 3 - 1.0)
                        origin.append((t, node))
                keys += rows_of[node]
            query_offsets.append(len(ids))
            key_rows += keys
            key_offsets.append(len(key_rows))
    table = TurnTable(
        offsets=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64),
        behaviour=torch.zeros(len(labels), dtype=dtype),
        credit=torch.tensor(credit, dtype=dtype),
        weight=torch.tensor(weight, dtype=dtype),
        leaves=torch.ones(len(lengths), dtype=torch.int64),
        peak=torch.ones(len(lengths), dtype=dtype),
        sequence=torch.arange(len(lengths)),
    )
    return PackedTrees(
        ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        query_offsets=torch.tensor(query_offsets),
        key_rows=torch.tensor(key_rows),
        key_offsets=torch.tensor(key_offsets),
        edge_rows=torch.tensor(edge_rows, dtype=torch.int64),
        edge_labels=torch.tensor(labels, dtype=torch.int64),
        turns=table,
        origin=tuple(origin),
        questions=tuple(f"q{t}" for t, _ in origin),
    )


def empty_batch() -> PackedTrees:
    """A micro-batch with one row and nothing to train."""
    return pack_forest([[[-1, 7]]], share=True)


class TurnSquares(Objective):
    """sum_v W_v (mean log-prob of turn v - credit_v)^2 / 10: depends on every token through its whole turn."""

    def __call__(self, logprobs: torch.Tensor, turns: TurnTable) -> tuple[torch.Tensor, Report]:
        if turns.turn_count == 0:
            return logprobs.sum() * 0, {}
        zeros = torch.zeros_like(turns.weight, dtype=logprobs.dtype)
        mean = zeros.index_add(0, turns.turn_of_token, logprobs) / turns.lengths
        loss = turns.weight * (mean - turns.credit).square() / 10
        return loss.sum(), {"squares/mean": mean.detach()}


def reference_logprobs(model: PreTrainedModel, forest: list[list[list[int]]], packed: PackedTrees) -> torch.Tensor:
    """Log-probs of `packed.edge_labels` by transformers, one whole path at a time; turns in the order of `packed`."""
    found: dict[tuple[int, int], torch.Tensor] = {}
    for t, tree in enumerate(forest):
        for path in paths(tree):
            tokens = [token for node in path for token in tree[node][1:]]
            logits = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
            scored = logits[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
            start = len(tree[0]) - 1
            for node in path[1:]:
                stop = start + len(tree[node]) - 1
                found[(t, node)] = scored[start - 1 : stop - 1]
                start = stop
    return torch.cat([found[turn] for turn in packed.origin])
