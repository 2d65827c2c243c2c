"""Conversion in one process: every family, layout, dtype and form of the source, there and back bit for bit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB, make_checkpoint
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_treeopsd.cli import main
from megatron_treeopsd.convert.processes import Processes
from megatron_treeopsd.convert.run import Report, convert
from megatron_treeopsd.convert.to_hf import ToHuggingFace
from megatron_treeopsd.convert.to_megatron import ToMegatron

pytestmark = pytest.mark.fast

MODELS = {
    "qwen3": {"family": "qwen3"},
    "qwen3_tied": {"family": "qwen3", "tied": True},
    "qwen3_moe": {"family": "qwen3_moe"},
    "qwen3_moe_tied": {"family": "qwen3_moe", "tied": True},
    "llama": {"family": "llama"},
    "llama_tied": {"family": "llama", "tied": True},
}
DENSE_LAYOUTS: list[dict[str, int]] = [{}, {"tp": 2}, {"tp": 4}, {"pp": 2}, {"pp": 4}, {"tp": 2, "pp": 2}]
MOE_LAYOUTS: list[dict[str, int]] = [
    {}, {"tp": 4}, {"ep": 4}, {"pp": 4}, {"tp": 2, "ep": 2, "pp": 2}, {"tp": 2, "ep": 2, "etp": 2},
    {"ep": 2, "etp": 4}, {"tp": 4, "ep": 2, "etp": 2, "pp": 2},
]  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "one_file": {},
    "sharded": {"max_shard_size": "60KB"},
    "fused_experts": {"save_original_format": False},
    "fused_experts_sharded": {"save_original_format": False, "max_shard_size": "60KB"},
}


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of small folders are written here; that they are synced is not what these tests look at."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def to_megatron(source: Path, destination: Path, dtype: torch.dtype | None = None, **layout: int) -> Report:
    return run(ToMegatron(source, dtype=dtype, **layout), destination)


def to_hf(source: Path, destination: Path, dtype: torch.dtype | None = None, **options: Any) -> Report:
    return run(ToHuggingFace(source, dtype=dtype, **options), destination)


def run(conversion: ToMegatron | ToHuggingFace, destination: Path) -> Report:
    return convert(conversion, destination, Processes(), overwrite=False, verify=False, progress=False)


def tensors(folder: Path) -> dict[str, Tensor]:
    """Everything in the safetensors files of a folder, read by their own package."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def forms_of(model: str, dtype: torch.dtype, root: Path) -> list[Path]:
    """The same checkpoint in every form; the first is that of published ones."""
    folders = []
    for name, options in FORMS.items():
        if "fused" not in name or "moe" in model:
            make_checkpoint(root / name, dtype=dtype, **MODELS[model], **options)
            folders.append(root / name)
    return folders


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_there_and_back_at_every_layout(model: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Each layout reads another form of the source; that the forms are one and the same is the next test."""
    forms = forms_of(model, dtype, tmp_path)
    expected = tensors(forms[0])
    assert {tensor.dtype for tensor in expected.values()} == {dtype}
    for number, layout in enumerate(MOE_LAYOUTS if "moe" in model else DENSE_LAYOUTS):
        megatron, hf = tmp_path / f"megatron{number}", tmp_path / f"hf{number}"
        to_megatron(forms[number % len(forms)], megatron, **layout)
        to_hf(megatron, hf, shard_bytes=10**9 if number % 2 else 50_000)
        assert_equal(tensors(hf), expected)
        for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
            assert (hf / name).read_bytes() == (forms[0] / name).read_bytes(), name


@pytest.mark.parametrize("model", ["qwen3_moe", "llama"])
def test_every_form_of_the_source_gives_the_same_bytes(model: str, tmp_path: Path) -> None:
    made = []
    for number, form in enumerate(forms_of(model, torch.float32, tmp_path)):
        to_megatron(form, tmp_path / f"megatron{number}", tp=2, pp=2)
        made.append(contents(tmp_path / f"megatron{number}"))
    assert all(folder == made[0] for folder in made)
    assert len(made[0]) > 8


@pytest.mark.parametrize("model", ["qwen3_moe", "qwen3_tied", "llama"])
def test_another_dtype_is_that_of_torch(model: str, tmp_path: Path) -> None:
    """Rounded once, wherever; widening loses nothing. `config.json` states what was written."""
    reference = make_checkpoint(tmp_path / "source", **MODELS[model])
    rounded = {name: tensor.bfloat16() for name, tensor in tensors(tmp_path / "source").items()}
    to_megatron(tmp_path / "source", tmp_path / "m", torch.bfloat16, tp=2)
    to_hf(tmp_path / "m", tmp_path / "narrow")
    to_hf(tmp_path / "m", tmp_path / "wide", torch.float32, shard_bytes=50_000)
    assert_equal(tensors(tmp_path / "narrow"), rounded)
    assert_equal(tensors(tmp_path / "wide"), {name: tensor.float() for name, tensor in rounded.items()})
    for folder, dtype in (("m", "bfloat16"), ("narrow", "bfloat16"), ("wide", "float32")):
        assert json.loads((tmp_path / folder / "config.json").read_text())["dtype"] == dtype
    index = json.loads((tmp_path / "wide" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in rounded.values())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    assert_equal(dict(loaded.state_dict()), dict(reference.bfloat16().float().state_dict()))


@pytest.mark.parametrize("model", ["qwen3_moe", "llama_tied"])
def test_folders_as_they_are_published(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Configurations with the keys of transformers 4, and files that are links, as in a hub's cache."""
    make_checkpoint(tmp_path / "files", **MODELS[model])
    config = json.loads((tmp_path / "files" / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "torch_dtype": config.pop("dtype")}
    if model == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    else:
        config["rope_scaling"] = rope
    (tmp_path / "files" / "config.json").write_text(json.dumps(config))
    (tmp_path / "source").mkdir()
    for file in (tmp_path / "files").iterdir():
        (tmp_path / "source" / file.name).symlink_to(file)
    command = ["--verify", "--dtype", "bf16", "--no-progress"]
    assert main(["convert", "to-megatron", str(tmp_path / "source"), str(tmp_path / "m"), "--tp", "2", *command]) == 0
    assert main(["convert", "to-hf", str(tmp_path / "m"), str(tmp_path / "hf"), *command]) == 0
    printed = capsys.readouterr().out
    assert printed.count("tensors are equal bit for bit") == printed.count("logits: equal to") == 2
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == config | {"torch_dtype": "bfloat16"}
    assert not any(file.is_symlink() for folder in ("m", "hf") for file in (tmp_path / folder).rglob("*"))


def test_padding_of_the_vocabulary_is_zero_and_stays_inside(tmp_path: Path) -> None:
    """250 rows become 512 for tensor parallel 4, and 250 again."""
    make_checkpoint(tmp_path / "source", "qwen3")
    to_megatron(tmp_path / "source", tmp_path / "m", tp=4)
    stored = ToHuggingFace(tmp_path / "m", dtype=None).source
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert stored.padding(name).shape == (512 - VOCAB, 32)
        assert not stored.padding(name).any()
        assert stored.shapes[name] == (VOCAB, 32)


def test_a_dry_run_tells_all_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "source")
    command = ["convert", "to-megatron", str(tmp_path / "source"), str(tmp_path / "m"), "--ep", "4", "--dry-run"]
    assert main(command) == 0
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert printed["family"] == "qwen3_moe (Qwen3MoeForCausalLM)"
    assert printed["layout"] == "tp=1 ep=4 etp=1 pp=1 (4 ranks)"
    assert printed["vocabulary"] == "250 rows, padded with zeros to 256"
    assert printed["tensors"].startswith("87 -> ")
    assert [part.split(":")[0].split()[-1] for part in printed["by"].split(", ")] == ["0", "1", "2", "3"]  # by rank
    assert printed["memory"].startswith("about ")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
