"""Trains, saves and continues at many layouts, in one or two processes; started by test_checkpoint_resume.py.

    checkpoint_worker.py write    ROOT    train four steps undisturbed; train two and save
    checkpoint_worker.py continue ROOT    (new processes) load at the same layout, train two more, compare bit for bit
    checkpoint_worker.py move     ROOT    load what other layouts wrote, compare log-probs and all state, and train on

ROOT/hf is the initial checkpoint; ROOT/<processes>_<name>/ belongs to one case.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from backend_models import TurnSquares, pack_forest, random_forest, recipe
from processes import layout
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from megatron_treeopsd.backend import checkpoint, parallel
from megatron_treeopsd.backend.checkpoint import CheckpointError
from megatron_treeopsd.backend.policy import Policy
from megatron_treeopsd.backend.state import pieces, step_counts
from megatron_treeopsd.weights import weights_of
from megatron_treeopsd.weights.rules import join

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {"plain": {}, "distributed": {"distributed_optimizer": True}},
    2: {
        "dp2": {},
        "dp2_distributed": {"distributed_optimizer": True},
        "tp2": {"tp": 2},
        "pp2": {"pp": 2},
        "ep2": {"ep": 2},
        "tp2_ep2_distributed": {"tp": 2, "ep": 2, "distributed_optimizer": True},
        "tp2_etp2": {"tp": 2, "etp": 2},
        "cp2_ep2_distributed": {"cp": 2, "ep": 2, "distributed_optimizer": True},
        "ep2_bfloat16_distributed": {"ep": 2, "distributed_optimizer": True},
    },
}


def make(root: Path, name: str, sizes: dict[str, Any], state: parallel.ParallelState) -> Policy:
    dtype = "bfloat16" if "bfloat16" in name else "float32"
    optimizer = {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1, "schedule": "cosine", "warmup_steps": 1}
    sections = {"layout": sizes, "optimizer": optimizer, "model": {"dtype": dtype}}
    return Policy(recipe(root / "hf", **sections), state, total_steps=6)


def train(policy: Policy, steps: range) -> list[float]:
    losses = []
    for step in steps:
        rng = np.random.default_rng(step)
        batches = [pack_forest(random_forest(rng, trees=1, turns=3), share=True) for _ in range(2)]
        losses.append(policy.update(batches[policy.parallel.dp_rank :: policy.parallel.dp_size], TurnSquares()).loss)
    return losses


def log_probs(policy: Policy) -> Tensor:
    """Of the same few tokens, whatever the layout."""
    return policy.log_probs([pack_forest(random_forest(np.random.default_rng(9), trees=1), share=True)])[0]


def contents(policy: Policy) -> dict[str, Tensor]:
    found = {piece.name: piece.tensor.clone() for piece in pieces(policy)}
    steps = {f"step/{name}": torch.tensor(count) for name, count in step_counts(policy.optimizer).items()}
    return found | steps | {"random": torch.get_rng_state(), "schedule": torch.tensor(policy.scheduler.num_steps)}


def assert_equal(found: dict[Any, Tensor], expected: dict[Any, Tensor]) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def whole_state(path: Path, root: Path) -> dict[tuple[str, str], Tensor]:
    """(kind, Hugging Face name) -> whole tensor, put together from the files without the code that reads them."""
    manifest = json.loads((path / "manifest.json").read_text())
    files = [load_file(path / file) for file in manifest["files"]]
    weights = {weight.key: weight for weight in weights_of(AutoConfig.from_pretrained(root / "hf"))}
    found = {}
    for name, places in manifest["pieces"].items():
        kind, key = name.split("/")
        shape = manifest["shapes"][key]
        parts = [torch.zeros(shape).flatten() for _ in range(1 + max(part for _, part, _, _ in places))]
        for rank, part, start, stop in places:
            parts[part][start:stop] = files[rank][name]
        whole = join(weights[key], [part.view(shape) for part in parts])
        found |= {(kind, hf_name): tensor for hf_name, tensor in zip(weights[key].hf, whole, strict=True)}
    return found


def case_folder(root: Path, name: str, world: int = WORLD) -> Path:
    return root / f"{world}_{name}"


def write(root: Path) -> None:
    for name, sizes in CASES[WORLD].items():
        with layout(**sizes) as (_, state):
            undisturbed = make(root, name, sizes, state)
            losses = train(undisturbed, range(4))
            case_folder(root, name).mkdir(exist_ok=True)
            torch.save((losses, contents(undisturbed)), case_folder(root, name) / f"undisturbed_{state.rank}")
        with layout(**sizes) as (_, state):
            policy = make(root, name, sizes, state)
            train(policy, range(2))
            checkpoint.save(case_folder(root, name) / "checkpoints", policy, step=2, extra={"name": name}, keep=1)
            torch.save(log_probs(policy), case_folder(root, name) / f"log_probs_{state.rank}")


def continue_here(root: Path) -> None:
    for name, sizes in CASES[WORLD].items():
        with layout(**sizes) as (_, state):
            policy = make(root, name, sizes, state)
            path = checkpoint.latest(case_folder(root, name) / "checkpoints")
            assert path is not None
            assert checkpoint.load(path, policy) == {"name": name}
            losses, expected = torch.load(case_folder(root, name) / f"undisturbed_{state.rank}")
            assert train(policy, range(2, 4)) == losses[2:], name
            assert_equal(contents(policy), expected)
    if WORLD == 2:
        one_rank_fails(root)


def move(root: Path) -> None:
    """From every layout of the other number of processes to (some of) those of this one."""
    targets = {name: sizes for name, sizes in CASES[WORLD].items() if "bfloat16" not in name}
    for source in CASES[3 - WORLD]:
        if "bfloat16" in source:
            continue
        path = checkpoint.latest(case_folder(root, source, 3 - WORLD) / "checkpoints")
        assert path is not None
        losses = torch.load(case_folder(root, source, 3 - WORLD) / "undisturbed_0")[0]
        expected = torch.load(case_folder(root, source, 3 - WORLD) / "log_probs_0")
        for name, sizes in targets.items():
            with layout(**sizes) as (_, state):
                policy = make(root, name, sizes, state)
                checkpoint.load(path, policy)
                torch.testing.assert_close(log_probs(policy), expected, atol=1e-5, rtol=0)
                again = checkpoint.save(root / "moved" / source / name, policy, step=2, extra={}, keep=1)
                assert_equal(whole_state(again, root), whole_state(path, root))
                assert train(policy, range(2, 4)) == pytest.approx(losses[2:], rel=1e-5), (source, name)


def one_rank_fails(root: Path) -> None:
    """Rank 1 cannot write: both ranks say so, and the earlier checkpoint stays the only one."""
    import resource

    folder = case_folder(root, "dp2_distributed") / "checkpoints"
    before = sorted(path.name for path in folder.iterdir())
    with layout(distributed_optimizer=True) as (_, state):
        policy = make(root, "dp2_distributed", {"distributed_optimizer": True}, state)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        if state.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))
        with pytest.raises(CheckpointError, match=r"cannot be written\. rank 1: .*File too large"):
            checkpoint.save(folder, policy, step=3, extra={}, keep=1)
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        dist.barrier()
        assert sorted(path.name for path in folder.iterdir()) == before


if __name__ == "__main__":
    {"write": write, "continue": continue_here, "move": move}[sys.argv[1]](Path(sys.argv[2]))
    if os.environ.get("RANK", "0") == "0":
        print("done")
