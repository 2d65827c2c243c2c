"""`treeopsd convert` in one of two processes: it says what it read and wrote, or fails. See test_convert_processes.py.

convert_processes_worker.py FAULT ARGUMENTS...     FAULT is "none", "full" (process 1 cannot write) or "killed"
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path

from megatron_treeopsd.cli import main
from megatron_treeopsd.convert.run import convert
from megatron_treeopsd.weights.families import read_config

assert convert  # imported now, as reading code would count as reading


def transferred() -> dict[str, int]:
    """Bytes that went through system calls of this process, files and sockets alike."""
    lines = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(count) for name, count in lines if name in ("rchar", "wchar")}


def fail(fault: str) -> None:
    """Let this process fail, at once or in the middle of what it writes."""

    def kill(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and ".distcp" in str(arguments[0]):
            os.kill(os.getpid(), signal.SIGKILL)

    if fault == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    elif fault == "killed":
        sys.addaudithook(kill)


if __name__ == "__main__":
    fault, direction, source, *rest = sys.argv[1:]
    read_config(Path(source))
    if os.environ.get("RANK") == "1":
        fail(fault)
    before = transferred()
    status = main(["convert", direction, source, *rest])
    after = transferred()
    counts = {name: after[name] - before[name] for name in before}
    found = {"rank": int(os.environ.get("RANK", "0")), "read": counts["rchar"], "written": counts["wchar"]}
    sys.stdout.write(f"\n{json.dumps(found)}\n")  # in one piece: both processes write here
    sys.stdout.flush()
    sys.exit(status)
