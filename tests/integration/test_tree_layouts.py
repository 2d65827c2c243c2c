"""Under every layout trees train what flattened trajectories train in one process: loss and gradients, in float64."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit")]

from backend_models import make_policy  # noqa: E402
from exactness import MiniBatch, build, cases, difference, float64, gradients  # noqa: E402
from exactness_worker import name  # noqa: E402
from processes import run  # noqa: E402

from megatron_treeopsd.backend import parallel  # noqa: E402
from megatron_treeopsd.config import Layout  # noqa: E402

TWO = [{}, {"tp": 2}, {"ep": 2}, {"tp": 2, "ep": 2}, {"pp": 2}, {"cp": 2}, {"cp": 2, "ep": 2}]
FOUR = [{"tp": 2, "cp": 2, "ep": 2}, {"tp": 2, "cp": 2, "etp": 2, "ep": 2}, {"pp": 2, "cp": 2}]
METHODS = ("bernoulli_kl", "clipped_turn_sum", "clipped_token", "replayed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, mini-batches, the flattened gradients of one process, and those of all layouts."""
    folder = tmp_path_factory.mktemp("exactness")
    make_policy(folder / "policy")
    numbers = {}
    state = parallel.initialize(Layout(), seed=1)
    with float64():
        policy = build(folder / "policy", state, recompute=False)
        for method, case in cases().items():
            batch = MiniBatch.around(policy, case)
            numbers[method] = [(item.credit, item.behaviour) for item in batch.items]
            torch.save(gradients(policy, [batch.flattened()], case.objective), folder / f"flattened-{method}.pt")
    parallel.shutdown()
    torch.save(numbers, folder / "items.pt")
    worker = Path(__file__).with_name("exactness_worker.py")
    for processes, layouts in ((2, TWO), (4, FOUR)):
        run(worker, processes, folder, json.dumps(layouts))
    return folder


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sizes", TWO + FOUR, ids=name)
def test_a_layout_has_the_flattened_gradients(sizes: dict[str, int], method: str, folder: Path) -> None:
    found, expected = (torch.load(folder / f"{which}-{method}.pt") for which in (name(sizes), "flattened"))
    assert difference(found, expected) <= 1e-10
