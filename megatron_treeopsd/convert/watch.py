"""What is seen of tensors while they pass by: how many bytes, at what rate, and values that are no numbers."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType

from torch import Tensor
from tqdm import tqdm


class Stopped(Exception):
    """Another thread has failed, so that this one's work is of no use any more."""


class Watch:
    """A progress bar on standard error, if that is a terminal, and counts. Use as a context manager.

    Several threads may let it see what they copy; whoever calls `stop` ends them.

    Attributes:
        not_finite: Hugging Face name(s) -> how many values are NaN or infinite.
        seconds: between entering and leaving.
    """

    def __init__(self, what: str, total: int, *, shown: bool) -> None:
        self.not_finite: dict[str, int] = {}
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._stopped = False
        self._bar = tqdm(
            desc=what, total=total, unit="B", unit_scale=True, disable=None if shown else True, mininterval=0.5,
            file=sys.stderr, smoothing=0.1,
        )  # fmt: skip

    def saw(self, names: Sequence[str], values: Tensor) -> None:
        """Count bytes, and what is not finite. Raises `Stopped` after `stop`.

        A sum is the cheapest look at all values: it is finite only if they are. If they are and it overflows, the
        count is zero.
        """
        count = 0
        if values.is_floating_point() and not math.isfinite(values.sum()):
            count = int((~values.isfinite()).sum())
        with self._lock:
            self._bar.update(values.nbytes)
            if count:
                key = " + ".join(names)
                self.not_finite[key] = self.not_finite.get(key, 0) + count
        if self._stopped:
            raise Stopped

    def stop(self) -> None:
        """End all threads that go on copying."""
        self._stopped = True

    def __enter__(self) -> Watch:
        self._begin = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self.seconds = time.perf_counter() - self._begin
        self._bar.close()


def gigabytes(count: float) -> str:
    """Bytes for people, to three digits.

    >>> gigabytes(730_729)
    '0.731 MB'
    """
    unit, size = ("GB", 1e9) if count >= 1e8 else ("MB", 1e6)
    return f"{count / size:.3g} {unit}"
