"""Whether an engine serves what the trainer has: both say the log-probabilities of the same few tokens.

After a publish each engine samples a turn behind a fixed prompt, and the trainer scores it. Keys and values of older
weights, an expert under a wrong name, a bucket that was lost: each of them moves some of these numbers. The prompt is
the same every time, so an engine that did not forget its cache would use exactly the wrong part of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_treeopsd.engine.base import Engine, EngineError, Sampling
from megatron_treeopsd.questions import stable_seed
from megatron_treeopsd.routes import add_routes
from megatron_treeopsd.tree import ROOT, Question, RolloutTree, Turn

PROMPT_TOKENS, SAMPLED_TOKENS = 24, 8


def sample_probe(engine: Engine, *, vocabulary: int, temperature: float, routes: bool = False) -> RolloutTree:
    """One turn of `engine` behind the fixed prompt, with its `routes` if asked for.

    Its tokens are not counted in `engine.counters`.
    """
    prompt = [stable_seed("probe", position) % vocabulary for position in range(PROMPT_TOKENS)]
    sampling = Sampling(SAMPLED_TOKENS, frozenset(), temperature, routes)
    counters = replace(engine.counters)
    completion = asyncio.run(engine.generate(prompt, seed=stable_seed("probe"), sampling=sampling, session="probe"))
    engine.release("probe")
    engine.counters = counters
    tree = RolloutTree(Question("probe", "", ()), prompt)
    tree.add(Turn(ROOT, completion.ids, completion.logprobs, version=completion.version, terminal=True))
    if completion.routes is not None:
        add_routes(tree, 0, 0, completion.routes)
    return tree


def check_probes(
    probes: Sequence[RolloutTree], trainer: Sequence[Sequence[np.ndarray]], *, version: int, tolerance: float
) -> float:
    """The largest difference, in nats a token, between each engine's probe and the trainer's log-probabilities of it.

    Raises `EngineError` if it is above `tolerance`, or if an engine sampled with another version.
    """
    worst = 0.0
    for number, (probe, logprobs) in enumerate(zip(probes, trainer, strict=True)):
        turn = probe.turns[0]
        difference = float(np.abs(np.asarray(turn.sampled_logprobs) - logprobs[0]).max())
        if turn.version != version or not difference <= tolerance:
            raise EngineError(
                f"engine {number} does not serve version {version} after it was published: it says version "
                f"{turn.version}, and the log-probability of a token differs from the trainer's by {difference:.2e} "
                f"nats (engine.verify_tolerance={tolerance:g})"
            )
        worst = max(worst, difference)
    return worst
