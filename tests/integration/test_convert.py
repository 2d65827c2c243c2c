"""The conversion commands on the shipped policy: bit-equal there and back, and runs that start from either form."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest
import torch
from runs import POLICY, command, environment, metrics, trained, treeopsd, without_clocks
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped policy in Megatron's format, for tensor parallel 2 and expert parallel 2."""
    folder = tmp_path_factory.mktemp("converted") / "megatron"
    done = treeopsd("convert", "to-megatron", str(POLICY), str(folder), "--tp", "2", "--ep", "2", "--verify")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "verified: 101 tensors are equal bit for bit" in done.stdout
    assert "logits: equal to" in done.stdout
    return folder


def test_there_and_back_is_bit_equal(megatron: Path, tmp_path: Path) -> None:
    back = treeopsd("convert", "to-hf", str(megatron), str(tmp_path / "hf"), "--verify")
    assert back.returncode == 0, back.stderr[-3000:]
    ours, theirs = load_file(tmp_path / "hf" / "model.safetensors"), load_file(POLICY / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    for file in ("config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "hf" / file).read_bytes() == (POLICY / file).read_bytes()


def test_a_run_from_megatrons_format_is_the_run_from_hugging_faces(
    megatron: Path, factbook: Path, tmp_path: Path
) -> None:
    """Weights, tokenizer and template are found there; the embedded engine gets what the trainer publishes."""
    for name, folder in (("hf", POLICY), ("megatron", megatron)):
        trained(tmp_path / name, factbook, "steps=1", f"model.checkpoint={folder}", "evaluation.questions=4")
    one, two = (without_clocks(metrics(tmp_path / name)) for name in ("hf", "megatron"))
    assert one == two


def bound_by_permissions() -> None:
    """Take root's right to write everywhere (CAP_DAC_OVERRIDE) from the program that is started next."""
    drop_from_bounding_set, dac_override = 24, 1  # of linux/prctl.h and linux/capability.h
    if os.getuid() == 0 and ctypes.CDLL(None, use_errno=True).prctl(drop_from_bounding_set, dac_override, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "root's rights cannot be reduced here")


def test_a_folder_without_rights(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o555)
    done = subprocess.run(
        command("convert", "to-megatron", str(POLICY), str(tmp_path / "locked" / "out")),
        env=environment(), text=True, capture_output=True, timeout=300, check=False, preexec_fn=bound_by_permissions,
    )  # fmt: skip
    assert done.returncode == 2
    where = tmp_path / "locked"
    assert f"error: {where / 'out'}: no permission to write in {where}; choose another destination" in done.stderr
    assert list(where.iterdir()) == []
