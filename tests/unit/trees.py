"""Random rollout trees for tests, grown the way expansions grow them: trunks first, then forks of their turns."""

from __future__ import annotations

import random

import numpy as np

from megatron_treeopsd.routes import UNROUTED, route_dtype
from megatron_treeopsd.tree import ROOT, Question, RolloutTree, Turn


def random_tree(
    seed: int, *, trunks: int = 3, forks: int = 2, max_turns: int = 5, max_length: int = 6, vocabulary: int = 50
) -> RolloutTree:
    """A tree with merged siblings (small vocabulary), turns of different lengths and 0/1 rewards."""
    rng = random.Random(seed)

    def tokens(least: int) -> list[int]:
        return [rng.randrange(1, vocabulary) for _ in range(rng.randint(least, max_length))]

    tree = RolloutTree(Question(f"q{seed}", "text", ("answer",)), tokens(1))
    depth_of = {ROOT: 0}

    def play(node: int, chain: int) -> int:
        while True:
            depth = depth_of[node] + 1
            terminal = depth == max_turns or rng.random() < 0.25
            sampled = tokens(1)
            children = [i for i, turn in enumerate(tree.turns) if turn.parent == node and not turn.terminal]
            if children and rng.random() < 0.15:  # draw an existing sibling once more
                twin = tree.turns[rng.choice(children)]
                sampled, observation, terminal = twin.sampled_ids, twin.observation_ids, False
            else:
                observation = [] if terminal else tokens(1)
            turn = Turn(
                node,
                list(sampled),
                [-rng.random() for _ in sampled],
                list(observation),
                terminal=terminal,
                reward=float(rng.random() < 0.4) if terminal else None,
                chain=chain,
            )
            try:
                node = tree.add(turn)
            except ValueError:  # the same tokens by chance, answered differently: draw again
                continue
            depth_of[node] = depth
            if tree.turns[node].terminal:
                return node

    ends = [play(ROOT, chain) for chain in range(trunks)]
    chain = trunks
    for end in ends:
        inner = tree.path(end)[:-1]
        for _ in range(forks):
            play(rng.choice(inner) if inner else ROOT, chain)
            chain += 1
    tree.check()
    return tree


def with_random_routes(tree: RolloutTree, *, layers: int = 2, experts: int = 8, chosen: int = 2) -> RolloutTree:
    """Give every token experts that no router would choose, but for the last token of each leaf, which has none."""
    rng = np.random.default_rng(len(tree.turns))

    def draw(tokens: int) -> np.ndarray:
        return rng.random((tokens, layers, experts)).argsort(-1)[..., :chosen].astype(route_dtype(experts))

    tree.prompt_routes = draw(len(tree.prompt_ids))
    for turn in tree.turns:
        turn.routes = draw(len(turn))
        if turn.terminal:
            turn.routes[-1] = UNROUTED
    return tree


def search_tree(
    seed: int, *, tokens: int = 480, turns: int = 24, prompt: float = 0.1, trunks: int = 4, forks: int = 2
) -> RolloutTree:
    """A tree of the shape of PERFORMANCE.md: every leaf has about `tokens` tokens in `turns` turns behind a prompt.

    Forks leave their trunk after a turn drawn uniformly; half of each turn is sampled, half is observation. Nothing is
    merged.
    """
    rng = random.Random(seed)
    tree = RolloutTree(Question(f"q{seed}", "text", ("answer",)), [1] * max(1, int(prompt * tokens)))
    length = (tokens - len(tree.prompt_ids)) // turns

    def play(node: int, first: int, chain: int) -> int:
        for index in range(first, turns):
            last = index == turns - 1
            sampled = length if last else (length + 1) // 2
            node = tree.add(
                Turn(
                    node,
                    [rng.randrange(1, 50) for _ in range(sampled)],
                    [-rng.random() for _ in range(sampled)],
                    [rng.randrange(1, 50) for _ in range(length - sampled)],
                    terminal=last,
                    reward=float(rng.random() < 0.4) if last else None,
                    chain=chain,
                ),
                merge=False,
            )
        return node

    ends = [play(ROOT, 0, chain) for chain in range(trunks)]
    chain = trunks
    for end in ends:
        path = tree.path(end)
        for _ in range(forks):
            first = rng.randrange(1, turns)
            play(path[first - 1], first, chain)
            chain += 1
    tree.check()
    return tree
