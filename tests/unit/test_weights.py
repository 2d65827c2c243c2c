"""Hugging Face folders: into a Megatron model and back, bit for bit, in one process; and what is refused."""

from __future__ import annotations

import json
import random
import resource
import shutil
from pathlib import Path

import pytest
import torch
from backend_models import make_policy
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_treeopsd import weights
from megatron_treeopsd.backend import parallel
from megatron_treeopsd.backend.model import build_model
from megatron_treeopsd.config import Layout
from megatron_treeopsd.weights import WeightsError, streaming
from megatron_treeopsd.weights.safetensors_file import read_header
from megatron_treeopsd.weights.source import Source

pytestmark = pytest.mark.fast

SINGLE = "model.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, bool], Path]:
    """(mixture of experts, tied) -> a random checkpoint with companions."""
    found = {}
    for moe in (True, False):
        for tied in (True, False):
            folder = tmp_path_factory.mktemp("hf")
            make_policy(folder, moe=moe, tied=tied)
            (folder / "tokenizer.json").write_text('{"version": "1.0"}')
            (folder / "chat_template.jinja").write_text("{{ messages }}\n")
            found[moe, tied] = folder
    return found


@pytest.fixture
def folder(folders: dict[tuple[bool, bool], Path], tmp_path: Path) -> Path:
    """A copy to damage: mixture of experts, untied."""
    return Path(shutil.copytree(folders[True, False], tmp_path / "hf"))


def empty_model(folder: Path, state: parallel.ParallelState, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    model = build_model(AutoConfig.from_pretrained(folder), Layout(), state, dtype=dtype)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    return model


def load(folder: Path, state: parallel.ParallelState, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    model = empty_model(folder, state, dtype)
    weights.load_pretrained(model, folder, AutoConfig.from_pretrained(folder))
    return model


def streamed(model: torch.nn.Module, folder: Path) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.stream(model, AutoConfig.from_pretrained(folder))}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_safetensors_are_read_alike_in_every_form(folders: dict[tuple[bool, bool], Path], tmp_path: Path) -> None:
    """Experts one by one or fused, one file or many: the same names and slices."""
    expected = load_file(folders[True, False] / SINGLE)
    model = AutoModelForCausalLM.from_pretrained(folders[True, False])
    for i, options in enumerate([{}, {"save_original_format": False}, {"max_shard_size": "100KB"}]):
        model.save_pretrained(tmp_path / str(i), **options)
        source = Source(tmp_path / str(i))
        assert source.shapes == {name: tuple(tensor.shape) for name, tensor in expected.items()}
        for name, tensor in expected.items():
            half = tensor.shape[0] // 2
            assert torch.equal(source.read(name, 0, half, tensor.shape[0]), tensor[half:]), name
            if tensor.dim() == 2:
                assert torch.equal(source.read(name, 1, 3, 10), tensor[:, 3:10]), name
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "1" / SINGLE)
    assert len(list((tmp_path / "2").glob("*.safetensors"))) > 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True], ids=["per_expert", "fused"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("moe", [True, False], ids=["moe", "dense"])
def test_round_trip(
    folders: dict[tuple[bool, bool], Path],
    state: parallel.ParallelState,
    tmp_path: Path,
    moe: bool,
    tied: bool,
    fused: bool,
    dtype: torch.dtype,
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders[moe, tied]).to(dtype)
    model.save_pretrained(tmp_path / "in", save_original_format=not fused)
    model.save_pretrained(tmp_path / "expected")
    expected = load_file(tmp_path / "expected" / SINGLE)
    ours = load(tmp_path / "in", state, dtype)
    assert_equal(streamed(ours, tmp_path / "in"), expected)
    weights.save_pretrained(ours, AutoConfig.from_pretrained(tmp_path / "in"), tmp_path / "in", tmp_path / "out")
    assert_equal(load_file(tmp_path / "out" / SINGLE), expected)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert_equal(dict(again), dict(model.state_dict()))


def test_saved_folder_is_complete_and_carries_companions_unchanged(folder: Path, state: parallel.ParallelState) -> None:
    config = AutoConfig.from_pretrained(folder)
    out = folder.with_name("out")
    weights.save_pretrained(load(folder, state), config, folder, out)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (folder / name).read_bytes(), name
    assert [path.name for path in folder.parent.glob(".*")] == []
    with pytest.raises(WeightsError, match="not empty"):
        weights.save_pretrained(load(folder, state), config, folder, out)
    (out / "stale").touch()
    weights.save_pretrained(load(folder, state), config, folder, out, overwrite=True)
    assert not (out / "stale").exists()


def test_config_states_the_dtype_that_was_written(folder: Path, state: parallel.ParallelState) -> None:
    out = folder.with_name("out")
    weights.save_pretrained(load(folder, state, torch.bfloat16), AutoConfig.from_pretrained(folder), folder, out)
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, out))
    assert after.pop("dtype") == "bfloat16"
    assert before.pop("dtype") == "float32"
    assert after == before


