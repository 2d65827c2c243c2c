"""What the tests of engines, episodes and expansions share: tiny policies, engines under test, scripted parts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from megatron_treeopsd import config
from megatron_treeopsd.engine.base import Completion, Engine, Sampling
from megatron_treeopsd.engine.build import build_engine
from megatron_treeopsd.environment.base import Environment, Outcome
from megatron_treeopsd.tree import Question

VOCABULARY = 96
CONTEXT = 256
FAMILIES = ("qwen3_moe", "qwen3", "llama")


def random_policy(family: str = "qwen3_moe", *, seed: int = 0) -> PreTrainedModel:
    """A tiny random policy whose next-token distributions are neither flat nor peaked, float32, transformers' own."""
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": CONTEXT,
        "initializer_range": 0.15, "tie_word_embeddings": family == "qwen3_moe",
    }  # fmt: skip
    torch.manual_seed(seed)
    if family == "qwen3":
        policy_config: Any = Qwen3Config(**shape)
    elif family == "llama":  # stretched as Llama 3.1, so that some waves are kept, some stretched, some mixed
        shape["rope_parameters"] = {
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }  # fmt: skip
        policy_config = LlamaConfig(**shape)
    else:
        policy_config = Qwen3MoeConfig(**shape, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
    return AutoModelForCausalLM.from_config(policy_config).eval().requires_grad_(False)


def checkpoint_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a saved checkpoint, under the names they have in the file (experts one by one)."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def reference_logprobs(
    model: PreTrainedModel, prompt_ids: Sequence[int], continuation_ids: Sequence[int], *, temperature: float = 1.0
) -> list[float]:
    """Log-probabilities of a continuation from one full forward of the transformers model, no cache."""
    logits = model(torch.tensor([[*prompt_ids, *continuation_ids]])).logits[0, len(prompt_ids) - 1 : -1].double()
    table = (logits / temperature).log_softmax(-1)
    return table.gather(1, torch.tensor(continuation_ids)[:, None])[:, 0].tolist()


def reference_routes(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """int64 [tokens, layers, experts a token], sorted: where transformers' routers send each token of a sequence."""
    chosen: list[Tensor] = []
    gates = [layer.mlp.gate for layer in model.model.layers]
    hooks = [gate.register_forward_hook(lambda _, __, output: chosen.append(output[-1])) for gate in gates]
    model(torch.tensor([list(ids)]))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1).sort(-1).values


@dataclass(frozen=True)
class EngineCase:
    """One engine that the contract tests run against.

    Attributes:
        build: from a checkpoint folder.
        tolerance: largest difference of a log-probability from transformers' float32 forward, in nats.
        page: tokens that a fork may compute again because the engine caches whole pages.
        tier: marker of its tests.
        shared: whether one engine serves all tests of a family, because it takes long to start.
    """

    build: Callable[[Path], Engine]
    tolerance: float
    page: int
    tier: str
    shared: bool = False


def has_experts(checkpoint: Path) -> bool:
    return "num_experts" in json.loads((checkpoint / "config.json").read_text())


def _embedded(checkpoint: Path) -> Engine:
    section = config.EmbeddedEngine(name="embedded", max_batch=64, cache_tokens=16_384)
    return build_engine(section, checkpoint=checkpoint, dtype="float32", routes=has_experts(checkpoint))


def _sglang(checkpoint: Path) -> Engine:
    section = config.SGLangEngine(name="sglang", python=SGLANG_PYTHON, max_batch=64, cache_tokens=16_384, bucket_mb=1)
    return build_engine(section, checkpoint=checkpoint, dtype="float32", routes=has_experts(checkpoint))


SGLANG_PYTHON = Path(__file__).resolve().parents[2] / ".venv-sglang" / "bin" / "python"
"""Made by launch/sglang_env.sh, which tests/conftest.py runs if a test that is marked `sglang` is selected."""

ENGINES = {
    "embedded": EngineCase(_embedded, tolerance=1e-5, page=0, tier="fast"),
    "sglang": EngineCase(_sglang, tolerance=2e-5, page=1, tier="sglang", shared=True),
}
"""Every engine of the package, by its name in a recipe."""


SEARCH, ANSWER, OBSERVATION = 1, 2, 95
"""Token ids of the scripted world: a turn that ends with `SEARCH` is answered, one that ends with `ANSWER` is final."""


class ScriptedEnvironment(Environment):
    """Answers a search with `[OBSERVATION, number of turns so far]`; the prompt is the question's text as numbers.

    The state is the number of turns, so a state that belongs to another node shows in the tokens.
    """

    def __init__(self) -> None:
        self.lasts: list[bool] = []

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset({SEARCH, ANSWER})

    def prompt(self, question: Question) -> list[int]:
        return [int(word) for word in question.text.split()]

    def step(self, question: Question, state: Any, sampled_ids: Sequence[int], *, last: bool) -> Outcome:
        self.lasts.append(last)
        turns = (state or 0) + 1
        if sampled_ids[-1] == ANSWER:
            return Outcome([], done=True, action="answer", prediction=str(sampled_ids[0]), state=turns)
        if last:
            return Outcome([], done=True, action="search", state=turns)
        action = "search" if sampled_ids[-1] == SEARCH else "invalid"
        return Outcome([OBSERVATION, turns], done=False, action=action, state=turns)


class ScriptedEngine(Engine):
    """Replies with what a function of (prompt, seed) says, cut at the token limit; log-probs are -seed modulo 7.

    Answers come after a number of event-loop turns that `delay` says, to shuffle the order in which draws return.
    """

    def __init__(
        self, reply: Callable[[list[int], int], list[int]], *, delay: Callable[[int], int] = lambda seed: 0
    ) -> None:
        super().__init__()
        self.reply = reply
        self.delay = delay
        self.version = 4
        self.requests: list[tuple[list[int], int, Sampling, str]] = []
        self.running = 0
        self.most_running = 0
        self.opened: dict[str, int] = {}
        self.released: list[str] = []

    async def generate(
        self, prompt_ids: Sequence[int], *, seed: int, sampling: Sampling, session: str, routes_from: int = 0
    ) -> Completion:
        self.requests.append((list(prompt_ids), seed, sampling, session))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        for _ in range(1 + self.delay(seed)):
            await asyncio.sleep(0)
        self.running -= 1
        ids = self.reply(list(prompt_ids), seed)[: sampling.max_new_tokens]
        self.counters.generated_tokens += len(ids)
        finish = "stop" if ids and ids[-1] in sampling.stop_ids else "length"
        return Completion(ids, [-float(seed % 7)] * len(ids), finish, 0, self.version)  # type: ignore[arg-type]

    async def score(self, prefix_ids: Sequence[int], continuation_ids: Sequence[int], *, session: str) -> list[float]:
        return [0.0] * len(continuation_ids)

    def publish(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        self.version = version

    def open(self, session: str, *, tokens: int) -> None:
        self.opened[session] = tokens

    def release(self, session: str) -> None:
        self.released.append(session)

    def abort(self, session: str) -> None:
        raise NotImplementedError
