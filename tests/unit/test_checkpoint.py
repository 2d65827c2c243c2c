"""Training checkpoints in one process: bit-exact continuation, what is kept, and what is refused."""

from __future__ import annotations

import json
import logging
import random
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backend_models import TurnSquares, make_policy, pack_forest, random_forest, recipe
from torch import Tensor

from megatron_treeopsd.backend import checkpoint, parallel
from megatron_treeopsd.backend.checkpoint import CheckpointError
from megatron_treeopsd.backend.policy import Policy
from megatron_treeopsd.backend.state import pieces, step_counts

pytestmark = pytest.mark.fast

VARIANTS: dict[str, dict[str, Any]] = {
    "adam": {},
    "muon": {"optimizer": {"muon_lr": 0.02}},
    "distributed": {"layout": {"distributed_optimizer": True}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "bfloat16_distributed": {"model": {"dtype": "bfloat16"}, "layout": {"distributed_optimizer": True}},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    make_policy(folder)
    return folder


def make(source: Path, state: parallel.ParallelState, **sections: dict[str, Any]) -> Policy:
    optimizer = {"lr": 1e-3, "weight_decay": 0.1, "schedule": "linear", "warmup_steps": 1}
    sections["optimizer"] = optimizer | sections.get("optimizer", {})
    return Policy(recipe(source, **sections), state, total_steps=6)


def train(policy: Policy, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batches = [pack_forest(random_forest(np.random.default_rng(step), trees=1), share=True)]
        losses.append(policy.update(batches, TurnSquares()).loss)
    return losses


def contents(policy: Policy) -> dict[str, Tensor]:
    return {piece.name: piece.tensor.clone() for piece in pieces(policy)}


def assert_same(left: Policy, right: Policy) -> None:
    a, b = contents(left), contents(right)
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name
    assert step_counts(left.optimizer) == step_counts(right.optimizer)
    assert left.scheduler.state_dict() == right.scheduler.state_dict()


@pytest.mark.parametrize("variant", VARIANTS)
def test_continuing_is_bit_exact(variant: str, source: Path, state: parallel.ParallelState, tmp_path: Path) -> None:
    undisturbed = make(source, state, **VARIANTS[variant])
    losses = train(undisturbed, range(4))

    first = make(source, state, **VARIANTS[variant])
    train(first, range(2))
    extra = {"position": [1, 2], "seconds": 0.1 + 0.2, "name": "ä"}
    path = checkpoint.save(tmp_path, first, step=2, extra=extra, keep=2)
    assert checkpoint.step_of(path) == 2
    again = make(source, state, **VARIANTS[variant])
    assert checkpoint.load(path, again) == extra
    assert_same(again, first)
    assert train(again, range(2, 4)) == losses[2:]
    assert_same(again, undisturbed)


def test_every_state_of_the_optimizer_is_there(source: Path, state: parallel.ParallelState) -> None:
    policy = make(source, state, **VARIANTS["bfloat16_distributed"])
    train(policy, range(1))
    kinds: dict[str, set[str]] = {}
    for name in contents(policy):
        kind, key = name.split("/")
        kinds.setdefault(key, set()).add(kind)
    assert len(kinds) == len(dict(policy.model.named_parameters()))
    assert all(found == {"weight", "main", "exp_avg", "exp_avg_sq"} for found in kinds.values())
    assert step_counts(policy.optimizer) == {"AdamW": 1.0}


def test_before_the_first_step(source: Path, state: parallel.ParallelState, tmp_path: Path) -> None:
    """Optimizers create their state at the first step; saving or loading before it must change nothing."""
    undisturbed, saved, loaded = (make(source, state) for _ in range(3))
    path = checkpoint.save(tmp_path, saved, step=0, extra={}, keep=1)
    checkpoint.load(path, loaded)
    losses = train(undisturbed, range(3))
    assert train(saved, range(3)) == train(loaded, range(3)) == losses
    assert_same(saved, undisturbed)
    assert_same(loaded, undisturbed)


def test_random_states_come_back(source: Path, state: parallel.ParallelState, tmp_path: Path) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    def draw() -> tuple[list[float], float, float, list[float]]:
        with get_cuda_rng_tracker().fork():
            forked = torch.rand(3).tolist()
        return torch.rand(3).tolist(), random.gauss(0, 1), float(np.random.standard_normal()), forked

    policy = make(source, state)
    draw()  # leaves the second half of a pair of normal numbers in Python's and NumPy's state
    path = checkpoint.save(tmp_path, policy, step=1, extra={}, keep=1)
    expected = [draw() for _ in range(3)]
    checkpoint.load(path, policy)
    assert [draw() for _ in range(3)] == expected


def test_the_last_ones_are_kept_and_leftovers_removed(
    source: Path, state: parallel.ParallelState, tmp_path: Path
) -> None:
    policy, folder = make(source, state), tmp_path / "run" / "checkpoints"
    assert checkpoint.latest(folder) is None
    for step in (9, 10, 100_000_000):
        checkpoint.save(folder, policy, step=step, extra={"step": step}, keep=2)
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000010", "step_100000000"]
    assert checkpoint.latest(folder) == folder / "step_100000000"

    for leftover in (".step_00000011.partial", ".step_00000009.removed"):
        (folder / leftover).mkdir()
        (folder / leftover / "manifest.json").write_text("{}")
    (folder / "step_999999999").mkdir()  # without a manifest
    (folder / "notes").mkdir()
    assert checkpoint.latest(folder) == folder / "step_100000000"
    checkpoint.save(folder, policy, step=100_000_001, extra={}, keep=1)
    assert sorted(path.name for path in folder.iterdir()) == ["notes", "step_100000001", "step_999999999"]


def test_a_step_is_written_once(source: Path, state: parallel.ParallelState, tmp_path: Path) -> None:
    policy = make(source, state)
    path = checkpoint.save(tmp_path, policy, step=3, extra={"first": True}, keep=1)
    before = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    assert checkpoint.save(tmp_path, policy, step=3, extra={"first": False}, keep=1) == path
    assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == before


def test_full_disk_leaves_the_earlier_checkpoint(source: Path, state: parallel.ParallelState, tmp_path: Path) -> None:
    """A limit on file size stands for the disk: the system refuses the write in the middle of the file."""
    policy = make(source, state)
    good = checkpoint.save(tmp_path, policy, step=1, extra={"step": 1}, keep=1)
    train(policy, range(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"step_00000002: it cannot be written\. rank 0: .*File too large"):
            checkpoint.save(tmp_path, policy, step=2, extra={}, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == [good]
    assert checkpoint.load(good, policy) == {"step": 1}


def test_folder_that_cannot_be_made(source: Path, state: parallel.ParallelState, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"its folder cannot be made\. rank 0: .*Not a directory"):
        checkpoint.save(tmp_path / "file" / "checkpoints", make(source, state), step=1, extra={}, keep=1)


def test_state_that_is_missing_or_in_excess_is_named(
    source: Path, state: parallel.ParallelState, tmp_path: Path
) -> None:
    policy = make(source, state)
    path = checkpoint.save(tmp_path, policy, step=1, extra={}, keep=1)
    manifest = json.loads((path / "manifest.json").read_text())
    lost = "exp_avg_sq/decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight"
    manifest["pieces"]["exp_avg/decoder.layers.7.mlp.router.weight"] = manifest["pieces"].pop(lost)
    (path / "manifest.json").write_text(json.dumps(manifest))
    before = contents(policy)
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(path, policy)
    assert f"this run needs is missing:\n  {lost}" in str(error.value)
    assert "has no place for:\n  exp_avg/decoder.layers.7.mlp.router.weight" in str(error.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in contents(policy).items())


def test_another_optimizer_is_refused(source: Path, state: parallel.ParallelState, tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, make(source, state), step=1, extra={}, keep=1)
    with pytest.raises(CheckpointError, match=r"missing:\n  momentum_buffer/decoder\.layers\.0\.self_attention"):
        checkpoint.load(path, make(source, state, **VARIANTS["muon"]))
    with pytest.raises(CheckpointError, match=r"missing:\n  main/decoder"):
        checkpoint.load(path, make(source, state, **VARIANTS["bfloat16"]))


def test_another_model_is_refused(source: Path, state: parallel.ParallelState, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    path = checkpoint.save(tmp_path, make(source, state), step=1, extra={}, keep=1)
    config = AutoConfig.from_pretrained(source)
    config.moe_intermediate_size = 16
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "other")
    other = make(tmp_path / "other", state)
    wrong = r"weight/decoder\.layers\.0\.mlp\.experts\.local_experts\.0\.linear_fc1\.weight \(64, 64\)"
    with pytest.raises(CheckpointError, match=f"shapes are those of another model:\n  {wrong}\n"):
        checkpoint.load(path, other)


def test_optimizer_state_moves_to_the_distributed_optimizer_and_back(
    source: Path, state: parallel.ParallelState, tmp_path: Path
) -> None:
    plain, distributed = make(source, state), make(source, state, **VARIANTS["distributed"])
    train(plain, range(2))
    checkpoint.load(checkpoint.save(tmp_path / "a", plain, step=2, extra={}, keep=1), distributed)
    assert_same(distributed, plain)
    assert train(distributed, range(2, 3)) == train(plain, range(2, 3))
    back = make(source, state)
    checkpoint.load(checkpoint.save(tmp_path / "b", distributed, step=3, extra={}, keep=1), back)
    assert_same(back, distributed)


def test_damaged_checkpoints_are_refused(source: Path, state: parallel.ParallelState, tmp_path: Path) -> None:
    policy = make(source, state)
    path = checkpoint.save(tmp_path, policy, step=1, extra={}, keep=1)
    file, manifest = path / "rank_00000.safetensors", path / "manifest.json"
    whole, text = file.read_bytes(), manifest.read_text()

    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors is missing or is not \d+ bytes long"):
        checkpoint.load(path, policy)
    file.write_bytes(whole)
    manifest.write_text(text[:-1])
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        checkpoint.load(path, policy)
    manifest.write_text(json.dumps(json.loads(text) | {"format": 99}))
    with pytest.raises(CheckpointError, match="it has format 99; this version reads 1"):
        checkpoint.load(path, policy)
    manifest.unlink()
    with pytest.raises(CheckpointError, match=r"no manifest\.json, so it is not complete"):
        checkpoint.load(path, policy)
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        checkpoint.load(tmp_path, policy)


def test_another_layout_is_said(
    source: Path, state: parallel.ParallelState, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = make(source, state)
    path = checkpoint.save(tmp_path, policy, step=1, extra={}, keep=1)
    with caplog.at_level(logging.WARNING):
        checkpoint.load(path, policy)
    assert not caplog.records
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["layout"]["world"] = 2
    (path / "manifest.json").write_text(json.dumps(manifest))
    with caplog.at_level(logging.WARNING):
        checkpoint.load(path, policy)
    assert "the random states start anew" in caplog.text
