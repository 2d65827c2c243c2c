"""Gradients of tree training in float64 under many layouts, in one of two or four processes (test_tree_layouts.py).

    exactness_worker.py FOLDER '[{"tp": 2}, {"cp": 2}]'   (under torchrun)

Reads the policy and FOLDER/items.pt; writes FOLDER/LAYOUT-METHOD.pt from rank 0 for every layout and method.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from exactness import MiniBatch, build, cases, float64, gradients
from processes import layout

from megatron_treeopsd.batch.pack import TrainedTree
from megatron_treeopsd.batch.weights import loss_weights

BUDGET = 150
"""Tokens of a micro-batch: trees are cut, and ranks have several."""


def main(folder: Path, layouts: list[dict[str, int]]) -> None:
    numbers = torch.load(folder / "items.pt", weights_only=False)
    for sizes in layouts:
        with layout(**sizes) as (_, state), float64():
            policy = build(folder / "policy", state, recompute=True, **sizes)
            for method, case in cases().items():
                items = [TrainedTree(tree, *own) for tree, own in zip(case.trees, numbers[method], strict=True)]
                batch = MiniBatch(case, items, loss_weights(case.trees, case.update))
                found = gradients(policy, batch.packed(state.dp_size, state.dp_rank, BUDGET), case.objective)
                if state.rank == 0:
                    torch.save(found, folder / f"{name(sizes)}-{method}.pt")
    dist.destroy_process_group()


def name(sizes: dict[str, int]) -> str:
    return "-".join(f"{key}{value}" for key, value in sizes.items()) or "dp"


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
