"""Whole runs of the command line for tests: the shipped tiny policy, the real task data, few steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
POLICY = ROOT / "launch" / "checkpoints" / "tiny-factbook"

SMALL = ("update.questions_per_step=4", "evaluation.questions=0", "packing.micro_batch_tokens=4096")
"""A step of a second or two."""


def words(run: Path, data: Path, *more: str) -> list[str]:
    """Recipe words of a small run; later words win."""
    return [f"run={run}", f"task.data={data}", f"model.checkpoint={POLICY}", *SMALL, *more]


def command(*arguments: str, processes: int = 1) -> list[str]:
    if processes == 1:
        return [sys.executable, "-m", "megatron_treeopsd.cli", *arguments]
    launcher = ["torch.distributed.run", "--nproc-per-node", str(processes), "--rdzv-backend", "c10d"]
    here = ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", "--max-restarts", "0"]
    return [sys.executable, "-m", *launcher, *here, "-m", "megatron_treeopsd.cli", *arguments]


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}


def treeopsd(*arguments: str, processes: int = 1, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run to the end, whatever the exit status."""
    return subprocess.run(
        command(*arguments, processes=processes),
        env=environment(),
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=timeout,
        check=False,
    )


def trained(run: Path, data: Path, *more: str, processes: int = 1, timeout: float = 300) -> dict[str, Any]:
    """Run a small training that must succeed; returns its summary."""
    done = treeopsd("train", *words(run, data, *more), processes=processes, timeout=timeout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    last = done.stdout.strip().splitlines()[-1]
    assert last == f"summary: {run / 'summary.json'}"
    return summary_of(run)


def summary_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def without_clocks(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metric lines without what a clock decides."""
    clocks = ("training_seconds", "total_seconds", "time", "rollout/tokens_per_second")
    kinds = ("span/", "engine/")
    return [{k: v for k, v in row.items() if k not in clocks and not k.startswith(kinds)} for row in rows]


def weights(run: Path, to: Path) -> dict[str, Tensor]:
    """The run's policy, through the export command."""
    done = treeopsd("export", str(run), str(to))
    assert done.returncode == 0, done.stderr
    return load_file(to / "model.safetensors")
