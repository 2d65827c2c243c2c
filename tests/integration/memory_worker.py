"""One update in a process that may allocate so much and no more; started by test_tree_memory.py.

    memory_worker.py tree|flattened CHECKPOINT MEGABYTES

The limit is on address space, counted from where the process stands once the policy is built and has trained a little.
Prints rows and the growth of the largest resident size in MB; ends with status 3 if memory did not suffice.
"""

from __future__ import annotations

import math
import resource
import sys
from pathlib import Path

import numpy as np
from backend_models import recipe
from exactness import UNCUT, Case, MiniBatch
from trees import search_tree

from megatron_treeopsd.backend import parallel
from megatron_treeopsd.backend.policy import Policy
from megatron_treeopsd.batch.pack import TrainedTree
from megatron_treeopsd.batch.weights import loss_weights
from megatron_treeopsd.config import Layout, Update
from megatron_treeopsd.objective import Clipped
from megatron_treeopsd.tree import RolloutTree

OUT_OF_MEMORY = 3
OBJECTIVE = Clipped(ratio="turn")


def mini_batch(tree: RolloutTree) -> MiniBatch:
    behaviour = [np.full(len(turn.sampled_ids), -5.5) for turn in tree.turns]
    item = TrainedTree(tree, np.linspace(-1, 1, len(tree.turns)), behaviour)
    return MiniBatch(Case(OBJECTIVE, Update(), [tree]), [item], loss_weights([tree], Update()))


def megabytes(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":")) / 1024


def main(form: str, checkpoint: Path, limit: float) -> int:
    policy = Policy(recipe(checkpoint), parallel.initialize(Layout(), seed=1))
    policy.update(mini_batch(search_tree(0, tokens=60, turns=4)).packed(1, 0, UNCUT), OBJECTIVE)
    batch = mini_batch(search_tree(0, tokens=900, turns=12, prompt=0.6, trunks=2, forks=9))
    (packed,) = batch.packed(1, 0, UNCUT) if form == "tree" else [batch.flattened()]
    before = megabytes("VmHWM")
    allowed = int((megabytes("VmSize") + limit) * 2**20)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    try:
        result = policy.update([packed], OBJECTIVE)
    except (RuntimeError, MemoryError) as error:
        if "memory" not in f"{type(error).__name__} {error}".lower():
            raise
        print(packed.token_count, error)
        return OUT_OF_MEMORY
    assert math.isfinite(result.loss)
    assert math.isfinite(result.grad_norm)
    print(packed.token_count, round(megabytes("VmHWM") - before))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])))
