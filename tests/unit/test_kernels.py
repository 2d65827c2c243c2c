"""Triton kernels in Triton's interpreter, which runs on tensors of the CPU; and when kernels are chosen at all.

The interpreter is switched on before Triton is first imported, hence in a process of its own: the cases are in
kernels_turn_kl.py and kernels_token_logprobs.py, next to this file.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_treeopsd.objective.kernels import choose

pytestmark = pytest.mark.fast

HERE = Path(__file__).resolve().parent
CASES = ("kernels_turn_kl.py", "kernels_token_logprobs.py")


def test_interpreted() -> None:
    assert importlib.util.find_spec("triton"), "Triton is not installed; it belongs to the extra dev: ./launch/test.sh"
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", *(str(HERE / cases) for cases in CASES), "-p", "no:cacheprovider",
            # numpy, which the interpreter computes with, warns of the infinities that are looked for
            "-W", "ignore::RuntimeWarning",
        ],
        cwd=HERE.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )  # fmt: skip
    print(done.stdout[-2000:])
    assert done.returncode == 0, f"\n{done.stdout}{done.stderr}"


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_torch_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    choice = choose(CPU)
    assert not choice.kernels
    assert choice.reason == "torch: Triton kernels need a GPU, and the tensors are on cpu"


def test_kernels_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert choose(GPU).kernels
    assert choose(GPU).reason == "Triton kernels"


def test_torch_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    choice = choose(GPU)
    assert not choice.kernels
    assert "pip install triton" in choice.reason


def test_interpreted_kernels_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose(CPU).kernels
    assert "interpreted" in choose(CPU).reason
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not choose(CPU).kernels
