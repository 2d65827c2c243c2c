"""Every parallel layout trains the same policy: losses, gradient norms, log-probs and weights of three steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
HELPERS = ROOT / "tests" / "unit"
WORKER = Path(__file__).with_name("parallel_worker.py")
TOLERANCE = 1e-5

sys.path.insert(0, str(HELPERS))

from backend_models import make_policy  # noqa: E402


def run(folder: Path, name: str, processes: int, **layout: int) -> None:
    """Run the worker; a single one without torchrun, which must work too."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *(launcher if processes > 1 else []), str(WORKER), str(folder), name, json.dumps(layout)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{HELPERS}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, and what one process makes of them."""
    folder = tmp_path_factory.mktemp("policies")
    for name in ("tied", "untied"):
        make_policy(folder / name, tied=name == "tied")
    run(folder, "one", 1)
    return folder


@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        pytest.param(2, {"tp": 2}, id="tp2"),
        pytest.param(2, {"tp": 2, "ep": 2}, id="tp2-ep2"),
        pytest.param(2, {"tp": 2, "etp": 2}, id="tp2-etp2"),
        pytest.param(2, {"ep": 2}, id="ep2"),
        pytest.param(2, {"pp": 2}, id="pp2"),
        pytest.param(2, {}, id="dp2"),
        pytest.param(2, {"cp": 2}, id="cp2"),
        pytest.param(2, {"cp": 2, "ep": 2}, id="cp2-ep2"),
        pytest.param(4, {"cp": 2, "tp": 2, "ep": 2}, id="cp2-tp2-ep2"),
        pytest.param(4, {"cp": 2, "pp": 2}, id="cp2-pp2"),
        pytest.param(4, {"tp": 2, "pp": 2, "ep": 2}, id="tp2-pp2-ep2"),
    ],
)
def test_a_layout_trains_what_one_process_trains(folder: Path, processes: int, layout: dict[str, int]) -> None:
    run(folder, "many", processes, **layout)
    for variant in ("tied-plain", "tied-distributed", "untied-plain", "untied-distributed"):
        one = torch.load(folder / f"one-{variant}.pt")
        many = torch.load(folder / f"many-{variant}.pt")
        assert one.keys() == many.keys()
        for name, expected in one.items():
            difference = (many[name] - expected).abs().max().item()
            assert difference <= TOLERANCE * max(1.0, expected.abs().max().item()), f"{variant} {name}: {difference}"


@pytest.mark.parametrize("checkpoint", ["tied", "untied"])
def test_training_changes_every_weight(folder: Path, checkpoint: str) -> None:
    """Without this, layouts that all train nothing would agree too."""
    initial = load_file(folder / checkpoint / "model.safetensors")
    found = torch.load(folder / f"one-{checkpoint}-plain.pt")
    assert {name.removeprefix("weight ") for name in found if name.startswith("weight ")} == initial.keys()
    for name, value in initial.items():
        assert (found[f"weight {name}"] - value).abs().max() > 100 * TOLERANCE, name
