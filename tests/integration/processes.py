"""Starting workers as one or several processes, and changing the layout inside them.

Starting a process costs seconds of imports, so one worker goes through many layouts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HELPERS = ROOT / "tests" / "unit"


def run(worker: Path, processes: int, *arguments: object) -> str:
    """Run `worker` to its end (under torchrun for several processes) and return what it printed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [sys.executable, *(launcher if processes > 1 else []), str(worker), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{HELPERS}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-12000:]
    return done.stdout


@contextmanager
def layout(**sizes: int) -> Iterator[tuple]:  # type: ignore[type-arg]
    """(Layout, ParallelState) of this process; other groups than those of the layout before, same process group."""
    import torch
    import torch.distributed as dist

    from megatron_treeopsd.backend import parallel
    from megatron_treeopsd.config import Layout

    chosen = Layout(**sizes)
    if "RANK" not in os.environ:
        yield chosen, parallel.initialize(chosen, seed=1)
        parallel.shutdown()
        return

    from megatron.core import parallel_state as mpu

    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    yield chosen, parallel.divide(chosen, 1, torch.device("cpu"))
    dist.barrier()
    mpu.destroy_model_parallel()
