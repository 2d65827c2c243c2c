"""A radix tree over token ids that says which key/value slots hold which prefix.

    cache.insert([1, 7, 5, 8])       slots 0 1 2 3
    cache.insert([1, 7, 5, 3, 3])    slots 0 1 2 and, new, 4 5         [1 7 5] ─┬─ [8]      slots 3
                                                                     slots 0 1 2└─ [3 3]    slots 4 5

The tree holds numbers only; the tensors that the slots point into belong to the engine. An edge is a run of tokens;
it splits where two requests part. Who needs a prefix *pins* it (all edges up to the root count the pin); what nobody
pins is thrown out, least recently used first, when slots run short.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True, eq=False)
class Node:
    """One edge of the tree together with its lower end.

    Attributes:
        tokens: the token ids of the edge; empty at the root only.
        slots: int64, the slot of each token.
        pins: pins held on this edge or on anything below it.
        used: when the edge was last read or written, in lookups of the cache.
    """

    parent: Node | None
    tokens: list[int]
    slots: np.ndarray
    children: dict[int, Node] = field(default_factory=dict)
    pins: int = 0
    used: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a request: `slots` int64 [length], `node` is the edge in which it ends."""

    node: Node
    slots: np.ndarray

    def __len__(self) -> int:
        return len(self.slots)


