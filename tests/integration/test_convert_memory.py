"""Memory of a conversion does not grow with the model: resident pages, measured in a process of its own.

Resident pages are those of the process and of files that it maps; the page cache, in which the system keeps what was
read and written, is not among them.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench" / "convert.py"
SLACK = 48 * 2**20
"""A conversion takes up to 20 MB; a tensor of the checkpoint is five times the slack, and a file twelve times."""
WORKER = """
import json, re, sys
from pathlib import Path
import torch
from megatron_treeopsd.convert.processes import Processes
from megatron_treeopsd.convert.run import convert, expected_peak
from megatron_treeopsd.convert.to_hf import ToHuggingFace
from megatron_treeopsd.convert.to_megatron import ToMegatron

def resident(which):
    return int(re.search(which + r":\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

torch.set_num_threads(1)
source, megatron, hf = map(Path, sys.argv[1:])
found = {}
for name, make, target in (
    ("to_megatron", lambda: ToMegatron(source, dtype=None, tp=2), megatron),
    ("to_hf", lambda: ToHuggingFace(megatron, dtype=None), hf),
):
    conversion = make()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of what came before
    before, expected = resident("VmRSS"), expected_peak(conversion, Processes())
    report = convert(conversion, target, Processes(), overwrite=False, verify=False, progress=False)
    found[name] = {"bytes": report.nbytes, "before": before, "expected": expected, "peak": resident("VmHWM")}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    folder = tmp_path_factory.mktemp("memory")
    bench = argparse.Namespace(**runpy.run_path(str(BENCH)))
    bench.make_checkpoint(folder / "source", 5 * 10**8, 4, vocabulary=65_536)  # largest tensors: 268 MB
    done = subprocess.run(
        [sys.executable, "-c", WORKER, *(str(folder / name) for name in ("source", "megatron", "hf"))],
        stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("way", ["to_megatron", "to_hf"])
def test_a_conversion_holds_neither_files_nor_tensors(measured: dict[str, dict[str, int]], way: str) -> None:
    found = measured[way]
    assert found["bytes"] > 5e8
    assert found["peak"] - found["before"] < SLACK


@pytest.mark.parametrize("way", ["to_megatron", "to_hf"])
def test_a_dry_run_tells_the_peak(measured: dict[str, dict[str, int]], way: str) -> None:
    """Never less than it takes, and at most a quarter more."""
    found = measured[way]
    assert found["peak"] <= found["expected"] <= 1.25 * found["peak"]
