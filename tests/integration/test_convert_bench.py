"""The benchmark of conversions: what it measures, on a checkpoint that is small enough for a test."""

from __future__ import annotations

import argparse
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "bench" / "convert.py"


@pytest.fixture(scope="module")
def bench() -> Any:
    return argparse.Namespace(**runpy.run_path(str(SCRIPT)))


def test_quick_run(bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--quick", "--json", "--folder", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    for way in ("to_megatron", "to_hf"):
        assert 0.01 < found[f"{way}_vs_cp"] < 10
        assert found[f"{way}_vs_cp"] < found[f"{way}_vs_cp_synced"]
        assert found[f"{way}_growth"] == 1  # a single size
        (entry,) = found["sizes"]
        assert 0.99 < entry[way]["read_per_byte"] < 1.01  # each byte once
        assert 0.99 < entry[way]["written_per_byte"] < 1.01
        assert 2e9 / 2**19 < entry[way]["calls_per_gb"] < 1e5
        assert any(line.startswith(way) for line in lines)
    assert 100e6 < found["bytes"] < 150e6
    assert isinstance(found["bytes"], int)
    assert isinstance(found["peak_rss_bytes"], int)
    assert 50e6 < found["peak_rss_bytes"] < 2e9
    assert not list(tmp_path.iterdir())


def test_ratios_by_hand(bench: Any) -> None:
    """Two rounds of a 2 GB copy: 1 s + 1 s for syncing against 2 s, 3 s + 1 s against 4 s."""

    def arm(seconds: float, cpu: float) -> dict[str, float]:
        io = {"rchar": 2 * 10**9, "wchar": 3 * 10**9, "syscr": 400, "syscw": 600}
        return {"seconds": seconds, "cpu_seconds": cpu, "peak_rss_bytes": 7, "io": io}

    rounds = [
        {"copy": {"seconds": 1.0, "sync_seconds": 1.0}, "convert": arm(2.0, 1.0)},
        {"copy": {"seconds": 3.0, "sync_seconds": 1.0}, "convert": arm(4.0, 3.0)},
    ]
    large = bench.summarise(rounds, 2 * 10**9)
    assert large["vs_cp_rounds"] == [0.5, 0.75]
    assert (large["vs_cp"], large["vs_cp_synced"]) == (0.625, 1.0)
    assert (large["seconds_per_gb"], large["cpu_seconds_per_gb"]) == (1.5, 1.0)
    assert (large["read_per_byte"], large["written_per_byte"], large["calls_per_gb"]) == (1.0, 1.5, 500)
    assert large["least_cpu_seconds_per_gb"] == 0.5
    small = bench.summarise(rounds, 10**9)
    found = bench.result({2.0: {"to_megatron": large, "to_hf": large}, 1.0: {"to_megatron": small, "to_hf": small}})
    assert found["to_hf_growth"] == found["to_hf_cpu_growth"] == 0.5
    assert found["bytes"] == 2 * 10**9
