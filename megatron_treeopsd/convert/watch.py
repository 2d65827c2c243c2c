"""What is seen of tensors while they pass by: how many bytes, at what rate, and values that are no numbers."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from torch import Tensor
from tqdm import tqdm


class Watch:
    """A progress bar on standard error, and counts. Use as a context manager.

    Attributes:
        nbytes: seen so far.
        not_finite: Hugging Face name(s) -> how many values are NaN or infinite.
        seconds: between entering and leaving.
    """

    def __init__(self, what: str, total: int, *, shown: bool) -> None:
        self.nbytes = 0
        self.not_finite: dict[str, int] = {}
        self.seconds = 0.0
        self._bar = tqdm(
            desc=what, total=total, unit="B", unit_scale=True, unit_divisor=1000, disable=not shown, mininterval=0.5,
            file=sys.stderr, smoothing=0.1,
        )  # fmt: skip

    def saw(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self._bar.update(nbytes)

    def inspect(self, names: str, values: Tensor) -> None:
        """Count what is not finite. The smallest and the largest value show whether there is anything to count."""
        if not values.is_floating_point() or not values.numel():
            return
        low, high = values.aminmax()
        if not (low.isfinite() and high.isfinite()):
            self.not_finite[names] = self.not_finite.get(names, 0) + int((~values.isfinite()).sum())

    def __enter__(self) -> Watch:
        self._begin = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self.seconds = time.perf_counter() - self._begin
        self._bar.close()
