"""Search tools, one file each."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_treeopsd import config
from megatron_treeopsd.environment.retrieval.base import Passage, Retriever


def build(section: config.Retrieval, passages: Sequence[Passage]) -> Retriever:
    """The retriever that the recipe names, over `passages`."""
    from megatron_treeopsd.environment.retrieval.bm25 import BM25

    return BM25(passages, k1=section.k1, b=section.b, title_weight=section.title_weight)
