"""tools/bench/traffic.py counts what can be counted by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.fast

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench" / "traffic.py"
ROWS, COLUMNS = 3, 8


@pytest.fixture(scope="module")
def traffic() -> ModuleType:
    assert importlib.util.find_spec("triton"), "Triton is not installed; it belongs to the extra dev: ./launch/test.sh"
    spec = importlib.util.spec_from_file_location("traffic", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["traffic"] = module
    spec.loader.exec_module(module)
    return module


def test_reads_and_writes(traffic: ModuleType) -> None:
    logits, label = torch.randn(ROWS, COLUMNS), torch.zeros(ROWS, 1, dtype=torch.int64)
    hidden, weight = torch.randn(ROWS, 2), torch.randn(2, COLUMNS)
    for operation, reads, writes in (
        (lambda: logits.exp(), 1, 1),
        (lambda: logits + logits, 2, 1),
        (lambda: logits.sub_(1.0), 1, 1),
        (lambda: logits.zero_(), 0, 1),
        (lambda: logits.copy_(logits.clone()), 2, 2),
        (lambda: torch.exp(logits, out=logits), 1, 1),
        (lambda: logits.sum(), 1, 0),
        (lambda: logits.gather(1, label), 0, 0),
        (lambda: torch.zeros_like(logits), 0, 1),
        (lambda: logits.t(), 0, 0),
        (lambda: torch.mm(hidden, weight), 0, 0),
        (lambda: logits.log_softmax(-1), 1, 1),
    ):
        with traffic.watch(COLUMNS) as counted:
            operation()
        assert (counted.reads, counted.writes) == (reads * logits.numel(), writes * logits.numel())


def test_launches_and_copies(traffic: ModuleType) -> None:
    with traffic.watch(COLUMNS) as counted:
        values = torch.empty(4).fill_(2.0)  # one
        view = values[1:].view(3)
        float((view * view).sum())  # two, and a value for the host
    assert counted.operations == {"fill_": 1, "mul": 1, "sum": 1}
    assert (counted.launches, counted.copies_to_host) == (3, 1)


def test_what_is_held_at_once(traffic: ModuleType) -> None:
    size = 4 * ROWS * COLUMNS
    logits = torch.randn(ROWS, COLUMNS)  # made before, not counted
    with traffic.watch(COLUMNS) as counted:
        first = logits + 1
        second = first + 1
        del first
        third = second[:, :2] + 1  # not as wide as logits
        del second, third
        logits + 1
    assert counted.peak_logit_bytes == 2 * size
    assert counted.peak_bytes == 2 * size


def test_other_widths_are_no_logits(traffic: ModuleType) -> None:
    with traffic.watch(COLUMNS + 1) as counted:
        torch.randn(ROWS, COLUMNS).exp()
    assert (counted.accesses, counted.peak_logit_bytes) == (0, 0)
