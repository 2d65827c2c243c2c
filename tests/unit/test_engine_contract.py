"""What every engine must do, written once and run against each engine of the package.

The oracle is transformers' own model, one full forward without a cache.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from engine_fixtures import (
    CONTEXT,
    ENGINES,
    FAMILIES,
    VOCABULARY,
    EngineCase,
    checkpoint_weights,
    has_experts,
    random_policy,
    reference_logprobs,
    reference_routes,
)
from transformers import PreTrainedModel

from megatron_treeopsd.engine.base import Completion, Engine, EngineError, Sampling

STOPS = frozenset({1, 2})


class Served(NamedTuple):
    engine: Engine
    case: EngineCase
    policy: PreTrainedModel
    folder: Path


@pytest.fixture(
    params=[
        pytest.param((name, family), id=f"{name}-{family}", marks=getattr(pytest.mark, case.tier))
        for name, case in ENGINES.items()
        for family in FAMILIES
    ]
)
def served(
    request: pytest.FixtureRequest, tmp_path: Path, shared_engines: dict[tuple[str, str], Engine]
) -> Iterator[Served]:
    """An engine that has published version 1 of a saved random policy, and the policy itself."""
    name, family = request.param
    case = ENGINES[name]
    policy = random_policy(family)
    policy.save_pretrained(tmp_path / "policy")
    engine = shared_engines.get(request.param) or case.build(tmp_path / "policy")
    engine.publish(checkpoint_weights(tmp_path / "policy").items(), version=1)
    engine.counters.reset()
    if case.shared:
        shared_engines[request.param] = engine
    yield Served(engine, case, policy, tmp_path)
    if not case.shared:
        engine.close()


def together(*coroutines: Coroutine[Any, Any, Any]) -> list[Any]:
    async def gather() -> list[Any]:
        return list(await asyncio.gather(*coroutines))

    return asyncio.run(gather())


def prompts(count: int, *, seed: int = 0, shared: int = 4) -> list[list[int]]:
    """Prompts of 5 to 19 tokens that begin with the same few tokens, as a chat template makes them."""
    rng = random.Random(seed)
    head = [rng.randrange(3, VOCABULARY) for _ in range(shared)]
    return [head + [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 15))] for _ in range(count)]


def generate(
    engine: Engine, prompt: list[int], *, seed: int, tokens: int = 8, session: str = "tree", **sampling: Any
) -> Any:
    options = {"stop_ids": STOPS, **sampling}
    return engine.generate(prompt, seed=seed, sampling=Sampling(tokens, **options), session=session)


def worst_error(served: Served, prompt: list[int], completion: Completion, temperature: float = 1.0) -> float:
    expected = reference_logprobs(served.policy, prompt, completion.ids, temperature=temperature)
    return max(abs(a - b) for a, b in zip(expected, completion.logprobs, strict=True))


# ------------------------------------------------------------------------------------------------- what is sampled
def test_logprobs_of_trees_with_forks_and_cache_hits_equal_a_full_forward(served: Served) -> None:
    rng = random.Random(1)

    async def grow(prompt: list[int], seed: int, turns: int) -> list[float]:
        completion = await generate(served.engine, prompt, seed=seed)
        errors = [worst_error(served, prompt, completion)]
        if turns:
            observation = [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(0, 6))]
            branches = (
                grow(prompt + completion.ids + observation, 10 * seed + branch, turns - 1)
                for branch in range(1 + (turns == 2))
            )
            for more in await asyncio.gather(*branches):
                errors += more
        return errors

    errors = [error for tree in together(*(grow(p, i + 1, 3) for i, p in enumerate(prompts(6)))) for error in tree]
    assert len(errors) == 6 * 6
    assert max(errors) <= served.case.tolerance
    assert served.engine.counters.cached_tokens > 0


def test_results_do_not_depend_on_what_else_is_in_the_batch(served: Served) -> None:
    """Alone, in small batches and in one large one; tests/integration has the longer version."""
    inputs = prompts(52, seed=3)

    def run(batch: list[int]) -> dict[int, Completion]:
        calls = (generate(served.engine, inputs[i], seed=i, tokens=40, stop_ids=frozenset()) for i in batch)
        return dict(zip(batch, together(*calls), strict=True))

    small: dict[int, Completion] = {}
    for batch in ([0], [1], [2], [3, 4], [5, 6, 7], list(range(8, 15)), list(range(15, 52))):
        small |= run(batch)
    served.engine.publish(checkpoint_weights(served.folder / "policy").items(), version=2)  # an empty cache again
    crowd = run(random.Random(0).sample(range(len(inputs)), len(inputs)))
    assert sum(len(completion.ids) for completion in crowd.values()) >= 2_000
    for i, completion in crowd.items():
        assert completion.ids == small[i].ids
        assert completion.logprobs == pytest.approx(small[i].logprobs, abs=served.case.tolerance)


def test_seeds_matter_and_repeat(served: Served) -> None:
    [prompt] = prompts(1)
    first = together(*(generate(served.engine, prompt, seed=seed) for seed in range(10)))
    second = together(*(generate(served.engine, prompt, seed=seed) for seed in range(10)))
    assert [c.ids for c in first] == [c.ids for c in second]
    assert len({tuple(c.ids) for c in first}) == 10


def test_frequencies_are_the_policys_probabilities(served: Served) -> None:
    [prompt] = prompts(1)
    draws = 1500
    counts = torch.zeros(VOCABULARY)
    for completion in together(*(generate(served.engine, prompt, seed=s, tokens=1) for s in range(draws))):
        counts[completion.ids[0]] += 1
    expected = served.policy(torch.tensor([prompt])).logits[0, -1].softmax(-1) * draws
    likely = expected >= 8  # the rest is one more class
    observed = torch.cat([counts[likely], counts[~likely].sum()[None]])
    expected = torch.cat([expected[likely], expected[~likely].sum()[None]])
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(observed) - 1
    assert freedom >= 10
    assert chi_square < freedom + 4.5 * (2 * freedom) ** 0.5


def test_greedy_takes_the_most_likely_token_and_reports_at_temperature_one(served: Served) -> None:
    for prompt, completion in zip(
        prompts(5), together(*(generate(served.engine, p, seed=0, temperature=0.0) for p in prompts(5))), strict=True
    ):
        ids = list(prompt)
        for token in completion.ids:
            assert served.policy(torch.tensor([ids])).logits[0, -1].argmax() == token
            ids.append(token)
        assert worst_error(served, prompt, completion) <= served.case.tolerance


def test_logprobs_are_at_the_sampling_temperature(served: Served) -> None:
    for prompt, completion in zip(
        prompts(5), together(*(generate(served.engine, p, seed=7, temperature=0.6) for p in prompts(5))), strict=True
    ):
        assert worst_error(served, prompt, completion, temperature=0.6) <= 2 * served.case.tolerance


def test_how_turns_end(served: Served) -> None:
    [prompt] = prompts(1)
    free: Completion = together(generate(served.engine, prompt, seed=5, tokens=12, stop_ids=frozenset()))[0]
    assert (free.finish, len(free.ids)) == ("length", 12)
    stop = free.ids[6]
    first = free.ids.index(stop)
    stopped: Completion = together(generate(served.engine, prompt, seed=5, tokens=12, stop_ids=frozenset({stop})))[0]
    assert (stopped.finish, stopped.ids) == ("stop", free.ids[: first + 1])
    last = together(generate(served.engine, prompt, seed=5, tokens=first + 1, stop_ids=frozenset({stop})))[0]
    assert (last.finish, last.ids) == ("stop", stopped.ids)
    one = together(generate(served.engine, prompt, seed=5, tokens=1, stop_ids=frozenset()))[0]
    assert (one.finish, one.ids) == ("length", free.ids[:1])


def test_a_turn_ends_where_the_models_context_ends(served: Served) -> None:
    prompt = [3 + i % 90 for i in range(CONTEXT - 5)]
    [completion] = together(generate(served.engine, prompt, seed=1, tokens=50, stop_ids=frozenset()))
    assert (completion.finish, len(completion.ids)) == ("length", 5)
    assert worst_error(served, prompt, completion) <= served.case.tolerance


# --------------------------------------------------------------------------------------------------------- routes
def test_routes_are_those_of_the_routers_and_are_sent_once(served: Served) -> None:
    """Fresh prompts, cached ones, and turns behind turns; where there are no experts, asking is an error."""
    if not has_experts(served.folder / "policy"):
        with pytest.raises(EngineError, match="not built to return them"):
            together(generate(served.engine, [5], seed=0, routes=True))
        return

    async def ask(prompt: list[int], seed: int, start: int) -> Completion:
        sampling = Sampling(8, STOPS, routes=True)
        completion = await served.engine.generate(
            prompt, seed=seed, sampling=sampling, session="tree", routes_from=start
        )
        expected = reference_routes(served.policy, [*prompt, *completion.ids[:-1]])[start:]
        assert completion.routes is not None
        assert completion.routes.dtype == "int8"
        assert torch.equal(torch.from_numpy(completion.routes.astype(int)).sort(-1).values, expected)
        return completion

    inputs = prompts(6, seed=8)
    first = together(*(ask(prompt, i, 0) for i, prompt in enumerate(inputs)))
    again = together(*(ask(prompt, i, 0) for i, prompt in enumerate(inputs)))
    assert [c.ids for c in again] == [c.ids for c in first]
    behind = [[*prompt, *c.ids, 7, 8, 9] for prompt, c in zip(inputs, first, strict=True)]
    known = [len(prompt) - 4 for prompt in behind]
    branches = [ask(prompt, seed, start) for prompt, start in zip(behind, known, strict=True) for seed in range(2)]
    assert all(len(c.routes) == 4 + len(c.ids) - 1 for c in together(*branches))
    with pytest.raises(EngineError, match="from token 99 on, behind a prompt of 2"):
        together(ask([5, 6], 0, 99))
    assert together(generate(served.engine, inputs[0], seed=0))[0].routes is None


# -------------------------------------------------------------------------------------------------------- scoring
def test_scores_equal_a_full_forward_whether_cached_or_not(served: Served) -> None:
    inputs = prompts(4, seed=9)
    sampled = together(*(generate(served.engine, p, seed=i) for i, p in enumerate(inputs[:2])))
    continuations = [completion.ids for completion in sampled] + [[5, 6, 7], [8]]
    cases = list(zip(inputs, continuations, strict=True))
    scores = together(*(served.engine.score(p, c, session="tree") for p, c in cases))
    for (prompt, continuation), logprobs in zip(cases, scores, strict=True):
        expected = reference_logprobs(served.policy, prompt, continuation)
        assert logprobs == pytest.approx(expected, abs=served.case.tolerance)
    for completion, logprobs in zip(sampled, scores[:2], strict=True):
        assert logprobs == pytest.approx(completion.logprobs, abs=served.case.tolerance)


def test_scoring_and_sampling_run_together(served: Served) -> None:
    inputs = prompts(12, seed=4)
    mixed = together(
        *(
            generate(served.engine, p, seed=i) if i % 2 else served.engine.score(p[:-3], p[-3:], session="tree")
            for i, p in enumerate(inputs)
        )
    )
    for i, (prompt, result) in enumerate(zip(inputs, mixed, strict=True)):
        if i % 2:
            assert worst_error(served, prompt, result) <= served.case.tolerance
        else:
            expected = reference_logprobs(served.policy, prompt[:-3], prompt[-3:])
            assert result == pytest.approx(expected, abs=served.case.tolerance)


# -------------------------------------------------------------------------------------------------------- counters
def test_a_tree_prefills_its_unique_prompt_tokens_once(served: Served) -> None:
    """Trunks of one prompt at the same time, then forks of one turn at the same time."""
    [prompt] = prompts(1, seed=2)
    engine = served.engine
    trunks = together(*(generate(engine, prompt, seed=i) for i in range(5)))
    assert len({tuple(trunk.ids) for trunk in trunks}) == 5
    observation = [7, 8, 9]
    forks = together(*(generate(engine, prompt + trunks[0].ids + observation, seed=i) for i in range(10, 14)))
    counters = engine.counters
    assert counters.requests == 9
    assert counters.prompt_tokens == 5 * len(prompt) + 4 * (len(prompt) + len(trunks[0].ids) + 3)
    assert counters.prompt_tokens == counters.cached_tokens + counters.computed_tokens
    unique = len(prompt) + 1 + len(observation)  # the last sampled token gets its keys with the observation
    branches = 3 + 4
    assert unique <= counters.computed_tokens <= unique + branches * served.case.page
    assert counters.generated_tokens == sum(len(c.ids) for c in trunks + forks)
    assert sum(c.cached_tokens for c in trunks + forks) == counters.cached_tokens
    counters.reset()
    assert (counters.prompt_tokens, counters.generated_tokens, counters.requests) == (0, 0, 0)


# ------------------------------------------------------------------------------------------------------ publishing
def test_after_a_publish_nothing_of_the_old_weights_is_left(served: Served) -> None:
    [prompt] = prompts(1)
    before = together(generate(served.engine, prompt, seed=3))[0]
    other = random_policy(served.policy.config.model_type, seed=1)
    other.save_pretrained(served.folder / "other")
    served.engine.publish(checkpoint_weights(served.folder / "other").items(), version=2)
    served.engine.counters.reset()
    after = together(generate(served.engine, prompt, seed=3))[0]
    assert (before.version, after.version, served.engine.version) == (1, 2, 2)
    assert after.cached_tokens == 0
    assert after.ids != before.ids
    assert worst_error(served._replace(policy=other), prompt, after) <= served.case.tolerance
    continued = prompt + after.ids + [5, 6]
    again = together(generate(served.engine, continued, seed=3))[0]
    assert again.cached_tokens > 0
    assert worst_error(served._replace(policy=other), continued, again) <= served.case.tolerance


def broken(weights: dict[str, torch.Tensor], kind: str) -> tuple[dict[str, torch.Tensor], str]:
    """Damage a set of weights; returns it with what the error must say."""
    name = next(name for name in sorted(weights) if name.endswith("mlp.down_proj.weight") or "experts" in name)
    if kind == "missing":
        del weights[name]
        return weights, f"missing {name}"
    if kind == "shape":
        weights[name] = weights[name][1:]
        return weights, f"{name} has shape"
    weights["model.layers.7.nonsense.weight"] = torch.zeros(2)
    return weights, "unknown name model.layers.7.nonsense.weight"


@pytest.mark.parametrize("kind", ["missing", "shape", "unknown"])
def test_a_publish_is_all_or_nothing(served: Served, kind: str) -> None:
    [prompt] = prompts(1)
    other = random_policy(served.policy.config.model_type, seed=1)
    other.save_pretrained(served.folder / "other")
    weights, message = broken(checkpoint_weights(served.folder / "other"), kind)
    with pytest.raises(EngineError) as error:
        served.engine.publish(weights.items(), version=2)
    assert message in str(error.value)
    assert served.engine.version == 1
    completion = together(generate(served.engine, prompt, seed=3))[0]
    assert completion.version == 1
    assert worst_error(served, prompt, completion) <= served.case.tolerance


def test_no_publish_while_requests_run(served: Served) -> None:
    weights = checkpoint_weights(served.folder / "policy")

    async def publish_in_between() -> Completion:
        task = asyncio.create_task(generate(served.engine, prompts(1)[0], seed=0, tokens=30, stop_ids=frozenset()))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="version 2 was published while"):
            served.engine.publish(weights.items(), version=2)
        completion: Completion = await task
        return completion

    completion = asyncio.run(publish_in_between())
    assert (completion.version, len(completion.ids)) == (1, 30)
    served.engine.publish(weights.items(), version=2)


# -------------------------------------------------------------------------------------------------------- sleeping
def test_an_engine_sleeps_until_the_next_publish(served: Served) -> None:
    [prompt] = prompts(1)
    before: Completion = together(generate(served.engine, prompt, seed=3))[0]
    served.engine.naps.reset()
    served.engine.sleep()
    with pytest.raises(EngineError, match="the engine sleeps; publish to it first"):
        together(generate(served.engine, prompt, seed=3))
    with pytest.raises(EngineError, match="missing"):  # refused, and still asleep
        served.engine.publish([], version=2)
    with pytest.raises(EngineError, match="the engine sleeps"):
        together(served.engine.score(prompt, [5], session="tree"))
    served.engine.publish(checkpoint_weights(served.folder / "policy").items(), version=2)
    after: Completion = together(generate(served.engine, prompt, seed=3))[0]
    assert (after.ids, after.version, after.cached_tokens) == (before.ids, 2, 0)
    assert worst_error(served, prompt, after) <= served.case.tolerance
    assert served.engine.naps.sleep_seconds > 0
    assert served.engine.naps.freed_bytes >= 0


def test_no_sleep_while_requests_run(served: Served) -> None:
    async def sleep_in_between() -> Completion:
        task = asyncio.create_task(generate(served.engine, prompts(1)[0], seed=0, tokens=30, stop_ids=frozenset()))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="cannot sleep while"):
            served.engine.sleep()
        completion: Completion = await task
        return completion

    assert len(asyncio.run(sleep_in_between()).ids) == 30


# ---------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([5] * CONTEXT, f"{CONTEXT} tokens leaves no room"),
        ([5, VOCABULARY, 6], f"token id {VOCABULARY} is outside the vocabulary of {VOCABULARY}"),
        ([5, -1], "token id -1 is outside"),
        ([], "prompt is empty"),
    ],
)
def test_a_bad_request_fails_alone(served: Served, prompt: list[int], message: str) -> None:
    async def run() -> Completion:
        good = asyncio.create_task(generate(served.engine, prompts(1)[0], seed=0))
        with pytest.raises(EngineError, match=message):
            await generate(served.engine, prompt, seed=0)
        completion: Completion = await good
        return completion

    assert asyncio.run(run()).ids


def test_sessions_end_at_any_time(served: Served) -> None:
    served.engine.release("never used")
    [prompt] = prompts(1)
    first = together(generate(served.engine, prompt, seed=0))[0]
    served.engine.release("tree")
    served.engine.release("tree")
    assert together(generate(served.engine, prompt, seed=0))[0].ids == first.ids


def test_an_aborted_tree_returns_what_it_has(served: Served) -> None:
    engine, inputs = served.engine, prompts(4)

    async def run() -> tuple[list[Completion], list[Completion]]:
        def ask(number: int, session: str, tokens: int) -> asyncio.Task[Completion]:
            call = generate(engine, inputs[number], seed=number, tokens=tokens, session=session, stop_ids=frozenset())
            return asyncio.create_task(call)

        cut = [ask(0, "cut", 200), ask(1, "cut", 200)]
        whole = ask(2, "whole", 60)
        await asyncio.sleep(0.05)
        engine.abort("cut")
        late = ask(3, "cut", 60)
        results = list(await asyncio.gather(*cut, late, whole))
        engine.release("cut")
        engine.release("whole")
        return results, await asyncio.gather(*(ask(number, "again", 60) for number in (0, 1, 3, 2)))

    (*cut, late, whole), again = asyncio.run(run())
    for completion in (*cut, late):
        assert completion.finish == "abort"
        assert 1 <= len(completion.ids) == len(completion.logprobs) < 200
    assert len(late.ids) == 1
    assert (whole.finish, len(whole.ids)) == ("length", 60)
    for completion, full in zip((*cut, late, whole), again, strict=True):
        length = min(len(completion.ids), 60)
        assert completion.ids[:length] == full.ids[:length]


def test_a_closed_engine_says_so(served: Served, shared_engines: dict[tuple[str, str], Engine]) -> None:
    for key in [key for key, engine in shared_engines.items() if engine is served.engine]:
        del shared_engines[key]  # the next test starts another one
    served.engine.close()
    with pytest.raises(EngineError, match="closed"):
        together(generate(served.engine, [5], seed=0))
