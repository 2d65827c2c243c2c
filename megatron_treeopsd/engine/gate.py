"""Which requests go to an engine, and when: so that no prefix is computed twice and the deepest go first.

An engine that is handed two requests with a common prefix at the same moment computes that prefix twice. The gate
remembers what the engine has cached, and lets a request wait while another one computes tokens that both need. When
the engine forgets its cache, a new gate begins.

    A: [p p p p a]   goes, computes p p p p a
    B: [p p p p b]   waits until A's prompt is computed, then computes b alone
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_treeopsd.engine.prefix_cache import PrefixCache


@dataclass(slots=True, eq=False)
class Ticket:
    """One request at the gate.

    Attributes:
        ids: its prompt.
        leads: whether it computes prompt tokens that others may wait for; `Gate.prefilled` must then be called.
        followers: requests that wait for those tokens.
    """

    ids: list[int]
    admitted: asyncio.Future[None]
    leads: bool = False
    followers: list[Ticket] = field(default_factory=list)


class Gate:
    """Admits at most `slots` requests at a time; of those that could go, the one with the longest prompt goes first.

    In a tree the longest prompt is the deepest turn, so branches of a running tree go before new trunks.

    Args:
        slots: requests in the engine at a time.
        cache_tokens: capacity of the engine's cache.
    """

    def __init__(self, *, slots: int, cache_tokens: int) -> None:
        self._free = slots
        self._known = PrefixCache(cache_tokens)
        self._leading: list[Ticket] = []
        self._ready: list[tuple[int, int, Ticket]] = []
        self._order = itertools.count()

    async def enter(self, ids: Sequence[int]) -> Ticket:
        """Wait for admission. `leave` must follow, whatever happens in between."""
        ticket = Ticket(list(ids), asyncio.get_running_loop().create_future())
        self._queue(ticket)
        self._admit()
        try:
            await ticket.admitted
        except asyncio.CancelledError:
            if ticket.admitted.done() and not ticket.admitted.cancelled():
                self.leave(ticket)
            raise
        return ticket

    def prefilled(self, ticket: Ticket) -> None:
        """The engine has computed the prompt of `ticket`."""
        if ticket.leads:
            self._known.insert(ticket.ids)
            self._stop_leading(ticket)
            self._admit()

    def leave(self, ticket: Ticket, *, sampled: Sequence[int] = ()) -> None:
        """The request is over; the engine has `sampled` behind the prompt, and cached it but for its last token."""
        self._free += 1
        if sampled:
            self._known.insert([*ticket.ids, *sampled[:-1]])
        if ticket.leads:
            self._stop_leading(ticket)
        self._admit()

    def _queue(self, ticket: Ticket) -> None:
        heapq.heappush(self._ready, (-len(ticket.ids), next(self._order), ticket))

    def _stop_leading(self, ticket: Ticket) -> None:
        ticket.leads = False
        self._leading.remove(ticket)
        for follower in ticket.followers:
            self._queue(follower)
        ticket.followers.clear()

    def _admit(self) -> None:
        while self._free and self._ready:
            _, _, ticket = heapq.heappop(self._ready)
            if ticket.admitted.done() or ticket.admitted.get_loop().is_closed():  # nobody waits any more
                continue
            known = len(self._known.match(ticket.ids))
            blocker = next((lead for lead in self._leading if _shares_more(lead.ids, ticket.ids, known)), None)
            if blocker is not None:
                blocker.followers.append(ticket)
                continue
            if known < len(ticket.ids) - 1:  # an engine computes the last token of a prompt in any case
                ticket.leads = True
                self._leading.append(ticket)
            self._free -= 1
            ticket.admitted.set_result(None)


def _shares_more(a: list[int], b: list[int], known: int) -> bool:
    """True if the common prefix of `a` and `b` is longer than `known` tokens, which are known to be common to `b`.

    The last token of a prompt is not worth waiting for: the engine computes it again anyway.
    """
    return known + 1 < len(b) and a[: known + 1] == b[: known + 1]
