"""What an engine gives back while training runs: how much memory, and what it costs in time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

SLEEPS = "the engine sleeps; publish to it first, which wakes it"
"""What an engine says that is asked for something while it sleeps."""


@dataclass(slots=True)
class NapCounters:
    """Since the last `reset`: seconds of going to sleep and of waking, and bytes that sleeping has freed."""

    sleep_seconds: float = 0.0
    wake_seconds: float = 0.0
    freed_bytes: int = 0

    def reset(self) -> None:
        """Start counting at zero."""
        self.sleep_seconds = self.wake_seconds = 0.0
        self.freed_bytes = 0

    @contextmanager
    def sleeping(self, used: Callable[[], int]) -> Iterator[None]:
        """Count the block as going to sleep; `used` says how many bytes are in use."""
        started, before = time.monotonic(), used()
        yield
        self.sleep_seconds += time.monotonic() - started
        self.freed_bytes += max(0, before - used())

    @contextmanager
    def waking(self) -> Iterator[None]:
        """Count the block as waking."""
        started = time.monotonic()
        yield
        self.wake_seconds += time.monotonic() - started


def nap_metrics(naps: Sequence[NapCounters]) -> dict[str, float]:
    """Of one step and all engines: the longest times, and the sum of the bytes."""
    return {
        "engine/sleep_seconds": max(nap.sleep_seconds for nap in naps),
        "engine/wake_seconds": max(nap.wake_seconds for nap in naps),
        "engine/freed_bytes": float(sum(nap.freed_bytes for nap in naps)),
    }


def resident_bytes() -> int:
    """Host memory that this process has in use."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
