"""The embedded engine's own promises: what is computed, what happens when the cache is small, and what fails how."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import VOCABULARY, ScriptedEnvironment, checkpoint_weights, random_policy, reference_logprobs
from safetensors.torch import save_file

from megatron_treeopsd import config
from megatron_treeopsd.engine import embedded, kv
from megatron_treeopsd.engine.base import Completion, EngineError, Sampling
from megatron_treeopsd.engine.embedded import EmbeddedEngine
from megatron_treeopsd.engine.policy import check_family, replace_weights
from megatron_treeopsd.expansion import build
from megatron_treeopsd.tree import Question, RolloutTree

pytestmark = pytest.mark.fast

FREE = frozenset[int]()


def make_engine(*, max_batch: int = 32, cache_tokens: int = 4096, seed: int = 0) -> EmbeddedEngine:
    return EmbeddedEngine(random_policy(seed=seed), max_batch=max_batch, cache_tokens=cache_tokens)


def generate(engine: EmbeddedEngine, prompt: list[int], *, seed: int = 0, tokens: int = 6, session: str = "s") -> Any:
    return engine.generate(prompt, seed=seed, sampling=Sampling(tokens, FREE), session=session)


def run(*calls: Any) -> list[Any]:
    async def gather() -> list[Any]:
        return list(await asyncio.gather(*calls))

    return asyncio.run(gather())


def random_prompts(count: int, *, length: int = 12, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCABULARY) for _ in range(rng.randint(2, length))] for _ in range(count)]


def worst_error(prompts: list[list[int]], completions: list[Completion]) -> float:
    policy = random_policy()
    return max(
        abs(a - b)
        for prompt, completion in zip(prompts, completions, strict=True)
        for a, b in zip(reference_logprobs(policy, prompt, completion.ids), completion.logprobs, strict=True)
    )


# ------------------------------------------------------------------------------------------------- what is computed
@pytest.mark.parametrize(("temperature", "tokens"), [(1.0, 8), (0.15, 2)])
@pytest.mark.parametrize("max_batch", [3, 64])
def test_every_token_of_a_tree_goes_through_the_model_once(temperature: float, tokens: int, max_batch: int) -> None:
    """Prompt tokens computed = prompt + (last sampled token and observation) of each turn that goes on.

    A draw of n tokens costs n - 1 forwards. Without identical draws the sum is the number of unique tokens, less the
    last token of each trajectory, which nothing stands behind.
    """
    engine = make_engine(max_batch=max_batch)
    environment = ScriptedEnvironment()
    expansion = build(
        config.InitializeThenExpand(name="initialize_then_expand"),
        engine=engine,
        environment=environment,
        sampling=Sampling(tokens, environment.stop_ids, temperature),
        task=config.Task(name="t", data=Path("unused"), max_turns=4),
    )
    tree: RolloutTree = run(expansion.grow(Question("q", "7 8 9 10 11", ()), seed=1, session="q"))[0]
    goes_on = [turn for turn in tree.turns if not turn.terminal]
    counters = engine.counters
    assert counters.computed_tokens == 5 + sum(1 + len(turn.observation_ids) for turn in goes_on)
    assert engine.forward_tokens == counters.computed_tokens + counters.generated_tokens - counters.requests
    draws = sum(turn.multiplicity for turn in tree.turns)
    assert (counters.requests, tree.leaf_count) == (draws, 12)
    merged = len(tree.turns) < draws
    assert merged == (temperature < 1.0)
    if not merged:
        assert engine.forward_tokens == tree.token_count - len(tree.terminals())
    engine.cache.check()
    assert engine.cache.pins == 0


def test_a_fully_cached_prompt_is_not_computed_again() -> None:
    engine = make_engine()
    [prompt] = random_prompts(1)
    first = run(generate(engine, prompt, tokens=1))[0]
    before = engine.forward_tokens
    again = run(*(generate(engine, prompt, tokens=1) for _ in range(3)))
    assert engine.forward_tokens == before
    assert [c.cached_tokens for c in again] == [len(prompt)] * 3
    assert all(c.ids == first.ids and c.logprobs == pytest.approx(first.logprobs, abs=1e-6) for c in again)


def test_a_prompt_that_ends_inside_a_sampled_turn_is_not_computed_again() -> None:
    engine = make_engine()
    [prompt] = random_prompts(1)
    turn = run(generate(engine, prompt, tokens=6))[0]
    before = engine.forward_tokens
    inside = prompt + turn.ids[:3]
    completion = run(generate(engine, inside, seed=5, tokens=1))[0]
    assert engine.forward_tokens == before
    assert worst_error([inside], [completion]) <= 1e-5


def test_scoring_what_was_sampled_computes_nothing() -> None:
    engine = make_engine()
    [prompt] = random_prompts(1)
    turn = run(generate(engine, prompt, tokens=6))[0]
    before = engine.forward_tokens
    scores = run(engine.score(prompt, turn.ids, session="s"))[0]
    assert engine.forward_tokens == before
    assert scores == pytest.approx(turn.logprobs, abs=1e-6)


def test_few_rows_short_rows_and_small_prefills_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts(20, length=40)
    calls = [(prompt, i, 4 + i) for i, prompt in enumerate(prompts)]
    plain = make_engine()
    expected = run(*(generate(plain, p, seed=s, tokens=n) for p, s, n in calls))
    monkeypatch.setattr(kv, "ROW_POSITIONS", 8)
    monkeypatch.setattr(embedded, "PREFILL_TOKENS", 16)
    tight = make_engine(max_batch=3)
    got = run(*(generate(tight, p, seed=s, tokens=n) for p, s, n in calls))
    assert [c.ids for c in got] == [c.ids for c in expected]
    assert worst_error(prompts, got) <= 1e-5
    assert tight.forward_tokens == plain.forward_tokens


# --------------------------------------------------------------------------------------------------- a small cache
def test_eviction_under_pressure_stays_correct() -> None:
    engine = make_engine(max_batch=4, cache_tokens=80)
    prompts = random_prompts(40, length=20)

    async def one(i: int) -> tuple[Completion, Completion]:
        first = await generate(engine, prompts[i], seed=i, session=str(i))
        second = await generate(engine, prompts[i] + first.ids + [5], seed=i, session=str(i))
        engine.release(str(i))
        engine.cache.check()
        return first, second

    results = run(*(one(i) for i in range(40)))
    continued = [prompt + first.ids + [5] for prompt, (first, _) in zip(prompts, results, strict=True)]
    assert worst_error(prompts + continued, [a for a, _ in results] + [b for _, b in results]) <= 1e-5
    assert engine.cache.evicted_tokens > 80
    assert engine.cache.pins == 0


def test_an_open_session_keeps_its_prefix_and_a_released_one_makes_room() -> None:
    engine = make_engine(cache_tokens=60)
    tree = [7, 8, 9, *range(20, 40)]

    def others() -> None:
        for i, prompt in enumerate(random_prompts(12, length=20, seed=3)):
            run(generate(engine, prompt, session=f"other {i}"))
            engine.release(f"other {i}")
        assert engine.cache.evicted_tokens > 60

    [turn] = run(generate(engine, tree, session="tree"))
    others()
    [again] = run(generate(engine, tree + turn.ids, session="tree"))
    assert again.cached_tokens == len(tree) + len(turn.ids) - 1
    engine.release("tree")
    others()
    [late] = run(generate(engine, tree, session="late"))
    assert late.cached_tokens == 0


def test_a_cache_full_of_open_sessions_still_answers(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(cache_tokens=30)
    prompts = random_prompts(20)
    completions = run(*(generate(engine, prompt, seed=i, session=str(i)) for i, prompt in enumerate(prompts)))
    again = run(*(generate(engine, prompt, seed=i, session=str(i)) for i, prompt in enumerate(prompts)))
    assert worst_error(prompts * 2, completions + again) <= 1e-5
    assert [c.ids for c in completions] == [c.ids for c in again]
    assert engine.cache.rejected_tokens > 0
    assert [record.getMessage()[:32] for record in caplog.records] == ["the prefix cache of 30 tokens is"]
    engine.cache.check()
    for session in range(20):
        engine.release(str(session))
    assert engine.cache.pins == 0


def test_a_session_released_while_its_request_runs_leaves_no_pin() -> None:
    engine = make_engine()

    async def release_early() -> None:
        task = asyncio.create_task(generate(engine, [5, 6, 7], tokens=10))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        engine.release("s")
        await task

    asyncio.run(release_early())
    assert engine.cache.pins == 0
    engine.cache.check()


# ------------------------------------------------------------------------------------------------------- failures
def test_a_fault_in_the_scheduler_reaches_everybody_and_the_engine_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(max_batch=4)
    prompts = random_prompts(10)
    forward, calls = engine._forward, []

    def failing(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("boom")
        return forward(*arguments)

    async def all_fail() -> list[Any]:
        tasks = [generate(engine, prompt, seed=i, tokens=20) for i, prompt in enumerate(prompts)]
        return list(await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=60))

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_forward", failing)
        results = asyncio.run(all_fail())
    assert [type(result) for result in results] == [MemoryError] * 10
    assert engine.cache.pins == 0
    completions = run(*(generate(engine, prompt, seed=i) for i, prompt in enumerate(prompts)))
    assert worst_error(prompts, completions) <= 1e-5


def test_a_cancelled_caller_frees_its_row_and_disturbs_nobody() -> None:
    engine = make_engine(max_batch=4)
    prompts = random_prompts(10)
    expected = run(*(generate(make_engine(), p, seed=i, tokens=20) for i, p in enumerate(prompts)))

    async def cancel_some() -> list[Any]:
        tasks = [asyncio.create_task(generate(engine, p, seed=i, tokens=20)) for i, p in enumerate(prompts)]
        for _ in range(5):
            await asyncio.sleep(0)
        for i in (0, 2, 9):  # two that run and one that waits
            tasks[i].cancel()
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    results = asyncio.run(cancel_some())
    for i, result in enumerate(results):
        if i in (0, 2, 9):
            assert isinstance(result, asyncio.CancelledError)
        else:
            assert result.ids == expected[i].ids
    assert engine.counters.generated_tokens == 7 * 20
    engine.release("s")
    assert engine.cache.pins == 0
    engine.cache.check()


def test_an_event_loop_that_ended_early_does_not_block_the_next_one() -> None:
    engine = make_engine()

    async def give_up() -> None:
        asyncio.create_task(generate(engine, [5, 6, 7], tokens=200))  # noqa: RUF006
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(give_up())
    [completion] = run(generate(engine, [5, 6, 7]))
    assert worst_error([[5, 6, 7]], [completion]) <= 1e-5


def test_an_event_loop_that_stands_still_does_not_block_another_one() -> None:
    engine = make_engine()
    abandoned = asyncio.new_event_loop()
    task = abandoned.create_task(generate(engine, [8, 9], tokens=200))
    abandoned.run_until_complete(asyncio.sleep(0))
    [completion] = run(generate(engine, [5, 6, 7]))
    assert worst_error([[5, 6, 7]], [completion]) <= 1e-5
    task.cancel()
    abandoned.run_until_complete(asyncio.gather(task, return_exceptions=True))
    abandoned.close()


def test_closing_answers_whoever_waits() -> None:
    engine = make_engine()

    async def close_early() -> Any:
        task = asyncio.create_task(generate(engine, [5, 6, 7], tokens=200))
        await asyncio.sleep(0)
        engine.close()
        return await asyncio.gather(task, return_exceptions=True)

    [error] = asyncio.run(close_early())
    assert isinstance(error, EngineError)
    assert "closed" in str(error)


# ------------------------------------------------------------------------------------------------ weights and loading
def test_fused_and_single_expert_names_give_the_same_policy(tmp_path: Path) -> None:
    other = random_policy(seed=1)
    other.save_pretrained(tmp_path)
    single = checkpoint_weights(tmp_path)
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in single
    fused = dict(other.named_parameters())
    assert "model.layers.0.mlp.experts.gate_up_proj" in fused
    for weights in (single, fused):
        policy = random_policy(seed=0)
        replace_weights(policy, weights.items())
        for (name, got), (_, expected) in zip(policy.named_parameters(), other.named_parameters(), strict=True):
            assert torch.equal(got, expected), name
        assert policy.lm_head.weight is policy.model.embed_tokens.weight


@pytest.mark.parametrize("twice", ["model.norm.weight", "model.layers.0.mlp.experts.down_proj"])
def test_a_name_given_twice_is_refused(twice: str, tmp_path: Path) -> None:
    policy = random_policy()
    policy.save_pretrained(tmp_path)
    weights = [*checkpoint_weights(tmp_path).items(), (twice, dict(policy.named_parameters())[twice])]
    with pytest.raises(EngineError, match=f"{twice} was given twice"):
        replace_weights(policy, weights)


def test_a_tied_head_may_come_along_only_if_it_is_the_embedding() -> None:
    policy, other = random_policy(), random_policy(seed=1)
    weights = dict(other.named_parameters())
    embedding = weights["model.embed_tokens.weight"]
    replace_weights(policy, [*weights.items(), ("lm_head.weight", embedding.clone())])
    with pytest.raises(EngineError, match="differs from model"):
        replace_weights(policy, [*weights.items(), ("lm_head.weight", embedding + 1)])


def test_publishing_does_not_keep_the_trainers_tensors() -> None:
    engine = make_engine()
    weights = {name: parameter.clone() for name, parameter in random_policy().named_parameters()}
    engine.publish(weights.items(), version=3)
    for tensor in weights.values():
        tensor.zero_()
    [completion] = run(generate(engine, [5, 6, 7]))
    assert worst_error([[5, 6, 7]], [completion]) <= 1e-5


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"there is no config\.json"):
        EmbeddedEngine.from_checkpoint(tmp_path, dtype=torch.float32, max_batch=4, cache_tokens=256)


def test_a_checkpoint_without_some_weight_is_refused(tmp_path: Path) -> None:
    random_policy().save_pretrained(tmp_path)
    weights = checkpoint_weights(tmp_path)
    del weights["model.layers.1.self_attn.q_norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"model\.layers\.1\.self_attn\.q_norm\.weight"):
        EmbeddedEngine.from_checkpoint(tmp_path, dtype=torch.float32, max_batch=4, cache_tokens=256)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    policy = random_policy("qwen3")
    policy.config.sliding_window = 8
    with pytest.raises(EngineError, match="sliding"):
        check_family(policy.config)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(EngineError, match=r"serves llama, qwen3, qwen3_moe; this checkpoint is gpt2"):
        EmbeddedEngine.from_checkpoint(tmp_path, dtype=torch.float32, max_batch=4, cache_tokens=256)


def test_bfloat16_runs_and_is_close(tmp_path: Path) -> None:
    random_policy().save_pretrained(tmp_path)
    engine = EmbeddedEngine.from_checkpoint(tmp_path, dtype=torch.bfloat16, max_batch=4, cache_tokens=256)
    prompts = random_prompts(4)
    completions = run(*(generate(engine, prompt, seed=i) for i, prompt in enumerate(prompts)))
    assert worst_error(prompts, completions) < 0.3


@pytest.mark.parametrize("sampling", [Sampling(0, FREE), Sampling(5, FREE, temperature=-1.0)])
def test_limits_that_make_no_sense_are_refused(sampling: Sampling) -> None:
    with pytest.raises(EngineError, match="must be at least"):
        run(make_engine().generate([5], seed=0, sampling=sampling, session="s"))


def test_a_checkpoint_in_megatrons_format_waits_for_a_publish(tmp_path: Path) -> None:
    """A run starts from one: the trainer reads the weights and publishes them before anything is sampled."""
    policy = random_policy()
    policy.config.save_pretrained(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    engine = EmbeddedEngine.from_checkpoint(tmp_path, dtype=torch.float32, max_batch=4, cache_tokens=256)
    with pytest.raises(EngineError, match=r"no weights were published yet, and the checkpoint folder is in Megatron's"):
        run(generate(engine, [5, 6], seed=0))
    engine.publish(policy.state_dict().items(), version=0)
    completions = run(generate(engine, [5, 6], seed=0))
    assert worst_error([[5, 6]], completions) < 1e-5


def test_a_sleeping_engine_gives_its_cache_back() -> None:
    """Measured by the operating system's count of this process's memory."""
    engine = make_engine(cache_tokens=100_000)
    engine._memory.pool.fill_(1.0)  # touched, as by a long rollout
    held = engine._memory.pool.nbytes
    assert held > 40 * 2**20
    engine.sleep()
    assert engine.naps.freed_bytes == pytest.approx(held, rel=0.1)
    engine.naps.reset()
    engine.sleep()
    assert engine.naps.freed_bytes < held / 10, "there is nothing left to give back"
