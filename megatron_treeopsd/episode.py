"""One agent trajectory: the policy samples a turn, the environment answers, until the trajectory ends.

Token-in/token-out: what the engine sampled goes into the tree as it is, and the next prompt is the path's own token
ids. Nothing is ever decoded and encoded again, so what is trained is exactly what was sampled.

    budget of the path: max_context_tokens
    |-- prompt --|-- sampled --|-- observation --|-- sampled --|-- observation --| ... |-- sampled --|
                 '-------------- turn 0 ---------'-------------- turn 1 ---------'     '- terminal  -'
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron_treeopsd.engine.base import Completion, Engine, Sampling
from megatron_treeopsd.environment.base import Environment, Outcome
from megatron_treeopsd.questions import stable_seed
from megatron_treeopsd.routes import add_routes, known_length
from megatron_treeopsd.tree import Question, RolloutTree, Turn


class EpisodeError(ValueError):
    """A trajectory that cannot be played; the message names the question and the setting."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """Limits of one trajectory, whoever sampled its beginning.

    Attributes:
        max_turns: turns from the root to the end of the path.
        max_context_tokens: tokens of the whole path, prompt and observations included.
    """

    max_turns: int
    max_context_tokens: int


async def play(
    tree: RolloutTree,
    node: int,
    *,
    engine: Engine,
    environment: Environment,
    states: dict[int, Any],
    sampling: Sampling,
    budgets: Budgets,
    session: str,
    seed: int,
    chain: int,
) -> int:
    """Continue `tree` behind turn `node` (or `ROOT`) until the trajectory ends; returns the index of its last turn.

    Every turn is added as a node of its own, also where a sibling has the same tokens. A trajectory that runs out of
    turns or context ends without a prediction, and so does one whose turn the engine aborted.

    Args:
        states: the environment's state behind each turn by index, `None` behind the root. Must hold `node`; the turns
            played here are added, so that any of them can be continued later.
        sampling: limits of one turn; shortened where the path has less room left.
        session: name of the tree in the engine.
        seed, chain: turn number d of the path is sampled with a seed that is a stable hash of (`seed`, `chain`, d).

    Raises:
        EpisodeError: if the path to `node` leaves no room for a single token.
    """
    ids = tree.path_ids(node)
    depth = len(tree.path(node))
    while True:
        room = budgets.max_context_tokens - len(ids)
        if room < 1:
            raise EpisodeError(
                f"question {tree.question.id}: {len(ids)} tokens stand in front of turn {depth}, which leaves no room "
                f"in task.max_context_tokens={budgets.max_context_tokens}; raise it or shorten the prompt"
            )
        routes_from = known_length(tree, node) if sampling.routes else 0
        completion = await engine.generate(
            ids,
            seed=stable_seed(seed, chain, depth),
            sampling=replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room)),
            session=session,
            routes_from=routes_from,
        )
        depth += 1
        room -= len(completion.ids)
        last = depth >= budgets.max_turns or room < 1
        outcome = _act(tree.question, states[node], completion, environment, last=last)
        ends = outcome.done or last or len(outcome.observation_ids) >= room
        turn = Turn(
            parent=node,
            sampled_ids=completion.ids,
            sampled_logprobs=completion.logprobs,
            observation_ids=[] if ends else outcome.observation_ids,
            version=completion.version,
            finish=completion.finish,
            action=outcome.action,
            terminal=ends,
            prediction=outcome.prediction,
            chain=chain,
        )
        node = tree.add(turn, merge=False)
        if completion.routes is not None:
            add_routes(tree, node, routes_from, completion.routes)
        states[node] = outcome.state
        if ends:
            return node
        ids += turn.sampled_ids
        ids += turn.observation_ids


def _act(question: Question, state: Any, completion: Completion, environment: Environment, *, last: bool) -> Outcome:
    if completion.finish == "abort":
        return Outcome([], done=True, action="abort")
    return environment.step(question, state, completion.ids, last=last)
