"""BM25: the formula in float64, and the corners in which a search library returns what nobody asked for."""

from __future__ import annotations

import math

import pytest

from megatron_treeopsd import config
from megatron_treeopsd.environment import retrieval
from megatron_treeopsd.environment.retrieval.base import Passage
from megatron_treeopsd.environment.retrieval.bm25 import BM25, terms

pytestmark = pytest.mark.fast

PASSAGES = (
    Passage("0", "Kuwait", "The export partner is China."),
    Passage("1", "Kuwait", "The import partner is China."),
    Passage("2", "China", "The export partner is the United States."),
    Passage("3", "China", "The capital is Beijing."),
    Passage("4", "Chad", "The capital is N'Djamena, and the river is the Chari."),
    Passage("5", "Kuwait", "The export partner is China."),
)


def lucene_score(query: str, passage: Passage, k1: float, b: float, title_weight: int) -> float:
    """BM25 as Lucene has it: sum of idf * tf / (tf + k1 (1 - b + b length / mean length))."""
    documents = [terms(item.title) * title_weight + terms(item.text) for item in PASSAGES]
    mean = sum(map(len, documents)) / len(documents)
    document = documents[PASSAGES.index(passage)]
    score = 0.0
    for term in terms(query):
        matches = sum(term in other for other in documents)
        idf = math.log(1 + (len(documents) - matches + 0.5) / (matches + 0.5))
        frequency = document.count(term)
        score += idf * frequency / (frequency + k1 * (1 - b + b * len(document) / mean))
    return score


@pytest.mark.parametrize("title_weight", [1, 3])
@pytest.mark.parametrize("query", ["export partner Kuwait", "capital of China", "n'djamena"])
def test_scores_and_order_follow_the_formula(query: str, title_weight: int) -> None:
    index = BM25(PASSAGES, k1=1.2, b=0.75, title_weight=title_weight)
    expected = {item.id: lucene_score(query, item, 1.2, 0.75, title_weight) for item in PASSAGES}
    ranked = sorted((id for id in expected if expected[id] > 0), key=lambda id: (-round(expected[id], 5), id))
    found = index.search(query, 10)
    assert [item.id for item in found] == ranked
    assert [item.score for item in found] == pytest.approx([expected[id] for id in ranked], rel=1e-5)


def test_ties_keep_the_order_of_the_collection() -> None:
    index = BM25(PASSAGES)
    assert [item.id for item in index.search("Kuwait", 2)] == ["0", "1"]
    assert [item.id for item in index.search("Kuwait", 3)] == ["0", "1", "5"]
    short = {number for number in range(200) if number % 3 == 0}  # of the others, the first three are among the best 70
    texts = ["The capital." if number in short else "The capital Berne." for number in range(200)]
    many = BM25([Passage(str(number), "Chad", text) for number, text in enumerate(texts)])
    assert [int(item.id) for item in many.search("capital", 70)] == [*sorted(short), 1, 2, 4]


@pytest.mark.parametrize("query", ["", "   ", "?!", "the of", "unheard words"])
def test_nothing_for_a_query_without_known_terms(query: str) -> None:
    assert BM25(PASSAGES).search(query, 3) == []


def test_no_hit_without_a_score_and_no_more_hits_than_passages() -> None:
    found = BM25(PASSAGES).search("Beijing", 100)
    assert [item.id for item in found] == ["3"]
    assert len(BM25(PASSAGES).search("Kuwait China Chad", 100)) == len(PASSAGES)
    assert BM25(PASSAGES).search("Kuwait", 0) == []


def test_queries_are_read_without_case_accents_and_operators() -> None:
    index = BM25(PASSAGES)
    for query in ("BÉIJING", 'beijing AND "', "a:beijing (", "beijing unheard"):
        assert [item.id for item in index.search(query, 1)] == ["3"], query


def test_the_cache_is_bounded_and_its_results_cannot_be_changed() -> None:
    index = BM25(PASSAGES, cache_size=2)
    for query in ("Kuwait", "China", "Chad", "capital"):
        index.search(query, 2).clear()
    assert index._cached.cache_info().currsize == 2
    assert [item.id for item in index.search("capital", 2)] == ["3", "4"]


def test_passages_without_terms_can_be_indexed() -> None:
    index = BM25([Passage("0", "", "?"), Passage("1", "Chad", "N'Djamena")])
    assert [item.id for item in index.search("chad", 5)] == ["1"]


def test_an_empty_collection_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one passage"):
        BM25([])


def test_the_recipe_names_the_retriever() -> None:
    index = retrieval.build(config.Retrieval(k1=0.9, b=0.4), PASSAGES)
    (best,) = index.search("Beijing", 1)
    assert best.score == pytest.approx(lucene_score("Beijing", PASSAGES[3], 0.9, 0.4, 1), rel=1e-5)
