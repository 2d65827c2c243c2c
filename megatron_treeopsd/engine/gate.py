"""Which requests go to an engine, and when: no prefix computed twice, old trees first, never more than the cache holds.

Common prefixes. An engine that is handed two requests with a common prefix at the same moment computes that prefix
twice. The gate remembers what the engine has cached, and lets a request wait while another one computes tokens that
both need:

    A: [p p p p a]   goes, computes p p p p a
    B: [p p p p b]   waits until A's prompt is computed, then computes b alone

Order. Trees go in the order in which they came, so branches and later turns of a running tree go before new trunks,
and memory is freed soon; within a tree the longest prompt, which is the deepest turn, goes first.

Admission by unique tokens. A tree that is not finished keeps all its unique tokens cached; a request needs those of its
prompt that are not, and as many as it may sample.

    cache_tokens  >=  tokens of unfinished trees + what running requests may still add       for every request
    cache_tokens  >=  sum of what each unfinished tree has, or is expected to have at last   for the first of a tree

Where the expectation was too low, the oldest tree goes on as long as the running requests themselves fit, and the
engine throws out what it used last of the others: they compute it again, but nobody waits for ever.

When the engine forgets its cache, a new gate begins.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatron_treeopsd.engine.prefix_cache import Node, PrefixCache, common_length

IDLE_SECONDS = 1.0
"""An engine that had nothing to do for so long takes another tree, though unfinished ones are expected to fill it."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One request at the gate.

    Attributes:
        ids: its prompt.
        session: the tree that it belongs to.
        new_tokens: the most tokens that it may sample.
        priority: larger for trees that go first, for an engine that orders what it was given.
        leads: whether it computes prompt tokens that others may wait for; `Gate.prefilled` must then be called.
        reserved: tokens it may still add to what is cached.
        followers: requests that wait for the tokens that it computes.
    """

    ids: list[int]
    session: str
    new_tokens: int
    priority: int
    admitted: asyncio.Future[None]
    leads: bool = False
    reserved: int = 0
    followers: list[Ticket] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Tree:
    """A tree that is not finished.

    Attributes:
        number: trees before it, in the order of their first requests.
        expected: unique tokens that it is expected to have in the end.
        open: whether a request of it was admitted.
        tokens: unique tokens that it has cached.
        held: pinned ends of its prefixes.
    """

    number: int
    expected: int
    open: bool = False
    tokens: int = 0
    held: list[Node] = field(default_factory=list)


class Gate:
    """Admits at most `slots` requests at a time, in order; see the module for order and conditions.

    Args:
        slots: requests in the engine at a time.
        cache_tokens: capacity of the engine's cache. No request may need more by itself.
    """

    def __init__(self, *, slots: int, cache_tokens: int) -> None:
        self._slots = slots
        self._known = PrefixCache(cache_tokens)
        self._trees: dict[str, _Tree] = {}
        self._running: set[Ticket] = set()
        self._leading: list[Ticket] = []
        self._ready: list[tuple[int, int, int, Ticket]] = []
        self._count = itertools.count()
        self._admissions = 0

    async def enter(self, ids: Sequence[int], *, session: str, new_tokens: int, expected: int = 0) -> Ticket:
        """Wait for admission. `leave` must follow, whatever happens in between.

        Args:
            session: the tree, until `release`.
            new_tokens: the most tokens to be sampled.
            expected: unique tokens that the tree will have in the end, if anything is known about that.
        """
        loop = asyncio.get_running_loop()
        tree = self._trees.setdefault(session, _Tree(next(self._count), expected))
        ticket = Ticket(list(ids), session, new_tokens, -tree.number, loop.create_future())
        self._queue(ticket)
        self._admit()
        if not self._running:
            loop.call_later(IDLE_SECONDS, self._admit_after_idling, self._admissions)
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
            self._remember(ticket, ticket.ids)
            ticket.reserved = ticket.new_tokens
            self._stop_leading(ticket)
            self._admit()

    def leave(self, ticket: Ticket, *, sampled: Sequence[int] = ()) -> None:
        """The request is over; the engine has `sampled` behind the prompt, and cached it but for its last token."""
        self._running.remove(ticket)
        if sampled:
            self._remember(ticket, [*ticket.ids, *sampled[:-1]])
        if ticket.leads:
            self._stop_leading(ticket)
        self._admit()
        if not self._running and self._ready:
            ticket.admitted.get_loop().call_later(IDLE_SECONDS, self._admit_after_idling, self._admissions)

    def release(self, session: str) -> int:
        """The tree is finished, and its cache may go; returns how many unique tokens it had (0: nothing known)."""
        tree = self._trees.pop(session, None)
        if tree is None:
            return 0
        for node in tree.held:
            self._known.unpin(node)
        self._admit()
        return tree.tokens

    # ------------------------------------------------------------------------------------------------------ admission
    def _queue(self, ticket: Ticket) -> None:
        heapq.heappush(self._ready, (-ticket.priority, -len(ticket.ids), next(self._count), ticket))

    def _admit(self, *, idle: bool = False) -> None:
        """Let in who may go. The first who may not holds up those behind it, or it would never find room."""
        while self._ready and len(self._running) < self._slots:
            ticket = self._ready[0][-1]
            if ticket.admitted.done() or ticket.admitted.get_loop().is_closed():  # nobody waits any more
                heapq.heappop(self._ready)
                continue
            known = len(self._known.match(ticket.ids))
            blocker = next((lead for lead in self._leading if _shares_more(lead.ids, ticket.ids, known)), None)
            if blocker is not None:
                heapq.heappop(self._ready)
                blocker.followers.append(ticket)
                continue
            tree = self._trees.setdefault(ticket.session, _Tree(-ticket.priority, 0))  # released while it waited
            if not self._fits(ticket, tree, missing=len(ticket.ids) - known, idle=idle):
                return
            heapq.heappop(self._ready)
            self._start(ticket, tree, missing=len(ticket.ids) - known)

    def _fits(self, ticket: Ticket, tree: _Tree, *, missing: int, idle: bool) -> bool:
        capacity = self._known.capacity
        unfinished = [other for other in self._trees.values() if other.open]
        if not unfinished:
            return True
        if not tree.open:
            promised = sum(max(other.tokens + self._reserved(other), other.expected) for other in unfinished)
            needed = max(len(ticket.ids) + ticket.new_tokens, tree.expected)
            return promised + needed <= capacity or (idle and not self._running)
        reserved = sum(running.reserved for running in self._running)
        if not self._running or self._known.pinned_tokens + reserved + missing + ticket.new_tokens <= capacity:
            return True
        oldest = min(unfinished, key=lambda other: other.number)
        return tree is oldest and _most_tokens([*self._running, ticket]) <= capacity

    def _start(self, ticket: Ticket, tree: _Tree, *, missing: int) -> None:
        if not tree.open:
            tree.open, tree.tokens = True, len(ticket.ids) - missing
        tree.held.append(self._known.hold(ticket.ids))
        if missing > 1:  # an engine computes the last token of a prompt in any case
            ticket.leads = True
            self._leading.append(ticket)
        ticket.reserved = missing + ticket.new_tokens
        self._running.add(ticket)
        self._admissions += 1
        ticket.admitted.set_result(None)

    def _admit_after_idling(self, admissions: int) -> None:
        if admissions == self._admissions and not self._running:
            self._admit(idle=True)

    def _reserved(self, tree: _Tree) -> int:
        return sum(running.reserved for running in self._running if running.priority == -tree.number)

    def _remember(self, ticket: Ticket, ids: list[int]) -> None:
        """The engine has `ids` cached, and they belong to the ticket's tree until that is released."""
        _, _, slots = self._known.insert(ids)
        if tree := self._trees.get(ticket.session):
            tree.tokens += len(slots)
            tree.held.append(self._known.hold(ids))

    def _stop_leading(self, ticket: Ticket) -> None:
        ticket.leads = False
        self._leading.remove(ticket)
        for follower in ticket.followers:
            self._queue(follower)
        ticket.followers.clear()


def _shares_more(a: list[int], b: list[int], known: int) -> bool:
    """True if the common prefix of `a` and `b` is longer than `known` tokens, which are known to be common to `b`.

    The last token of a prompt is not worth waiting for: the engine computes it again anyway.
    """
    return known + 1 < len(b) and a[: known + 1] == b[: known + 1]


def _most_tokens(tickets: Iterable[Ticket]) -> int:
    """Unique tokens of running requests when all have sampled as much as they may."""
    total, before = 0, list[int]()
    for ticket in sorted(tickets, key=lambda ticket: ticket.ids):  # a prompt shares most with its neighbour
        total += len(ticket.ids) - common_length(before, ticket.ids) + ticket.new_tokens
        before = ticket.ids
    return total
