"""The contract between the search environment and a passage collection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage; `score` is the retriever's own measure, 0 for a passage that was not searched for."""

    id: str
    title: str
    text: str
    score: float = 0.0


class Retriever(ABC):
    """Finds passages for a query. The same query always gives the same passages in the same order."""

    @abstractmethod
    def search(self, query: str, top_k: int) -> list[Passage]:
        """At most `top_k` passages, best first. Empty where nothing matches; never a passage that does not match."""

    def close(self) -> None:
        """Free what the retriever holds (connections, indexes)."""
