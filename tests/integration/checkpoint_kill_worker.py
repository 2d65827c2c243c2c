"""Saves checkpoints in forked processes that are killed; started by test_checkpoint_kill.py.

    checkpoint_kill_worker.py ROOT     with ROOT/hf as the initial checkpoint

All state of step n is filled with the number n, so that a mixture of two steps is seen.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backend_models import recipe

from megatron_treeopsd.backend import checkpoint, parallel
from megatron_treeopsd.backend.policy import Policy
from megatron_treeopsd.backend.state import pieces, set_step_counts, step_counts
from megatron_treeopsd.config import Layout
from megatron_treeopsd.weights.writer import SafetensorsWriter

WATCHED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
RANDOM_KILLS = 10


def save(policy: Policy, folder: Path, step: int) -> None:
    for piece in pieces(policy):
        piece.tensor.fill_(step)
    set_step_counts(policy.optimizer, {"AdamW": step})
    policy.scheduler.num_steps = step
    checkpoint.save(folder, policy, step=step, extra={"step": step}, keep=2)


def check(policy: Policy, folder: Path) -> int:
    """Load the latest checkpoint, and every other that is visible. Returns the latest one's step."""
    latest = checkpoint.latest(folder)
    assert latest is not None, "no complete checkpoint"
    assert latest in folder.glob("step_*")
    for path in sorted(folder.glob("step_*")):
        step = checkpoint.step_of(path)
        assert checkpoint.load(path, policy) == {"step": step}
        assert all((piece.tensor == step).all() for piece in pieces(policy)), path
        assert step_counts(policy.optimizer) == {"AdamW": step}
        assert policy.scheduler.num_steps == step
    return checkpoint.step_of(latest)


def forked(action: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def killed_at_each_operation(policy: Policy, folder: Path) -> int:
    """Die at the first, second, ... operation on files until a save lives to its end. Returns their number."""

    def save_and_die(step: int, at: int) -> None:
        operations = itertools.count(1)

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            if event in WATCHED and str(folder) in str(arguments[0]) and next(operations) == at:
                os.kill(os.getpid(), signal.SIGKILL)

        write = SafetensorsWriter.write

        def watched_write(self: SafetensorsWriter, name: str, tensor: Any) -> None:
            if next(operations) == at:
                os.kill(os.getpid(), signal.SIGKILL)
            write(self, name, tensor)

        SafetensorsWriter.write = watched_write  # type: ignore[method-assign]
        sys.addaudithook(watch)
        save(policy, folder, step)

    last = check(policy, folder)
    for at in itertools.count(1):
        _, status = os.waitpid(forked(lambda step=last + 1, at=at: save_and_die(step, at)), 0)  # type: ignore[misc]
        new = check(policy, folder)
        assert new in (last, last + 1)
        last = new
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            return at
    raise AssertionError


def killed_at_random(policy: Policy, folder: Path) -> int:
    """Save on and on, be killed at random moments. Returns how many saves were completed."""

    def save_forever(first: int) -> None:
        for step in itertools.count(first):
            save(policy, folder, step)

    rng = random.Random(0)
    last = first = check(policy, folder)
    for _ in range(RANDOM_KILLS):
        pid = forked(lambda step=last + 1: save_forever(step))  # type: ignore[misc]
        time.sleep(rng.uniform(0.02, 0.5))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        new = check(policy, folder)
        assert new >= last
        last = new
    return last - first


def main(root: Path) -> None:
    state = parallel.initialize(Layout(), seed=1)
    policy = Policy(recipe(root / "hf"), state)
    folder = root / "checkpoints"
    save(policy, folder, 1)
    operations = killed_at_each_operation(policy, folder)
    completed = killed_at_random(policy, folder)
    save(policy, folder, check(policy, folder) + 1)
    assert len(list(folder.iterdir())) == 2, "leftovers were not removed"
    print(operations, completed)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
