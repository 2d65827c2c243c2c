"""Who may go to the engine, and when."""

from __future__ import annotations

import asyncio

import pytest

from megatron_treeopsd.engine.gate import Gate, Ticket

pytestmark = pytest.mark.fast


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Door:
    """A gate with many at it at once; says who is inside."""

    def __init__(self, *, slots: int) -> None:
        self.gate = Gate(slots=slots, cache_tokens=1000)
        self.tasks: dict[str, asyncio.Task[Ticket]] = {}

    async def come(self, **prompts: list[int]) -> None:
        for name, ids in prompts.items():
            self.tasks[name] = asyncio.create_task(self.gate.enter(ids))
        await settle()

    @property
    def inside(self) -> set[str]:
        return {name for name, task in self.tasks.items() if task.done()}

    async def prefilled(self, name: str) -> None:
        self.gate.prefilled(self.tasks[name].result())
        await settle()

    async def leave(self, name: str, sampled: tuple[int, ...] = ()) -> None:
        self.gate.leave(self.tasks.pop(name).result(), sampled=sampled)
        await settle()


def test_a_common_prefix_is_computed_by_one() -> None:
    async def run() -> None:
        door = Door(slots=9)
        await door.come(a=[1, 2, 3, 4], b=[1, 2, 3, 5], c=[7, 8, 9], d=[1, 2, 3, 4])
        assert door.inside == {"a", "c"}
        await door.prefilled("c")
        assert door.inside == {"a", "c"}
        await door.prefilled("a")
        assert door.inside == {"a", "b", "c", "d"}
        assert [door.tasks[name].result().leads for name in "abcd"] == [False, False, False, False]

    asyncio.run(run())


def test_what_was_sampled_is_known_but_for_the_last_token() -> None:
    async def run() -> None:
        door = Door(slots=9)
        await door.come(a=[1, 2, 3])
        await door.prefilled("a")
        await door.leave("a", sampled=(4, 5, 6))
        await door.come(b=[1, 2, 3, 4, 5, 6], c=[1, 2, 3, 4, 5, 6, 7, 8], d=[1, 2, 3, 4, 5, 6, 7, 9])
        assert door.inside == {"b", "c"}, "b lacks its last token only; d waits for 6 and 7"

    asyncio.run(run())


def test_the_deepest_goes_first_when_slots_are_short() -> None:
    async def run() -> None:
        door = Door(slots=1)
        await door.come(first=[1, 1])
        await door.come(trunk=[2, 2], branch=[3, 3, 3, 3], later=[4, 4])
        assert door.inside == {"first"}
        for expected in ("branch", "trunk", "later"):
            await door.leave(next(iter(door.inside)))
            assert door.inside == {expected}

    asyncio.run(run())


def test_a_leader_that_fails_or_gives_up_holds_nobody_back() -> None:
    async def run() -> None:
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

    asyncio.run(run())
