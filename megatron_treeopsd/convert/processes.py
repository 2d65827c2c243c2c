"""The processes that convert one checkpoint: this one alone, or those that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_treeopsd.weights.rules import WeightsError

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Processes:
    """Which of `size` processes this is."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def mine(self, number: int) -> bool:
        """Whether the `number`-th of equal pieces of work is this process's."""
        return number % self.size == self.rank

    def together(self, action: Callable[[], _T]) -> list[_T]:
        """Do `action` on every process; returns the results by rank. Collective.

        Raises `WeightsError` on all of them if it failed on one, with every failure's text. Only errors that tell of
        files and their contents are passed on so; anything else is a fault and ends its process at once.
        """
        result: Any = None
        problem: str | None = None
        try:
            result = action()
        except WeightsError as error:
            if self.size == 1:
                raise
            problem = str(error)
        except OSError as error:
            problem = str(error)
        outcomes = self._gather((result, problem))
        problems = [(f"process {rank}: ", text) for rank, (_, text) in enumerate(outcomes) if text is not None]
        if problems:
            raise WeightsError("; ".join(f"{who if self.size > 1 else ''}{text}" for who, text in problems))
        return [value for value, _ in outcomes]

    def on_first(self, action: Callable[[], _T]) -> _T:
        """Do `action` on the first process while the others wait; all get its result."""
        return self.together(action if self.first else _nothing)[0]  # type: ignore[return-value]

    def _gather(self, item: Any) -> list[Any]:
        if self.size == 1:
            return [item]
        import torch.distributed as dist

        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item)
        return items


def _nothing() -> None: ...


@contextmanager
def processes() -> Iterator[Processes]:
    """All processes of a conversion, by the variables that torchrun sets; none of them means one."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Processes()
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield Processes(dist.get_rank(), size)
    finally:
        dist.destroy_process_group()
