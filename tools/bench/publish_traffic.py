"""One of two expert-parallel processes of tools/bench/publish.py: streams the policy once and counts what it sends.

Started by torchrun with recipe words. The last line of rank 0 is JSON, of the rank with the larger ratio:
{"bytes": bytes sent to the other process, "shard_bytes": bytes of the experts that only this one holds}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from megatron_treeopsd.backend import parallel
from megatron_treeopsd.backend.policy import Policy
from megatron_treeopsd.recipes import load_recipe


def main() -> None:
    recipe = load_recipe([*sys.argv[1:], "layout.ep=2", "steps=1"])
    state = parallel.initialize(recipe.layout, seed=recipe.seed)
    policy = Policy(recipe, state, total_steps=1)
    sent = 0
    broadcast = dist.broadcast

    def counted(tensor: torch.Tensor, src: int, **options: Any) -> Any:
        nonlocal sent
        if src == state.rank:
            sent += tensor.numel() * tensor.element_size()
        return broadcast(tensor, src=src, **options)

    dist.broadcast = counted
    for _ in policy.named_tensors():
        pass
    dist.broadcast = broadcast
    shard = sum(p.numel() * p.element_size() for name, p in policy.model.named_parameters() if ".experts." in name)
    everyone = parallel.all_gather_objects({"bytes": sent, "shard_bytes": shard})
    if state.rank == 0:
        print(json.dumps(max(everyone, key=lambda found: found["bytes"] / found["shard_bytes"])))
    parallel.shutdown()


if __name__ == "__main__":
    main()
