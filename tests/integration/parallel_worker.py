"""Three training steps under one layout, in one of the processes of a run; started by test_parallel.py.

    parallel_worker.py FOLDER NAME '{"tp": 2}'   (under torchrun, or alone)

For each checkpoint below FOLDER, with and without the distributed optimizer, writes what rank 0 saw to
FOLDER/NAME-CHECKPOINT-OPTIMIZER.pt: losses, gradient norms, learning rates, log-probs, reports and the final weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from backend_models import TurnSquares, empty_batch, pack_forest, random_forest, recipe

from megatron_treeopsd.backend import parallel
from megatron_treeopsd.backend.parallel import ParallelState
from megatron_treeopsd.backend.policy import Policy
from megatron_treeopsd.batch.packed import PackedTrees
from megatron_treeopsd.config import Layout

STEPS = 3
OPTIMIZER = {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1, "clip_grad": 1.0, "schedule": "linear", "warmup_steps": 1}


def mini_batch(step: int) -> list[PackedTrees]:
    """Four micro-batches of different sizes, rows odd and even; the last one has nothing to train."""
    rng = np.random.default_rng(step)
    batches = [pack_forest(random_forest(rng, trees=1, turns=4 + i), share=True) for i in range(3)]
    return [*batches, empty_batch()]


def train(checkpoint: Path, layout: Layout, state: ParallelState) -> dict[str, torch.Tensor]:
    policy = Policy(recipe(checkpoint, layout=layout.model_dump(), optimizer=OPTIMIZER), state, total_steps=STEPS + 1)
    out: dict[str, list[torch.Tensor]] = {"loss": [], "grad_norm": [], "lr": [], "logprobs": [], "reported": []}
    for step in range(STEPS):
        batches = mini_batch(step)
        mine = batches[state.dp_rank :: state.dp_size]
        scored = parallel.gather_over_data(policy.log_probs(mine))
        # back into the order of the whole mini-batch, which was dealt out like cards
        dealt = [scored[i % state.dp_size][i // state.dp_size] for i in range(len(batches))]
        result = policy.update(mine, TurnSquares())
        reports = [report for part in parallel.all_gather_objects(result.reports) for report in part]
        out["reported"].append(torch.cat([report["squares/mean"] for report in reports if report]).sort().values)
        out["logprobs"].append(torch.cat(dealt))
        for name in ("loss", "grad_norm", "lr"):
            out[name].append(torch.tensor([getattr(result, name)], dtype=torch.float64))
    found = {name: torch.cat(values) for name, values in out.items()}
    return found | {f"weight {name}": tensor.clone() for name, tensor in policy.named_tensors()}


def main(folder: Path, name: str, factors: dict[str, int]) -> None:
    layout = Layout(**factors, timeout_seconds=120)
    state = parallel.initialize(layout, seed=1)
    for checkpoint in ("tied", "untied"):
        for optimizer in ("plain", "distributed"):
            variant = layout.model_copy(update={"distributed_optimizer": optimizer == "distributed"})
            found = train(folder / checkpoint, variant, state)
            if state.rank == 0:
                torch.save(found, folder / f"{name}-{checkpoint}-{optimizer}.pt")
    parallel.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
