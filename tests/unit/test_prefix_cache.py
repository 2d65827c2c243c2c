"""The radix tree against a hand-made example and against a plain dictionary of prefixes."""

from __future__ import annotations

import random

import pytest

from megatron_treeopsd.engine.prefix_cache import PrefixCache

pytestmark = pytest.mark.fast


def slots_of(cache: PrefixCache, ids: list[int]) -> list[int]:
    return cache.match(ids).slots.tolist()


def test_the_example_of_the_module() -> None:
    cache = PrefixCache(8)
    _, start, slots = cache.insert([1, 7, 5, 8])
    assert (start, slots.tolist()) == (0, [0, 1, 2, 3])
    _, start, slots = cache.insert([1, 7, 5, 3, 3])
    assert (start, slots.tolist()) == (3, [4, 5])
    assert slots_of(cache, [1, 7, 5, 8, 9]) == [0, 1, 2, 3]
    assert slots_of(cache, [1, 7, 5, 3, 3]) == [0, 1, 2, 4, 5]
    assert slots_of(cache, [1, 7]) == [0, 1]
    assert slots_of(cache, [2]) == []
    assert cache.used_tokens == 6
    cache.check()


def test_inserting_what_is_there_takes_no_slot() -> None:
    cache = PrefixCache(8)
    node, _, _ = cache.insert([1, 2, 3])
    again, start, slots = cache.insert([1, 2, 3])
    assert again is node
    assert (start, len(slots)) == (3, 0)
    _, start, slots = cache.insert([1, 2])
    assert (start, len(slots)) == (2, 0)
    assert cache.used_tokens == 3


def test_a_pin_survives_the_split_of_its_edge() -> None:
    cache = PrefixCache(8)
    node, _, _ = cache.insert([1, 2, 3, 4])
    cache.pin(node)
    cache.insert([1, 2, 9])
    cache.check()
    cache.insert([5, 5, 5, 5])  # needs one slot more than is free: only [9] may go
    assert slots_of(cache, [1, 2, 3, 4]) == [0, 1, 2, 3]
    assert len(slots_of(cache, [1, 2, 9])) == 2
    cache.unpin(node)
    cache.check()
    cache.insert([6] * 8)
    assert len(slots_of(cache, [6] * 8)) == 8
    assert cache.evicted_tokens == 9


def test_a_prefix_is_held_to_the_token() -> None:
    cache = PrefixCache(8)
    cache.insert([1, 2, 3, 4])
    first = cache.hold([1, 2, 3, 9])  # ends within an edge, of which the rest may go
    second = cache.hold([1, 2])
    assert cache.pinned_tokens == 3
    cache.check()
    cache.insert([5] * 5)
    assert (slots_of(cache, [1, 2, 3, 4]), len(slots_of(cache, [5] * 5))) == ([0, 1, 2], 5)
    assert cache.hold([7]).parent is None  # nothing of it is cached: the root
    cache.unpin(first)
    assert cache.pinned_tokens == 2
    cache.unpin(second)
    assert cache.pinned_tokens == 0
    cache.check()


def test_the_least_recently_used_goes_first() -> None:
    cache = PrefixCache(6)
    for token in (1, 2, 3):
        cache.insert([token, token])
    cache.match([1, 1])
    cache.insert([4, 4])
    assert [len(slots_of(cache, [token, token])) for token in (1, 2, 3, 4)] == [2, 0, 2, 2]
    cache.check()


def test_a_full_cache_takes_the_leading_tokens_and_counts_the_rest() -> None:
    cache = PrefixCache(5)
    first, _, _ = cache.insert([1, 2, 3])
    cache.pin(first)
    node, start, slots = cache.insert([1, 2, 3, 4, 5, 6, 7])
    assert (start, len(slots), cache.rejected_tokens) == (3, 2, 2)
    cache.pin(node)
    same, start, slots = cache.insert([9, 9])
    assert (start, len(slots), cache.rejected_tokens) == (0, 0, 4)
    cache.pin(same)  # the root: nothing is cached, and pinning it is harmless
    cache.check()


def test_unpinning_twice_is_noticed() -> None:
    cache = PrefixCache(5)
    node, _, _ = cache.insert([1, 2])
    cache.pin(node)
    cache.unpin(node)
    with pytest.raises(AssertionError, match="more often than pinned"):
        cache.unpin(node)


def test_clear_forgets_everything() -> None:
    cache = PrefixCache(4)
    node, _, _ = cache.insert([1, 2, 3, 4])
    cache.pin(node)
    cache.clear()
    assert cache.used_tokens == 0
    assert slots_of(cache, [1, 2]) == []
    assert cache.insert([5, 6, 7, 8])[2].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("capacity", [12, 40, 15_000])
def test_random_use_against_a_table_of_slot_contents(capacity: int) -> None:
    """Whatever is matched must be exactly the prefix that was written to those slots, under pressure or not."""
    rng = random.Random(capacity)
    cache = PrefixCache(capacity)
    contents: dict[int, tuple[int, ...]] = {}  # slot -> the prefix that ends in it
    pinned = []
    longest_match = 0
    for step in range(1500):
        ids = [rng.randrange(3) for _ in range(rng.randint(1, 10))]
        match = cache.match(ids)
        assert [contents[int(slot)] for slot in match.slots] == [tuple(ids[: i + 1]) for i in range(len(match))]
        longest_match = max(longest_match, len(match))
        cache.pin(match.node)
        node, start, slots = cache.insert(ids)
        assert start >= len(match)
        assert start + len(slots) <= len(ids)
        for position, slot in enumerate(slots.tolist(), start=start):
            contents[slot] = tuple(ids[: position + 1])
        cache.unpin(match.node)
        if rng.random() < 0.3:
            cache.pin(node)
            pinned.append((node, ids[: start + len(slots)]))
        if pinned and (rng.random() < 0.3 or len(pinned) > capacity // 12):
            node, kept = pinned.pop(rng.randrange(len(pinned)))
            assert len(cache.match(kept)) == len(kept)
            cache.unpin(node)
        if capacity < 100 or step % 100 == 0:
            cache.check()
    assert longest_match >= 5
    assert (cache.evicted_tokens > 0) == (capacity < 100)
