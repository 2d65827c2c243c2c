"""Conversion under torchrun: two processes write what one writes, each its own part, and fail together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import HELPERS, ROOT
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

WORKER = Path(__file__).with_name("convert_processes_worker.py")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """33 MB, so that what libraries read besides does not matter."""
    folder = tmp_path_factory.mktemp("hf")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=256, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256,
        tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def convert(fault: str, *arguments: object, processes: int = 2) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return subprocess.run(
        [sys.executable, *(launcher if processes > 1 else []), str(WORKER), fault, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{HELPERS}", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def converted(*arguments: object, processes: int = 2) -> list[dict[str, int]]:
    """Convert; returns what each process read and wrote."""
    done = convert("none", *arguments, processes=processes)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    if "--verify" in arguments:
        assert "verified: 135 tensors are equal bit for bit" in done.stdout
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def megatron(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By one process, for two pipeline stages."""
    folder = tmp_path_factory.mktemp("one") / "megatron"
    converted("to-megatron", source, folder, "--pp", "2", processes=1)
    return folder


def check_halves(counts: list[dict[str, int]], nbytes: int, sides: int) -> None:
    """Each of two processes reads its half of `sides` folders, and writes its half of one."""
    assert sorted(count["rank"] for count in counts) == [0, 1]
    for count in counts:
        assert 0.45 * nbytes < count["written"] < 0.55 * nbytes, counts
        assert 0.4 * nbytes * sides < count["read"] < 0.6 * nbytes * sides, counts


def test_to_megatron(source: Path, megatron: Path, tmp_path: Path) -> None:
    size = (source / "model.safetensors").stat().st_size
    check_halves(converted("to-megatron", source, tmp_path / "two", "--pp", "2"), size, sides=1)
    assert contents(tmp_path / "two") == contents(megatron)


def test_to_hugging_face_verified(source: Path, megatron: Path, tmp_path: Path) -> None:
    size = (source / "model.safetensors").stat().st_size
    options = ("--verify", "--shard-size", f"{size // 2}B")
    counts = converted("to-hf", megatron, tmp_path / "two", *options)
    converted("to-hf", megatron, tmp_path / "one", *options, processes=1)
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    check_halves(counts, size, sides=3)  # once to write, and both sides to compare
    ours = {
        name: tensor for file in (tmp_path / "two").glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    theirs = load_file(source / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_one_that_cannot_write_ends_both_with_its_text(source: Path, tmp_path: Path) -> None:
    done = convert("full", "to-megatron", source, tmp_path / "out", "--pp", "2")
    assert done.returncode != 0
    for rank in (0, 1):
        assert f"rank {rank}: error: process 1: [Errno 27] File too large: '{tmp_path}/.out.partial/" in done.stderr
    assert "rank 1: Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_one_that_is_killed_leaves_nothing_that_loads(source: Path, megatron: Path, tmp_path: Path) -> None:
    done = convert("killed", "to-megatron", source, tmp_path / "out", "--pp", "2")
    assert done.returncode != 0
    assert not (tmp_path / "out").exists()
    converted("to-megatron", source, tmp_path / "out", "--pp", "2", "--verify")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # what the first run left is gone
    assert contents(tmp_path / "out") == contents(megatron)
