"""Work for a few threads: reading and writing leave Python's lock, so two keep two processors busy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

THREADS = 2
_Worker = TypeVar("_Worker")


def run(jobs: Iterable[Callable[[_Worker], None]], make_worker: Callable[[], _Worker], threads: int = THREADS) -> None:
    """Do all jobs. Each thread has a worker of its own, and takes the next job when it is done with one.

    `jobs` is advanced by one thread at a time. The first error ends the others' work after their current jobs, and is
    raised.
    """
    waiting = iter(jobs)
    lock = Lock()
    stopped = False

    def work(_: int) -> None:
        nonlocal stopped
        worker = make_worker()
        try:
            while True:
                with lock:
                    job = None if stopped else next(waiting, None)
                if job is None:
                    return
                job(worker)
        except BaseException:
            stopped = True
            raise

    with ThreadPoolExecutor(threads, "convert") as pool:
        try:
            list(pool.map(work, range(threads)))
        except BaseException:
            stopped = True
            raise
