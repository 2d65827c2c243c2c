"""BM25 in memory, on bm25s (Lucene's variant of the formula)."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import bm25s
import numpy as np

from megatron_treeopsd.environment.retrieval.base import Passage, Retriever

STOP_WORDS = frozenset({"a", "an", "and", "in", "is", "of", "the", "to", "what", "whose"})
_TERM = re.compile(r"[^\W_]+(?:'[^\W_]+)?")


def terms(text: str) -> list[str]:
    """Index terms: words in lower case without accents, stop words left out."""
    folded = unicodedata.normalize("NFKD", text.lower())
    folded = "".join(character for character in folded if not unicodedata.combining(character))
    return [term for term in _TERM.findall(folded) if term not in STOP_WORDS]


class BM25(Retriever):
    """Exact BM25 over titles and texts, with a bounded cache of results.

    Args:
        passages: the collection; at least one.
        k1: saturation of term frequency.
        b: how far scores are normalised by passage length, 0 to 1.
        title_weight: how many times a title counts against once for the text.
        cache_size: number of (query, top_k) results kept.
    """

    def __init__(
        self,
        passages: Sequence[Passage],
        *,
        k1: float = 1.2,
        b: float = 0.75,
        title_weight: int = 1,
        cache_size: int = 65_536,
    ) -> None:
        if not passages:
            raise ValueError("BM25 needs at least one passage")
        self._passages = passages
        documents = [terms(passage.title) * title_weight + terms(passage.text) for passage in passages]
        self._index = bm25s.BM25(k1=k1, b=b)
        # bm25s cannot index a collection without a single term
        self._index.index([document or [""] for document in documents], show_progress=False)
        self._cached = lru_cache(maxsize=cache_size)(self._search)

    def search(self, query: str, top_k: int) -> list[Passage]:
        """Passages with a positive score, best first; equal scores in the order of the collection."""
        return list(self._cached(tuple(terms(query)), top_k))

    def _search(self, query: tuple[str, ...], top_k: int) -> tuple[Passage, ...]:
        known = [term for term in query if term in self._index.vocab_dict]
        if not known or top_k < 1:
            return ()
        scores = self._index.get_scores(known)
        hits = np.flatnonzero(scores > 0)
        if len(hits) > top_k:
            # every hit as good as the k-th best: a partition alone leaves ties in no order
            hits = hits[scores[hits] >= np.partition(scores[hits], -top_k)[-top_k]]
        best = hits[np.argsort(-scores[hits], kind="stable")][:top_k]
        return tuple(replace(self._passages[i], score=float(scores[i])) for i in best)
