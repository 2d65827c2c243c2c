"""Who may go to the engine, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from megatron_treeopsd.engine.gate import IDLE_SECONDS, Gate, Ticket
from megatron_treeopsd.engine.tree_sizes import TreeSizes

pytestmark = pytest.mark.fast


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Door:
    """A gate with many at it at once; says who is inside. Requests sample at most `new_tokens`."""

    def __init__(self, *, slots: int = 99, cache_tokens: int = 1000, new_tokens: int = 0) -> None:
        self.gate = Gate(slots=slots, cache_tokens=cache_tokens)
        self.new_tokens = new_tokens
        self.tasks: dict[str, asyncio.Task[Ticket]] = {}

    async def come(self, session: str = "tree", expected: int = 0, **prompts: list[int]) -> None:
        for name, ids in prompts.items():
            entering = self.gate.enter(ids, session=session, new_tokens=self.new_tokens, expected=expected)
            self.tasks[name] = asyncio.create_task(entering)
        await settle()

    @property
    def inside(self) -> set[str]:
        return {name for name, task in self.tasks.items() if task.done()}

    async def prefilled(self, *names: str) -> None:
        for name in names:
            self.gate.prefilled(self.tasks[name].result())
        await settle()

    async def leave(self, name: str, sampled: tuple[int, ...] = ()) -> None:
        self.gate.leave(self.tasks.pop(name).result(), sampled=sampled)
        await settle()

    async def release(self, session: str) -> int:
        tokens = self.gate.release(session)
        await settle()
        self.gate._known.check()
        return tokens


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


# --------------------------------------------------------------------------------------------------- common prefixes
def test_a_common_prefix_is_computed_by_one() -> None:
    async def test() -> None:
        door = Door()
        await door.come(a=[1, 2, 3, 4], b=[1, 2, 3, 5], c=[7, 8, 9], d=[1, 2, 3, 4])
        assert door.inside == {"a", "c"}
        await door.prefilled("c")
        assert door.inside == {"a", "c"}
        await door.prefilled("a")
        assert door.inside == {"a", "b", "c", "d"}
        assert [door.tasks[name].result().leads for name in "abcd"] == [False, False, False, False]

    run(test())


def test_what_was_sampled_is_known_but_for_the_last_token() -> None:
    async def test() -> None:
        door = Door()
        await door.come(a=[1, 2, 3])
        await door.prefilled("a")
        await door.leave("a", sampled=(4, 5, 6))
        await door.come(b=[1, 2, 3, 4, 5, 6], c=[1, 2, 3, 4, 5, 6, 7, 8], d=[1, 2, 3, 4, 5, 6, 7, 9])
        assert door.inside == {"b", "c"}, "b lacks its last token only; d waits for 6 and 7"

    run(test())


def test_a_leader_that_fails_or_gives_up_holds_nobody_back() -> None:
    async def test() -> None:
        door = Door(slots=2)
        await door.come(a=[1, 2, 3], b=[1, 2, 4], c=[9, 9, 9], d=[8, 8, 8])
        assert door.inside == {"a", "c"}
        door.tasks.pop("d").cancel()
        await settle()
        await door.leave("a")  # without having computed its prompt
        assert door.inside == {"b", "c"}
        await door.leave("c")
        await door.come(e=[7, 7])
        assert door.inside == {"b", "e"}, "the one who went away takes no slot"

    run(test())


# ------------------------------------------------------------------------------------------------------------- order
def test_old_trees_go_first_and_the_deepest_turn_of_a_tree() -> None:
    async def test() -> None:
        door = Door(slots=1)
        await door.come("one", first=[1, 1])
        await door.come("two", trunk=[2, 2], long_trunk=[2, 3, 4, 5, 6])
        await door.come("one", turn=[1, 1, 7], deeper=[1, 1, 8, 8])
        await door.come("three", last=[4, 4, 4, 4, 4, 4, 4, 4])
        for expected in ("deeper", "turn", "long_trunk", "trunk", "last"):
            await door.leave(next(iter(door.inside)))
            assert door.inside == {expected}

    run(test())


def test_the_engine_is_told_the_order() -> None:
    async def test() -> None:
        door = Door()
        await door.come("one", a=[1, 1])
        await door.prefilled("a")
        await door.come("two", b=[2, 2])
        await door.come("one", c=[1, 1, 3])
        a, b, c = (door.tasks[name].result().priority for name in "abc")
        assert a == c > b

    run(test())


# --------------------------------------------------------------------------------------------------------- admission
def test_unique_tokens_decide_who_is_let_in() -> None:
    """A cache of 20, a prompt of 6 with branches that may sample 3 each, and another tree of 10 + 3."""

    async def test() -> None:
        door = Door(cache_tokens=20, new_tokens=3)
        prompt = [1, 2, 3, 4, 5, 6]
        await door.come("one", a=prompt, b=prompt, c=prompt, d=prompt, e=prompt, f=prompt)
        await door.prefilled("a")
        assert door.inside == {"a", "b", "c", "d"}, "6 + 4 * 3"
        await door.come("two", other=[9, 8, 7, 6, 5, 4, 3, 2, 1, 0])
        await door.leave("a", sampled=(7, 7, 7))  # of which the last is not cached
        assert door.inside == {"b", "c", "d", "e"}, "8 + 4 * 3"
        await door.leave("b", sampled=(8,))
        assert door.inside == {"c", "d", "e", "f"}, "what b did not use is free for f"
        for name in "cdef":
            await door.leave(name, sampled=(9,))
        assert door.inside == set(), "8 + 10 + 3"
        assert await door.release("one") == 8
        assert door.inside == {"other"}

    run(test())


def test_a_tree_begins_when_the_others_will_leave_room_for_it() -> None:
    async def test() -> None:
        door = Door(cache_tokens=30, new_tokens=2)
        await door.come("one", expected=20, a=[1, 1, 1])
        await door.come("two", expected=20, b=[2, 2, 2])
        await door.come("three", expected=5, c=[3, 3, 3])
        assert door.inside == {"a"}, "three would fit, but it would keep two waiting for ever"
        await door.prefilled("a")
        await door.leave("a", sampled=(5, 5))
        await door.come("one", d=[1, 1, 1, 5, 5, 6])
        assert door.inside == {"d"}, "a tree that has begun needs room for its next turn only"
        await door.prefilled("d")
        await door.leave("d", sampled=(7,))
        assert await door.release("one") == 6
        assert door.inside == {"b", "c"}

    run(test())


def test_the_oldest_tree_goes_on_even_if_the_engine_has_to_throw_something_out() -> None:
    """What does not run may go: a finished branch of the tree itself, or what others will compute again."""

    async def test() -> None:
        door = Door(cache_tokens=20, new_tokens=4)
        await door.come("one", a=[1] * 5)
        await door.prefilled("a")
        await door.leave("a", sampled=(3, 3, 3, 3))
        await door.come("two", b=[2] * 3)
        await door.prefilled("b")
        await door.come("two", c=[2] * 3 + [4] * 2)
        assert door.inside == {"b"}, "8 + 3 + 4 and 2 + 4 are too many"
        await door.come("one", d=[1] * 5 + [6] * 2)
        assert door.inside == {"b", "d"}, "3 + 4 and 7 + 4 are what runs"
        await door.come("one", e=[1] * 5 + [7] * 2)
        assert door.inside == {"b", "d"}, "that is the bound for what runs"

    run(test())


def test_an_idle_engine_takes_a_tree_that_may_turn_out_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        later: list[tuple[float, Callable[[], None]]] = []

        def note(wait: float, call: Callable[..., None], *arguments: Any) -> None:
            later.append((wait, partial(call, *arguments)))

        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", note)
        door = Door(cache_tokens=30)
        await door.come("one", expected=30, a=[1, 1])
        await door.prefilled("a")
        await door.leave("a", sampled=(1, 1))
        await door.come("two", expected=20, b=[2, 2])
        assert door.inside == set(), "one is about to ask again"
        await door.come("one", c=[1, 1, 1, 5])
        [(wait, first)] = later
        first()
        await settle()
        assert (wait, door.inside) == (IDLE_SECONDS, {"c"}), "and did"
        await door.leave("c")
        later[-1][1]()
        await settle()
        assert door.inside == {"b"}, "or is busy elsewhere"

    run(test())


def test_a_released_tree_leaves_nothing_behind() -> None:
    async def test() -> None:
        door = Door()
        await door.come("one", a=[1, 2, 3])
        await door.prefilled("a")
        assert await door.release("one") == 3  # while a request still runs, as after a failure
        await door.leave("a", sampled=(4, 5))
        assert await door.release("one") == await door.release("never seen") == 0
        assert door.gate._known.pinned_tokens == 0
        await door.come("two", b=[1, 2, 3, 4, 6])
        assert not door.tasks["b"].result().leads, "the engine has it still"

    run(test())


def test_expected_sizes_of_trees() -> None:
    sizes = TreeSizes()
    assert sizes.expected("unknown") == 0
    sizes.open("a", bound=100)
    sizes.open("b", bound=100)
    sizes.open("evaluation", bound=20)
    assert (sizes.expected("a"), sizes.expected("evaluation")) == (100, 20)
    sizes.close("a", tokens=40)
    sizes.close("unknown", tokens=7)
    assert (sizes.expected("b"), sizes.expected("evaluation")) == (40, 20)
    sizes.close("b", tokens=60)
    sizes.open("c", bound=100)
    assert sizes.expected("c") == 60
    sizes.close("c", tokens=0)  # the cache was flushed meanwhile, so nobody counted
    sizes.open("d", bound=100)
    assert sizes.expected("d") == 60