def test_shards_and_index(folder: Path, state: parallel.ParallelState) -> None:
    out = folder.with_name("out")
    weights.save_pretrained(load(folder, state), AutoConfig.from_pretrained(folder), folder, out, shard_bytes=100_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files
    assert len(files) > 3
    joined: dict[str, Tensor] = {}
    for file in files:
        tensors = load_file(out / file)
        assert {index["weight_map"][name] for name in tensors} == {file}
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 100_000
        joined |= tensors
    assert_equal(joined, load_file(folder / SINGLE))
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in joined.values())
    assert AutoModelForCausalLM.from_pretrained(out).config.num_experts == 8


def test_nothing_is_left_when_the_disk_is_full(folder: Path, state: parallel.ParallelState) -> None:
    """A limit on file size stands for the disk: the system refuses the write in the middle of the file."""
    model, out = load(folder, state), folder.with_name("out")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(WeightsError, match=r"cannot be written: .*File too large"):
            weights.save_pretrained(model, AutoConfig.from_pretrained(folder), folder, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in out.parent.iterdir()] == ["hf"]


def test_order_does_not_depend_on_buckets(
    folder: Path, state: parallel.ParallelState, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder, state)
    names = list(streamed(model, folder))
    assert names[0] == "model.embed_tokens.weight"
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
    first = names.index("model.layers.0.mlp.experts.0.gate_proj.weight")
    assert [name.split("experts.")[1] for name in names[first : first + 4]] == [
        "0.gate_proj.weight", "0.up_proj.weight", "0.down_proj.weight", "1.gate_proj.weight",
    ]  # fmt: skip
    monkeypatch.setattr(streaming, "BUCKET_BYTES", 1)
    assert list(streamed(model, folder)) == names


# ----------------------------------------------------------------------------------------------------------- bad input
def edit(folder: Path, **changes: Tensor | None) -> None:
    """Change tensors of the checkpoint; None removes one. Names are given with "__" for "."."""
    tensors = load_file(folder / SINGLE)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


def test_every_wrong_name_is_listed_and_the_model_untouched(folder: Path, state: parallel.ParallelState) -> None:
    edit(
        folder,
        model__layers__1__mlp__experts__7__up_proj__weight=None,
        model__layers__0__self_attn__q_proj__bias=torch.zeros(64),
        model__norm__weight=torch.ones(63),
    )
    model = empty_model(folder, state)
    with pytest.raises(WeightsError) as error:
        weights.load_pretrained(model, folder, AutoConfig.from_pretrained(folder))
    text = str(error.value)
    assert "asks for are missing:\n  model.layers.1.mlp.experts.7.up_proj.weight\n" in text
    assert "no rule of the name map uses:\n  model.layers.0.self_attn.q_proj.bias\n" in text
    assert "model.norm.weight: (63,) in the file, (64,) by config.json" in text
    assert all(parameter.isnan().all() for parameter in model.parameters())


