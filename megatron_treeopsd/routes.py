"""Which experts each token of a tree went to in the engine: kept once per unique token, for router replay.

A router picks the experts with the largest scores, so a rounding error that the engine and the trainer do not share can
send a token elsewhere, and the trained policy is then not the one that sampled. Router replay (R3, Ma et al. 2025,
"Stabilizing MoE reinforcement learning by aligning training and inference routers") lets the trainer follow the routes
of the engine.

    request             prompt ──────── sampled ─ observation ─ sampled ─ observation
    1  asks from 0      ■■■■■■■■■■■■■■■ ■■■■■■□                              ■ returned
    2  asks from 21                           ■   ■■■■■■■■■■■   ■■■■■■□      □ not computed yet: nothing follows it

The engine computes a token's route when it computes the token as input of the next one, so the last sampled token of
a turn gets its route with the next turn, and that of a leaf none. A token that several branches share keeps the route
that the first of them returned: the engine computed it then, and its cache has served all others.
"""

from __future__ import annotations

import numpy as np

from megatron_treeopsd.tree import ROOT, RolloutTree, TreeError, Turn

UNROUTED = -1
"""Expert number of a token whose route is not known (yet)."""


def route_dtype(experts: int) -> type[np.signedinteger]:
    """The smallest type that holds the numbers of `experts` experts, and `UNROUTED`."""
    return np.int8 if experts <= 128 else np.int16


def known_length(tree: RolloutTree, node: int) -> int:
    """How many tokens, counted from the start of the prompt, of the path to turn `node` have known routes."""
    length = 0
    for routes, tokens in _parts(tree, node):
        if routes is None and tokens:
            return length
        if routes is not None and (unknown := (routes[:, 0, 0] == UNROUTED)).any():
            return length + int(unknown.argmax())
        length += tokens
    return length


def add_routes(tree: RolloutTree, node: int, start: int, routes: np.ndarray) -> None:
    """Note what the engine returned with turn `node`.

    Args:
        start: position on the path of the first token that `routes` speaks of.
        routes: int8/int16 [tokens, layers, experts a token]. Tokens whose routes are known keep them.

    Raises `TreeError` if there are more of them than the path has tokens, or if they leave a gap.
    """
    if start > known_length(tree, node):
        raise TreeError(
            f"question {tree.question.id}: routes from token {start} on leave a gap behind the "
            f"{known_length(tree, node)} that are known"
        )
    position, end = 0, start + len(routes)
    for turn in [None, *(tree.turns[index] for index in tree.path(node))]:
        tokens = len(tree.prompt_ids) if turn is None else len(turn)
        first, last = max(position, start), min(position + tokens, end)
        if first < last:
            known = tree.prompt_routes if turn is None else turn.routes
            if known is None:
                known = np.full((tokens, *routes.shape[1:]), UNROUTED, dtype=routes.dtype)
            span = slice(first - position, last - position)
            known[span] = np.where(known[span] == UNROUTED, routes[first - start : last - start], known[span])
            if turn is None:
                tree.prompt_routes = known
            else:
                turn.routes = known
        position += tokens
    if end > position:
        raise TreeError(f"question {tree.question.id}: routes of {end} tokens for a path of {position}")


def check_routed(tree: RolloutTree) -> None:
    """Raise `TreeError` unless every token that anything sampled follows has a route.

    Turns that the engine aborted are not looked at, nor those without sampled tokens.
    """
    for index, turn in enumerate(tree.turns):
        needed = tree.depth(index) + len(turn.sampled_ids) - 1
        if turn.sampled_ids and turn.finish != "abort" and (known := known_length(tree, index)) < needed:
            raise TreeError(
                f"question {tree.question.id}: the engine returned the routes of {known} tokens on the path to turn "
                f"{index}, {needed} are needed for mismatch.routes; set mismatch.routes=ignore to train without them"
            )


def token_routes(tree: RolloutTree, turn: Turn | None) -> np.ndarray | None:
    """Routes [tokens, layers, experts a token] of a turn, or of the prompt (None), of a tree whose routes are known.

    None for a tree without routes. A turn whose routes are all unknown, as those of an aborted one, is `UNROUTED`.
    """
    if tree.prompt_routes is None or turn is None:
        return tree.prompt_routes
    if turn.routes is not None:
        return turn.routes
    return np.full((len(turn), *tree.prompt_routes.shape[1:]), UNROUTED, dtype=tree.prompt_routes.dtype)


def _parts(tree: RolloutTree, node: int) -> list[tuple[np.ndarray | None, int]]:
    """(routes, number of tokens) of the prompt and of each turn on the path to `node`."""
    turns = [tree.turns[index] for index in tree.path(node)] if node != ROOT else []
    return [(tree.prompt_routes, len(tree.prompt_ids)), *((turn.routes, len(turn)) for turn in turns)]