class PrefixCache:
    """Token-level prefix cache over `capacity` slots.

    Attributes:
        capacity: number of slots.
        evicted_tokens: tokens thrown out since the last `clear`.
        rejected_tokens: tokens that found no slot since the last `clear`, because everything was pinned.
        pinned_tokens: tokens that cannot be thrown out.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Forget everything; nodes handed out before are dead."""
        self._root = Node(None, [], np.empty(0, dtype=np.int64))
        self._free = np.arange(self.capacity - 1, -1, -1, dtype=np.int64)  # a stack: low slots leave first
        self._free_count = self.capacity
        self._clock = 0
        self.evicted_tokens = 0
        self.rejected_tokens = 0
        self.pinned_tokens = 0

    @property
    def used_tokens(self) -> int:
        return self.capacity - self._free_count

    @property
    def pins(self) -> int:
        """Pins held in all; each of them reaches the root."""
        return self._root.pins

    def match(self, ids: Sequence[int]) -> Match:
        """The longest prefix of `ids` that is cached, possibly of length 0."""
        node, _, slots = self._walk(list(ids))
        return Match(node, np.concatenate(slots) if slots else np.empty(0, dtype=np.int64))

    def insert(self, ids: Sequence[int]) -> tuple[Node, int, np.ndarray]:
        """Make room for the tokens of `ids` that are not cached yet.

        Returns the edge in which the cached prefix now ends, the position of the first new token, and the new slots
        int64 [n], which the caller must fill with the tokens at that position and after. If not enough slots can be
        freed, only the leading tokens get one and the rest counts as rejected.
        """
        ids = list(ids)
        node, offset, found = self._walk(ids)
        start = sum(len(part) for part in found)
        if start == len(ids):
            return node, start, np.empty(0, dtype=np.int64)
        if offset < len(node.tokens):
            node = self._split(node, offset)
        self.pin(node)  # making room must not throw out the prefix that is being extended
        slots = self._allocate(len(ids) - start)
        self.unpin(node)
        self.rejected_tokens += len(ids) - start - len(slots)
        if len(slots):
            child = Node(node, ids[start : start + len(slots)], slots, used=self._clock)
            node.children[ids[start]] = child
            node = child
        return node, start, slots

    def hold(self, ids: Sequence[int]) -> Node:
        """Pin the cached prefix of `ids`, to the token; returns the node to `unpin`."""
        node, offset, _ = self._walk(list(ids))
        if offset < len(node.tokens):
            node = self._split(node, offset)
        self.pin(node)
        return node

    def pin(self, node: Node) -> None:
        """Keep the path from the root to `node` until `unpin`."""
        step: Node | None = node
        while step is not None:
            self.pinned_tokens += 0 if step.pins else len(step.tokens)
            step.pins += 1
            step = step.parent

    def unpin(self, node: Node) -> None:
        """Undo one `pin` of `node`."""
        step: Node | None = node
        while step is not None:
            step.pins -= 1
            assert step.pins >= 0, "a prefix was unpinned more often than pinned"
            self.pinned_tokens -= 0 if step.pins else len(step.tokens)
            step = step.parent

    def check(self) -> None:
        """Assert that every slot is owned exactly once, edges are well formed and pins add up along paths."""
        slots: list[int] = self._free[: self._free_count].tolist()
        pinned = 0
        stack = [self._root]
        while stack:
            node = stack.pop()
            pinned += len(node.tokens) if node.pins else 0
            assert len(node.tokens) == len(node.slots), "an edge has another number of slots than tokens"
            assert node.tokens or node is self._root, "an edge below the root is empty"
            assert node.pins >= sum(child.pins for child in node.children.values()), "a pin does not reach the root"
            for token, child in node.children.items():
                assert child.parent is node, "a child points to another parent"
                assert child.tokens[0] == token, "a child is filed under another token"
            slots += node.slots.tolist()
            stack += node.children.values()
        assert sorted(slots) == list(range(self.capacity)), "a slot is lost or owned twice"
        assert pinned == self.pinned_tokens, "the count of pinned tokens is wrong"

    def _walk(self, ids: list[int]) -> tuple[Node, int, list[np.ndarray]]:
        """Follow `ids` from the root: the edge reached, the number of its tokens matched, the slots on the way."""
        self._clock += 1
        node, offset, position = self._root, 0, 0
        slots: list[np.ndarray] = []
        while position < len(ids):
            child = node.children.get(ids[position])
            if child is None:
                break
            node = child
            node.used = self._clock
            offset = common_length(node.tokens, ids[position : position + len(node.tokens)])
            slots.append(node.slots[:offset])
            position += offset
            if offset < len(node.tokens):
                break
        return node, offset, slots

    def _split(self, node: Node, offset: int) -> Node:
        """Cut an edge after `offset` tokens. `node` stays the lower part, so pins held on it stay valid."""
        parent = node.parent
        assert parent is not None, "the root has no tokens to split"
        upper = Node(parent, node.tokens[:offset], node.slots[:offset], pins=node.pins, used=node.used)
        parent.children[upper.tokens[0]] = upper
        node.parent, node.tokens, node.slots = upper, node.tokens[offset:], node.slots[offset:]
        upper.children[node.tokens[0]] = node
        return upper

    def _allocate(self, count: int) -> np.ndarray:
        if count > self._free_count:
            self._evict(count - self._free_count)
        count = min(count, self._free_count)
        self._free_count -= count
        return self._free[self._free_count : self._free_count + count][::-1].copy()

    def _evict(self, count: int) -> None:
        """Throw out unpinned leaves, oldest first, until `count` slots are free or nothing unpinned is left.

        A little more than asked for is freed, because finding the leaves costs a walk over the tree.
        """
        target = self._free_count + max(count, self.capacity // 64)
        nodes = [self._root]
        for node in nodes:  # grows while it is walked
            nodes += node.children.values()
        heap = [(n.used, i, n) for i, n in enumerate(nodes) if not n.children and not n.pins and n is not self._root]
        heapq.heapify(heap)
        while heap and self._free_count < target:
            _, order, node = heapq.heappop(heap)
            parent = node.parent
            assert parent is not None, "the root cannot be thrown out"
            del parent.children[node.tokens[0]]
            self._free[self._free_count : self._free_count + len(node.slots)] = node.slots[::-1]
            self._free_count += len(node.slots)
            self.evicted_tokens += len(node.slots)
            if not parent.children and not parent.pins and parent is not self._root:
                heapq.heappush(heap, (parent.used, order, parent))


def common_length(a: list[int], b: list[int]) -> int:
    """Length of the common prefix of two lists of token ids."""
    if a == b:  # compared in C; the usual case
        return len(a)
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(i for i in range(length) if a[i] != b[i])
