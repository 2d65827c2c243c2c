"""Requests that no engine can serve, refused with the same words by all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_treeopsd.engine.base import EngineError, Sampling


def check_generate(prompt_ids: Sequence[int], sampling: Sampling, *, vocabulary: int, context: int) -> None:
    """Raise `EngineError` for a prompt or sampling parameters that make no sense for this model."""
    _check_ids("prompt", prompt_ids, vocabulary)
    _check_ids("stop", sampling.stop_ids, vocabulary)
    if not prompt_ids:
        raise EngineError("the prompt is empty")
    if len(prompt_ids) >= context:
        raise EngineError(
            f"a prompt of {len(prompt_ids)} tokens leaves no room in the model's context of {context} tokens"
        )
    if sampling.max_new_tokens < 1 or sampling.temperature < 0:
        raise EngineError(f"max_new_tokens must be at least 1 and temperature at least 0, got {sampling}")


def check_score(prefix_ids: Sequence[int], continuation_ids: Sequence[int], *, vocabulary: int, context: int) -> None:
    """Raise `EngineError` for tokens that this model cannot score."""
    _check_ids("prefix", prefix_ids, vocabulary)
    _check_ids("continuation", continuation_ids, vocabulary)
    if not prefix_ids or not continuation_ids:
        raise EngineError("both the prefix and the continuation to score need at least one token")
    total = len(prefix_ids) + len(continuation_ids)
    if total > context:
        raise EngineError(f"{total} tokens to score do not fit the model's context of {context} tokens")


def check_routes(sampling: Sampling, prompt: int, routes_from: int, *, returned: bool) -> None:
    """Raise `EngineError` for routes that an engine cannot return behind a prompt of `prompt` tokens.

    `returned`: whether the engine was built to return routes.
    """
    if sampling.routes and not returned:
        raise EngineError("routes were asked for, but the engine was not built to return them")
    if not 0 <= routes_from <= prompt:
        raise EngineError(f"routes were asked for from token {routes_from} on, behind a prompt of {prompt} tokens")


def _check_ids(what: str, ids: Iterable[int], vocabulary: int) -> None:
    lowest, highest = min(ids, default=0), max(ids, default=0)
    if lowest < 0 or highest >= vocabulary:
        wrong = lowest if lowest < 0 else highest
        raise EngineError(f"{what} token id {wrong} is outside the vocabulary of {vocabulary} tokens")
