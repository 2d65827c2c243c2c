"""Our arm of step.py: `train` on a recipe, held at the start of every step until it is told to go on.

A process of its own: `python step_ours.py key=value ...`. It prints {"ready": ...} when everything is loaded, and takes
one step for every line that it reads; see step.py for the exchange.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib.metadata import version
from typing import Any
from unittest.mock import patch

from megatron_treeopsd import train as loop
from megatron_treeopsd.recipes import load_recipe
from megatron_treeopsd.session import Session

RESULTS = sys.stdout


class HeldSession(Session):
    """A session whose steps wait to be asked for, off its own clock, and are reported with what they cost."""

    def steps(self) -> Iterator[int]:
        send({"ready": True, "versions": {name: version(name) for name in ("megatron-core", "transformers")}})
        for step in super().steps():
            with self.spans.paused("turn of the other arm"):
                sys.stdin.readline()
            cpu, wall = time.process_time(), time.perf_counter()
            yield step
            send({"cpu_seconds": time.process_time() - cpu, "wall_seconds": time.perf_counter() - wall})


def send(message: dict[str, Any]) -> None:
    print(json.dumps(message), file=RESULTS, flush=True)


def main() -> None:
    recipe = load_recipe(sys.argv[1:])
    with patch.object(loop, "Session", HeldSession), redirect_stdout(sys.stderr):
        loop.train(recipe)


if __name__ == "__main__":
    main()
