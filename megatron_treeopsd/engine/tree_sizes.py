"""How many unique tokens a tree will have, so that an engine does not begin more trees than its cache can hold.

Who grows a tree knows a bound: so many trajectories, each of at most so many tokens. Most trees stay far below it.
Trees with the same bound are taken to be of one kind; the largest of those that finished lately is what the next one is
expected to have, and the bound itself as long as none has finished.
"""

from __future__ import annotations

from collections import defaultdict, deque

REMEMBERED = 64
"""Finished trees of a kind that count."""


class TreeSizes:
    """Sizes of the trees that an engine serves, in unique tokens."""

    def __init__(self) -> None:
        self._bounds: dict[str, int] = {}
        self._finished: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=REMEMBERED))

    def open(self, session: str, *, bound: int) -> None:
        """The tree `session` begins and will have at most `bound` tokens."""
        self._bounds[session] = bound

    def expected(self, session: str) -> int:
        """Tokens that the tree will have in the end; 0 if it was not opened."""
        bound = self._bounds.get(session, 0)
        return min(bound, max(self._finished[bound], default=bound))

    def close(self, session: str, *, tokens: int) -> None:
        """The tree is finished and had `tokens`; 0 if that is not known."""
        bound = self._bounds.pop(session, None)
        if bound is not None and tokens:
            self._finished[bound].append(tokens)
