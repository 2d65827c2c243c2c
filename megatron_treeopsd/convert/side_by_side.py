"""Threads that write files of their own, side by side.

Most of a conversion is the system's copying, for which Python's threads do not wait for each other; but a file system
lets one thread at a time write a file. So a checkpoint is divided into a few files at least, which depends on its size
only: the result is the same on every machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from megatron_treeopsd.convert.watch import Watch
from megatron_treeopsd.weights.rules import WeightsError

THREADS = 4
"""At most. More would wait for Python, which runs between the pieces that are copied, more than they gain."""
FILE_BYTES = 256 * 2**20
"""What is smaller is not divided for the sake of threads."""

_T = TypeVar("_T")


def _begin(pool: ThreadPoolExecutor, task: Callable[[], _T]) -> Future[_T]:
    try:
        return pool.submit(task)
    except RuntimeError as error:
        raise WeightsError(f"{error}; raise the limit of processes (ulimit -u)") from None


def files_for(nbytes: int) -> int:
    """Into how many files of about equal size a checkpoint should be divided, so that threads have one each."""
    return max(1, min(THREADS, nbytes // FILE_BYTES))


def balanced(sizes: Sequence[int], count: int) -> list[int]:
    """Which of `count` consecutive parts of about equal size each item belongs to: that of its middle."""
    total, end, parts = max(1, sum(sizes)), 0, []
    for size in sizes:
        end += size
        parts.append(min(count - 1, (2 * end - size) * count // (2 * total)))
    return parts


def side_by_side(tasks: Sequence[Callable[[], _T]], watch: Watch) -> list[_T]:
    """Do all tasks, as many at once as there are cores for this process; returns their results in order.

    If one fails, the others stop at the next values that `watch` sees, and its error is raised when they have.
    """
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # each of them works on one core
    try:
        with ThreadPoolExecutor(max(1, min(THREADS, cores)), "convert") as pool:
            try:
                futures = [_begin(pool, task) for task in tasks]
                wait(futures, return_when=FIRST_EXCEPTION)
                for future in futures:
                    if future.done() and (error := future.exception()) is not None:
                        raise error
                return [future.result() for future in futures]
            except BaseException:
                watch.stop()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        torch.set_num_threads(before)