def test_redundant_head_of_a_tied_model(
    folders: dict[tuple[bool, bool], Path], state: parallel.ParallelState, tmp_path: Path
) -> None:
    """Some published checkpoints carry it. Equal: ignored; different: refused, since it would be dropped."""
    folder = Path(shutil.copytree(folders[False, True], tmp_path / "hf"))
    expected = load_file(folder / SINGLE)
    edit(folder, lm_head__weight=expected["model.embed_tokens.weight"].clone())
    assert_equal(streamed(load(folder, state), folder), expected)
    edit(folder, lm_head__weight=expected["model.embed_tokens.weight"] + 1)
    with pytest.raises(WeightsError, match=r"ties the embeddings, but lm_head\.weight differs"):
        load(folder, state)


def test_another_architecture(folder: Path, state: parallel.ParallelState) -> None:
    model, config = empty_model(folder, state), AutoConfig.from_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    for change, message in [
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "architecture GPT2LMHeadModel is not supported"),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, "'qwen3', but the model is a 'qwen3_moe'"),
    ]:
        (folder / "config.json").write_text(json.dumps(values | change))
        with pytest.raises(WeightsError, match=message):
            weights.load_pretrained(model, folder, config)
    (folder / "config.json").write_text("{")
    with pytest.raises(WeightsError, match=r"config\.json: not valid JSON"):
        weights.load_pretrained(model, folder, config)
    (folder / "config.json").unlink()
    with pytest.raises(WeightsError, match=r"no config\.json"):
        weights.load_pretrained(model, folder, config)


def test_damaged_files(folder: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder / "sharded", max_shard_size="200KB")
    sharded = folder / "sharded"
    victim = sorted(sharded.glob("*.safetensors"))[1]
    whole = victim.read_bytes()

    victim.write_bytes(whole[:-100])
    with pytest.raises(WeightsError, match=f"{victim.name}: not a readable safetensors file"):
        Source(sharded)
    victim.unlink()
    with pytest.raises(WeightsError, match=f"names files that are missing:\n  {victim.name}"):
        Source(sharded)
    victim.write_bytes(whole)

    index = sharded / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    lost = next(name for name, file in values["weight_map"].items() if file == victim.name)
    del values["weight_map"][lost]
    index.write_text(json.dumps(values))
    with pytest.raises(WeightsError, match=f"disagree about these tensors:\n  {lost}"):
        Source(sharded)
    index.write_text("[]")
    with pytest.raises(WeightsError, match="not a safetensors index"):
        Source(sharded)
    (folder / SINGLE).unlink()
    with pytest.raises(WeightsError, match="only safetensors checkpoints are read"):
        Source(folder)


def test_damaged_headers_are_errors_and_never_crashes(tmp_path: Path) -> None:
    path = tmp_path / SINGLE
    save_file({"a.weight": torch.ones(3, 4), "b": torch.zeros(2, dtype=torch.bfloat16)}, path)
    whole = path.read_bytes()
    size = 8 + int.from_bytes(whole[:8], "little")
    rng, refused = random.Random(0), 0
    changes = [whole.replace(b"[3,4]", text) for text in (b"[1e999]", b"[-3,-4]", b"[" * 5)]
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(size)] = rng.randrange(256)
        changes.append(bytes(damaged))
    for content in changes:
        path.write_bytes(content)
        try:
            read_header(path)
        except WeightsError:
            refused += 1
    assert refused > 300


def test_model_that_lacks_a_weight_or_has_another(folder: Path, state: parallel.ParallelState) -> None:
    config = AutoConfig.from_pretrained(folder)
    model = empty_model(folder, state)
    model.decoder.layers[1].self_attention.q_layernorm = torch.nn.Identity()
    model.decoder.layers[0].extra = torch.nn.Linear(2, 2, bias=False)
    with pytest.raises(WeightsError) as error:
        weights.load_pretrained(model, folder, config)
    assert "no parameter for these weights:\n  decoder.layers.1.self_attention.q_layernorm.weight" in str(error.value)
    assert "does not know:\n  decoder.layers.0.extra.weight (2, 2)" in str(error.value)
    with pytest.raises(WeightsError, match=r"extra\.weight"):
        next(weights.stream(model, config))
