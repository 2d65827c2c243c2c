"""Requests to an SGLang process: let in by the gate, asked again where a process dies over them, cut short on demand.

What SGLang itself does with a tree (0.5.23). Its cache is one radix tree with references to the sessions that use a
prefix: where it needs room, it throws out first what no session refers to, then what the fewest do, then what was not
used for longest. Closing a session removes its references and frees nothing by itself; nothing in SGLang frees single
prefixes. So a finished tree's memory is the first to be used again, and its part of the gate's account is free at once.
With these references SGLang keeps its radix tree in Python, not in Rust; what that costs on a GPU was never measured.

SGLang's own queue holds what the gate has let in and no batch has taken yet; requests carry the gate's order there too,
as priorities, and a running request is never put back for one with a higher priority.

An engine group has one engine, and a tree is grown by the training process that holds it (`collect.Share`): all turns
of a tree go to the engine that has its prefix, and there is nothing to route.

Everything is counted in tokens, which is exact for pages of one token, SGLang's default.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from megatron_treeopsd import config
from megatron_treeopsd.engine.base import EngineError
from megatron_treeopsd.engine.gate import Gate, Ticket
from megatron_treeopsd.engine.sglang_process import EngineDied, EngineProcess
from megatron_treeopsd.engine.tree_sizes import TreeSizes


class Requests:
    """What is asked of an engine, whichever process is the engine's at the moment.

    Args:
        section: the recipe's `engine` section.
        current: the engine's process.
        replace: starts another one in place of a process that is given with what is wrong with it; called in worker
            threads. Raises `EngineError` if there will be none.

    Attributes:
        unanswered: requests that wait or run.
        retractions: how often SGLang ran out of cache, put a running request back and computed it again. Admission is
            there to keep it at 0.
    """

    def __init__(
        self,
        section: config.SGLangEngine,
        *,
        current: Callable[[], EngineProcess],
        replace: Callable[[EngineProcess, str], None],
    ) -> None:
        self.unanswered = self.retractions = 0
        self._section = section
        self._current = current
        self._replace = replace
        self._sizes = TreeSizes()
        self._aborted: set[str] = set()
        self._sent: defaultdict[str, set[tuple[EngineProcess, int]]] = defaultdict(set)
        self.forget_cache()

    def forget_cache(self) -> None:
        """The engine's cache is empty."""
        self._gate = Gate(slots=self._section.max_batch, cache_tokens=self._section.cache_tokens)

    def open(self, session: str, *, tokens: int) -> None:
        """See `Engine.open`."""
        self._sizes.open(session, bound=tokens)

    def release(self, session: str) -> None:
        """See `Engine.release`."""
        self._sizes.close(session, tokens=self._gate.release(session))
        self._aborted.discard(session)
        self._sent.pop(session, None)
        self._current().send("close_session", session=session)  # answered when it is done, and nobody waits for that

    def abort(self, session: str) -> None:
        """See `Engine.abort`."""
        self._aborted.add(session)
        for process, number in tuple(self._sent[session]):
            process.send("abort", number=number)

    async def ask(
        self, call: str, ids: Sequence[int], *, session: str, new_tokens: int = 0, **fields: Any
    ) -> dict[str, Any]:
        """The answer to one request, asked again of a new process as long as the old one dies over it.

        Raises `EngineError` if the request needs more than the whole cache, or if SGLang ends it without a token.
        """
        if len(ids) + new_tokens > self._section.cache_tokens:
            raise EngineError(
                f"a request of {len(ids)} tokens that may sample {new_tokens} does not fit into the cache of "
                f"engine.cache_tokens={self._section.cache_tokens}, whatever else is in it; raise it, to "
                "task.max_context_tokens at least"
            )
        self.unanswered += 1
        try:
            while True:
                process = self._current()
                try:
                    answer = await self._ask_once(process, call, ids, session, new_tokens, fields)
                except EngineDied as error:
                    await asyncio.to_thread(self._replace, process, str(error))
                    continue
                if call != "generate" or answer["ids"]:
                    return answer
                if session not in self._aborted:
                    raise EngineError(f"SGLang ended a request of {len(ids)} tokens before its first: {answer['why']}")
        finally:
            self.unanswered -= 1

    async def _ask_once(
        self,
        process: EngineProcess,
        call: str,
        ids: Sequence[int],
        session: str,
        new_tokens: int,
        fields: dict[str, Any],
    ) -> dict[str, Any]:
        gate, sent = self._gate, self._sent[session]
        expected = self._sizes.expected(session)
        ticket = await gate.enter(ids, session=session, new_tokens=new_tokens, expected=expected)
        sampled: list[int] = []
        key = None
        late = session in self._aborted  # it waited, and its turn comes too late: one token, so that there is a turn
        try:
            if call == "generate":
                fields = {**fields, "max_new_tokens": 1 if late else new_tokens, "announce": ticket.leads}
            number, future = process.send(
                call,
                prefilled=_when_prefilled(gate, ticket),
                ids=list(ids),
                session=session,
                priority=ticket.priority,
                **fields,
            )
            key = (process, number)
            sent.add(key)
            async with asyncio.timeout(self._section.request_seconds):
                answer: dict[str, Any] = await asyncio.wrap_future(future)
            sampled = answer.get("ids", [])
            self.retractions += answer.get("retractions", 0)
            if late and answer.get("finish") == "length":  # not that of a score
                answer["finish"] = "abort"
            return answer
        except TimeoutError:
            raise EngineDied("SGLang did not answer a request within "
                             f"{self._section.request_seconds:g} s (engine.request_seconds)") from None  # fmt: skip
        except asyncio.CancelledError:
            if key is not None and call == "generate":
                process.send("abort", number=key[1])
            raise
        finally:
            if key is not None:
                sent.discard(key)
            gate.leave(ticket, sampled=sampled)


def _when_prefilled(gate: Gate, ticket: Ticket) -> Callable[[], None]:
    """Tells `gate` in the event loop, from the thread that reads answers."""
    loop = asyncio.get_running_loop()

    def tell() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(gate.prefilled, ticket)

    return tell
