"""The engine for machines without a GPU: the policy runs inside this process, on transformers' own modules.

Requests wait in a queue. A scheduler coroutine takes one step after the other while there is work: it admits waiting
requests, runs *one* forward pass over the last token of every running row and the uncached prompt tokens of the
admitted ones, samples a token for each row, and answers the requests that are finished. The prefix cache makes sure
that no token of a tree is computed twice: computed prompt tokens are the unique prompt tokens, and a turn of n tokens
costs n - 1 forwards (its last token is computed with the next turn's prompt, or never).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megatron_treeopsd.engine.base import Completion, Engine, EngineError, Sampling
from megatron_treeopsd.engine.checks import check_generate, check_routes, check_score
from megatron_treeopsd.engine.kv import ATTENTION, KeyValueMemory, Layout
from megatron_treeopsd.engine.nap import SLEEPS, resident_bytes
from megatron_treeopsd.engine.policy import check_family, load_policy, replace_weights
from megatron_treeopsd.engine.prefix_cache import Node, PrefixCache
from megatron_treeopsd.engine.route_memory import RouteMemory
from megatron_treeopsd.engine.rows import Request, Rows
from megatron_treeopsd.engine.sampler import log_probabilities
from megatron_treeopsd.tree import Finish

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

PREFILL_TOKENS = 8192
"""Most prompt tokens, padding included, computed in one step; a single longer prompt still runs alone."""


class EmbeddedEngine(Engine):
    """`Engine` over a Qwen3 or Qwen3-MoE model of transformers, on CPU.

    Results for a seed are the same in any batch up to float rounding of the logits (about 1e-6).

    Args:
        model: the policy; the engine takes it over (evaluation mode, no gradients, its own attention function).
        max_batch: rows decoded together.
        cache_tokens: slots of the prefix cache. Prefixes of sessions that are not released stay cached; if they fill
            the cache, further tokens are not cached and are computed again when needed (`cache.rejected_tokens`).
        routes: keep the experts of every token, so that `Completion.routes` can be asked for.

    Attributes:
        cache: the prefix cache.
        forward_tokens: tokens that went through the model since the engine was built.
    """

    def __init__(self, model: PreTrainedModel, *, max_batch: int, cache_tokens: int, routes: bool = False) -> None:
        super().__init__()
        check_family(model.config)
        self._model = model.eval().requires_grad_(False)
        self._model.set_attn_implementation(ATTENTION)
        if model.config.model_type.endswith("_moe"):
            # The fastest of transformers' implementations on CPU; "batched_mm" copies a weight matrix per token.
            self._model.set_experts_implementation("grouped_mm")
        self._vocabulary: int = model.config.vocab_size
        self._context: int = model.config.max_position_embeddings
        self._memory = KeyValueMemory(model.config, rows=max_batch, slots=cache_tokens, dtype=model.dtype)
        self._routes = RouteMemory(self._model, rows=max_batch, slots=cache_tokens) if routes else None
        self.cache = PrefixCache(cache_tokens)
        self.forward_tokens = 0
        self._rows = Rows(max_batch, vocabulary=self._vocabulary)
        self._waiting: deque[Request] = deque()
        self._unanswered: set[asyncio.Future[Any]] = set()
        self._sessions: dict[str, set[Node]] = {}
        self._aborted: set[str] = set()
        self._scheduler: asyncio.Task[None] | None = None
        self._cancelled = False
        self._closed = False
        self._asleep = False

    @staticmethod
    def from_checkpoint(
        checkpoint: Path, *, dtype: torch.dtype, max_batch: int, cache_tokens: int, routes: bool = False
    ) -> EmbeddedEngine:
        """Build the engine from a Hugging Face folder. Raises `EngineError` if the folder cannot be used."""
        model = load_policy(checkpoint, dtype=dtype)
        return EmbeddedEngine(model, max_batch=max_batch, cache_tokens=cache_tokens, routes=routes)

    # ------------------------------------------------------------------------------------------------------ contract
    async def generate(
        self, prompt_ids: Sequence[int], *, seed: int, sampling: Sampling, session: str, routes_from: int = 0
    ) -> Completion:
        """See `Engine.generate`. A prompt that leaves no room in the model's context raises `EngineError`."""
        check_generate(prompt_ids, sampling, vocabulary=self._vocabulary, context=self._context)
        check_routes(sampling, len(prompt_ids), routes_from, returned=self._routes is not None)
        future = asyncio.get_running_loop().create_future()
        request = Request(
            list(prompt_ids), session, future, seed=seed % 2**64, sampling=sampling, routes_from=routes_from
        )
        completion: Completion = await self._submit(request)
        return completion

    async def score(self, prefix_ids: Sequence[int], continuation_ids: Sequence[int], *, session: str) -> list[float]:
        """See `Engine.score`."""
        check_score(prefix_ids, continuation_ids, vocabulary=self._vocabulary, context=self._context)
        ids = [*prefix_ids, *continuation_ids]
        future = asyncio.get_running_loop().create_future()
        logprobs: list[float] = await self._submit(Request(ids[:-1], session, future, scored=list(continuation_ids)))
        return logprobs

    def publish(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """See `Engine.publish`. Also raises `EngineError` while requests are waiting or running."""
        self._check_open()
        if self._waiting or self._rows:
            raise EngineError(f"version {version} was published while {len(self._waiting)} requests wait and "
                              f"{len(self._rows)} run; wait for them first")  # fmt: skip
        replace_weights(self._model, weights)
        self.version = version
        self._asleep = False
        self._forget()

    def release(self, session: str) -> None:
        """See `Engine.release`. Unknown sessions are ignored: a tree may fail before its first request."""
        self._aborted.discard(session)
        for node in self._sessions.pop(session, ()):
            self.cache.unpin(node)

    def sleep(self) -> None:
        """See `Engine.sleep`: the cached keys and values go, the weights stay."""
        self._check_open()
        if self._waiting or self._rows:
            raise EngineError(f"the engine cannot sleep while {len(self._waiting)} requests wait and "
                              f"{len(self._rows)} run")  # fmt: skip
        with self.naps.sleeping(resident_bytes):
            self._forget()
            self._memory.clear_pool()
        self._asleep = True

    def abort(self, session: str) -> None:
        """See `Engine.abort`. Running requests sample one more token."""
        self._aborted.add(session)
        for row, request in enumerate(self._rows.requests):
            if request.session == session:
                self._rows.cut(row)

    def close(self) -> None:
        """Answer open requests with an `EngineError` and take no more."""
        self._fail(EngineError("the engine was closed"))
        self._closed = True

    # --------------------------------------------------------------------------------------------------------- queue
    async def _submit(self, request: Request) -> Any:
        self._check_open()
        if self._asleep:
            raise EngineError(SLEEPS)
        self._sessions.setdefault(request.session, set())
        loop = asyncio.get_running_loop()
        if self._scheduler is not None and not self._scheduler.done() and self._scheduler.get_loop() is not loop:
            self._fail(EngineError("the event loop that the engine was running in has ended"))
            self._scheduler = None
        self._waiting.append(request)
        self._unanswered.add(request.future)
        if self._scheduler is None or self._scheduler.done():
            self._scheduler = loop.create_task(self._run(), name="embedded-engine")
            self._scheduler.add_done_callback(self._scheduler_ended)
        try:
            return await request.future
        except asyncio.CancelledError:
            self._cancelled = True
            raise
        finally:
            self._unanswered.discard(request.future)

    async def _run(self) -> None:
        while self._waiting or self._rows:
            self._step()
            await asyncio.sleep(0)  # lets callers take their answers and ask for the next turn

    def _scheduler_ended(self, task: asyncio.Task[None]) -> None:
        error = EngineError("the engine's scheduler was cancelled") if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Raise `error` in everybody who waits for an answer, and start over empty."""
        self._waiting.clear()
        self._rows.requests.clear()
        self._forget()
        for future in self._unanswered:
            if not future.done() and not future.get_loop().is_closed():
                future.set_exception(error)

    def _forget(self) -> None:
        self.cache.clear()
        for pins in self._sessions.values():
            pins.clear()

    # ---------------------------------------------------------------------------------------------------------- step
    @torch.inference_mode()
    def _step(self) -> None:
        if self._cancelled:
            self._drop_cancelled()
        decoding = len(self._rows)
        admitted = self._admit()
        hidden = self._forward(decoding, admitted)
        last = [hidden[:decoding]]
        position = decoding
        for row, request in enumerate(admitted, start=decoding):
            assert request.match is not None
            cached, total = len(request.match), len(request.ids)
            computed = hidden[position : position + total - cached]
            position += total - cached
            self._remember(row, request.ids)
            if request.scored is not None:
                self._answer_score(request, computed)
            elif len(computed):
                last.append(computed[-1:])
            else:
                last.append(self._memory.pool_hidden[request.match.slots[-1:]])
        while self._rows and self._rows.requests[-1].scored is not None:  # they stand behind all others
            self._leave(len(self._rows) - 1)
        if self._rows:
            finished = self._rows.sample(self._model.lm_head(torch.cat(last)))
            for row in finished:
                self._answer_generate(row)
            for row in finished[::-1]:
                self._leave(row)

    def _admit(self) -> list[Request]:
        """Give waiting requests a row, first come, first served; generate requests first, score requests after them.

        A request that needs the same uncached token as one admitted before it waits for the next step, where it finds
        that token in the cache.
        """
        picked: list[Request] = []
        deferred: list[Request] = []
        frontier: set[tuple[int, int]] = set()
        longest = 0
        while self._waiting and len(self._rows) + len(picked) < self._rows.capacity:
            request = self._waiting.popleft()
            match = self.cache.match(request.ids)
            missing = len(request.ids) - len(match)
            if missing:
                last_slot = int(match.slots[-1]) if len(match) else -1
                next_token = (last_slot, request.ids[len(match)])
                if next_token in frontier:
                    deferred.append(request)
                    continue
                longest = max(longest, missing)
                if picked and longest * (len(picked) + 1) > PREFILL_TOKENS:
                    self._waiting.appendleft(request)
                    break
                frontier.add(next_token)
            request.match = match
            self.cache.pin(match.node)
            request.pinned = match.node
            picked.append(request)
        self._waiting.extendleft(reversed(deferred))
        picked.sort(key=lambda request: request.scored is not None)
        for request in picked:
            limit = 0
            if request.sampling is not None:
                most = 1 if request.session in self._aborted else request.sampling.max_new_tokens
                limit = min(most, self._context - len(request.ids))
            self._rows.add(request, limit=limit)
            self.counters.requests += 1
            self.counters.prompt_tokens += len(request.ids)
            self.counters.cached_tokens += len(request.match or ())
        return picked

    def _forward(self, decoding: int, admitted: list[Request]) -> Tensor:
        """Final hidden states [tokens, hidden]: one of each decoding row, then the new tokens of each admitted one."""
        new = [request.ids[len(request.match or ()) :] for request in admitted]
        tokens = np.concatenate([self._rows.token[:decoding], *(np.asarray(ids, dtype=np.int64) for ids in new)])
        self._memory.reserve(int(self._rows.length[: len(self._rows)].max()) + 1)
        for row, request in enumerate(admitted, start=decoding):
            if request.match:
                self._memory.load(row, torch.from_numpy(request.match.slots))
                if self._routes is not None:
                    self._routes.load(row, torch.from_numpy(request.match.slots))
        if not len(tokens):
            return self._memory.pool_hidden[:0]
        layout = Layout.build(
            self._memory,
            torch.from_numpy(self._rows.length[:decoding]),
            [(len(request.match or ()), len(ids)) for request, ids in zip(admitted, new, strict=True)],
        )
        hidden: Tensor = self._model.model(
            input_ids=torch.from_numpy(tokens)[None],
            position_ids=layout.positions[None],
            use_cache=False,
            layout=layout,
        ).last_hidden_state[0]
        self._memory.row_hidden[layout.token_rows, layout.positions] = hidden
        if self._routes is not None:
            self._routes.note(layout.token_rows, layout.positions)
        self._rows.length[:decoding] += 1
        self.forward_tokens += len(tokens)
        return hidden

    # ------------------------------------------------------------------------------------------------------- answers
    def _answer_generate(self, row: int) -> None:
        request = self._rows.requests[row]
        assert request.match is not None
        ids, logprobs, stopped = self._rows.sampled(row)
        self._remember(row, request.ids + ids[:-1])
        self.counters.generated_tokens += len(ids)
        finish: Finish = "stop" if stopped else "abort" if request.session in self._aborted else "length"
        routes = None
        if self._routes is not None and request.sampling is not None and request.sampling.routes:
            routes = self._routes.of(row, request.routes_from, len(request.ids) + len(ids) - 1)
        if not request.future.done():
            request.future.set_result(Completion(ids, logprobs, finish, len(request.match), self.version, routes))

    def _answer_score(self, request: Request, computed: Tensor) -> None:
        assert request.match is not None
        assert request.scored is not None
        first = len(request.ids) - len(request.scored)  # position of the token in front of the continuation
        cached = self._memory.pool_hidden[request.match.slots[first:]]
        hidden = torch.cat([cached, computed])[-len(request.scored) :]
        logprobs = [
            log_probabilities(self._model.lm_head(part), ids)
            for part, ids in zip(hidden.split(512), torch.tensor(request.scored).split(512), strict=True)
        ]
        if not request.future.done():
            request.future.set_result(torch.cat(logprobs).tolist())

    def _remember(self, row: int, ids: list[int]) -> None:
        """Put what a row has computed into the cache and keep it for the row and its session."""
        request = self._rows.requests[row]
        complete = not self.cache.rejected_tokens
        node, start, slots = self.cache.insert(ids)
        if complete and self.cache.rejected_tokens:
            logger.warning(
                "the prefix cache of %d tokens is full of unfinished trees; further tokens are computed again when "
                "they are needed. Raise engine.cache_tokens or take fewer questions at once",
                self.cache.capacity,
            )
        if len(slots):
            self._memory.save(row, start, torch.from_numpy(slots))
            if self._routes is not None:
                self._routes.save(row, start, torch.from_numpy(slots))
        self.cache.pin(node)
        if request.pinned is not None:
            self.cache.unpin(request.pinned)
        request.pinned = node
        pins = self._sessions.get(request.session)  # None: released meanwhile
        if pins is not None and node not in pins:
            pins.add(node)
            self.cache.pin(node)

    def _leave(self, row: int) -> None:
        """Free a row: its request is answered or nobody waits for it any more."""
        request = self._rows.requests[row]
        if request.pinned is not None:
            self.cache.unpin(request.pinned)
        moved = self._rows.remove(row)
        if moved != row:
            self._memory.move(moved, row, int(self._rows.length[row]))
            if self._routes is not None:
                self._routes.move(moved, row, int(self._rows.length[row]))

    def _drop_cancelled(self) -> None:
        self._cancelled = False
        self._waiting = deque(request for request in self._waiting if not request.future.done())
        for row in reversed(range(len(self._rows))):
            if self._rows.requests[row].future.done():
                self._leave(row)

    # -------------------------------------------------------------------------------------------------------- checks
    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
