"""The conversion commands on the shipped policy: bit-equal there and back, and refusals that leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import torch
from runs import POLICY, treeopsd
from safetensors.torch import load_file


def test_there_and_back_is_bit_equal(tmp_path: Path) -> None:
    made = treeopsd("convert", "to-megatron", str(POLICY), str(tmp_path / "m"), "--tp", "2", "--ep", "2", "--verify")
    assert made.returncode == 0, made.stderr[-3000:]
    assert "verified: 101 tensors are equal bit for bit" in made.stdout + made.stderr
    back = treeopsd("convert", "to-hf", str(tmp_path / "m"), str(tmp_path / "hf"), "--verify")
    assert back.returncode == 0, back.stderr[-3000:]
    ours, theirs = load_file(tmp_path / "hf" / "model.safetensors"), load_file(POLICY / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    for file in ("config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "hf" / file).read_bytes() == (POLICY / file).read_bytes()


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    done = treeopsd("convert", "to-megatron", str(POLICY), str(tmp_path / "m"), "--ep", "4", "--dry-run")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "101" in done.stdout
    assert not (tmp_path / "m").exists()


def test_a_destination_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "notes.txt").write_text("mine")
    done = treeopsd("convert", "to-megatron", str(POLICY), str(tmp_path / "m"))
    assert done.returncode == 2
    assert "--overwrite" in done.stderr
    assert [file.name for file in (tmp_path / "m").iterdir()] == ["notes.txt"]
