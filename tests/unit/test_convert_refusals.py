"""What `treeopsd convert` refuses: bad sources and destinations, failures in the middle. Nothing is left behind."""

from __future__ import annotations

import fcntl
import json
import os
import re
import resource
import shutil
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB, make_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_treeopsd.cli import main
from megatron_treeopsd.convert.processes import Processes
from megatron_treeopsd.convert.run import convert
from megatron_treeopsd.convert.to_hf import ToHuggingFace
from megatron_treeopsd.convert.to_megatron import ToMegatron
from megatron_treeopsd.convert.verify import VerificationError
from megatron_treeopsd.weights import WeightsError
from megatron_treeopsd.weights.torch_dist import metadata

pytestmark = pytest.mark.fast

INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00004.safetensors"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as one file, in shards, with tied embeddings, and as Megatron's."""
    root = tmp_path_factory.mktemp("originals")
    make_checkpoint(root / "single")
    make_checkpoint(root / "sharded", max_shard_size="100KB")
    make_checkpoint(root / "tied", tied=True)
    assert main(["convert", "to-megatron", str(root / "single"), str(root / "megatron"), "--tp", "2"]) == 0
    return root


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def rewrite(file: Path, change: Callable[[Any], Any]) -> None:
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def set_config(folder: Path, **values: Any) -> None:
    rewrite(folder / "config.json", lambda config: config | values)


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def truncate(file: Path, size: int) -> None:
    os.truncate(file, size if size >= 0 else file.stat().st_size + size)


def index_entry(folder: Path, name: str, file: str | None) -> None:
    def change(index: dict[str, Any]) -> dict[str, Any]:
        index["weight_map"].pop(name, None)
        if file is not None:
            index["weight_map"][name] = file
        return index

    rewrite(folder / INDEX, change)


# -------------------------------------------------------------------------------------------------------- bad sources
Damage = tuple[str, Callable[[Path], object], str]
"""Which original, what is done to it, what must be said (a pattern)."""

SHARED: dict[str, Damage] = {
    "missing shard": (
        "sharded", lambda d: (d / SHARD).unlink(), rf"the index names files that are missing:\n  {SHARD}",
    ),
    "data cut off": (
        "sharded", lambda d: truncate(d / SHARD, -1), rf"{SHARD}: not a readable .* was it copied completely\?",
    ),
    "header cut off": (
        "sharded", lambda d: truncate(d / SHARD, 60), rf"{SHARD}: .* its 60 bytes do not hold the header",
    ),
    "empty file": ("single", lambda d: truncate(d / "model.safetensors", 0), "its 0 bytes do not hold the header"),
    "not a safetensors file": (
        "single",
        lambda d: (d / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"garbage!" * 9),
        r"model\.safetensors: .* its header is not JSON",
    ),
    "index: in the wrong file": (
        "sharded", lambda d: index_entry(d, "lm_head.weight", "model-00004-of-00004.safetensors"),
        rf"{INDEX} and model-.*\.safetensors disagree about these tensors:\n  lm_head\.weight",
    ),
    "index: in no file": (
        "sharded", lambda d: index_entry(d, "model.layers.9.mlp.gate.weight", SHARD),
        rf"{INDEX} and {SHARD} disagree about these tensors:\n  model\.layers\.9\.mlp\.gate\.weight",
    ),
    "index: a name left out": (
        "sharded", lambda d: index_entry(d, EXPERT, None), rf"disagree about these tensors:\n  {EXPERT}",
    ),
    "index: not an index": ("sharded", lambda d: (d / INDEX).write_text("[1]"), rf"{INDEX}: not a safetensors index"),
    "no weights": (
        "single", lambda d: (d / "model.safetensors").unlink(), "only safetensors checkpoints are read",
    ),
    "a weight is missing": (
        "single", lambda d: edit(d, lambda t: t.pop(EXPERT)), rf"config\.json asks for are missing:\n  {EXPERT}",
    ),
    "a weight too many": (
        "single", lambda d: edit(d, lambda t: t.update({"model.norm.bias": torch.ones(2)})),
        r"no rule of the name map uses:\n  model\.norm\.bias",
    ),
    "config: another vocabulary": (
        "single", lambda d: set_config(d, vocab_size=256),
        r"model\.embed_tokens\.weight: \(250, 32\) in the file, \(256, 32\) by config\.json",
    ),
    "config: more layers": (
        "single", lambda d: set_config(d, num_hidden_layers=5), r"missing:\n  model\.layers\.4\.input_layernorm",
    ),
    "config: fewer experts": (
        "single", lambda d: set_config(d, num_local_experts=3),
        r"no rule of the name map uses:\n  model\.layers\.0\.mlp\.experts\.3\.down_proj",
    ),
    "config: a size is a word": (
        "single", lambda d: set_config(d, hidden_size="large"), r"config\.json: not a valid configuration.*hidden_size",
    ),
    "config: not JSON": ("single", lambda d: truncate(d / "config.json", 20), r"config\.json: not valid JSON"),
    "config: missing": ("single", lambda d: (d / "config.json").unlink(), r"no config\.json"),
    "config: another architecture": (
        "single", lambda d: set_config(d, architectures=["GPT2LMHeadModel"], model_type="gpt2"),
        "GPT2LMHeadModel is not supported. Supported: LlamaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM",
    ),
    "a head that differs from the embedding": (
        "tied", lambda d: edit(d, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1})),
        r"lm_head\.weight differs .* set tie_word_embeddings to false",
    ),
    "parts of different dtypes": (
        "single", lambda d: edit(d, lambda t: t.update({EXPERT: t[EXPERT].bfloat16()})),
        r"different dtypes; choose one with --dtype:\n  decoder\.layers\.mlp\.experts\.experts\.linear_fc1\.weight",
    ),
}  # fmt: skip

MEGATRON: dict[str, Damage] = {
    "no metadata": (
        "megatron", lambda d: (d / "release/.metadata").unlink(), r"says 'release', but there is no complete",
    ),
    "damaged metadata": ("megatron", lambda d: truncate(d / "release/.metadata", 500), r"\.metadata: damaged"),
    "missing file": (
        "megatron", lambda d: (d / "release/__1_0.distcp").unlink(), r"missing or too short:\n  __1_0\.distcp",
    ),
    "file cut off": (
        "megatron", lambda d: truncate(d / "release/__1_0.distcp", -5000), r"missing or too short:\n  __1_0\.distcp",
    ),
    "nothing there": (
        "megatron", lambda d: (d / "latest_checkpointed_iteration.txt").unlink(), "no torch_dist checkpoint there",
    ),
    "no config": ("megatron", lambda d: (d / "config.json").unlink(), r"there is no config\.json; .* --hf-config"),
    "config: another width": (
        "megatron", lambda d: set_config(d, moe_intermediate_size=20),
        r"linear_fc1\.weight: \(4, 4, 48, 32\) in the checkpoint, \(4, 4, 40, 32\) by config\.json",
    ),
    "config: fewer layers": (
        "megatron", lambda d: set_config(d, num_hidden_layers=3), r"shapes contradict config\.json:\n  decoder\.layers",
    ),
    "config: tied": (
        "megatron", lambda d: set_config(d, tie_word_embeddings=True), r"no rule .*:\n  output_layer\.weight",
    ),
}  # fmt: skip
CASES = [pytest.param("to-megatron", *case, id=name) for name, case in SHARED.items()]
CASES += [pytest.param("to-hf", *case, id=f"megatron, {name}") for name, case in MEGATRON.items()]


@pytest.mark.parametrize(("direction", "original", "damage", "message"), CASES)
def test_bad_sources(
    direction: str, original: str, damage: Callable[[Path], object], message: str,
    originals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    source = Path(shutil.copytree(originals / original, tmp_path / "source"))
    damage(source)
    before = names(source)
    assert main(["convert", direction, str(source), str(tmp_path / "out"), "--verify"]) == 2
    error = capsys.readouterr().err
    assert_matches(message, error)
    assert str(source) in error
    assert names(tmp_path) == ["source"]
    assert names(source) == before


def assert_matches(pattern: str, text: str) -> None:
    assert re.search(pattern, text, re.DOTALL), text


@pytest.mark.parametrize("direction", ["to-megatron", "to-hf"])
def test_a_source_that_shrinks_while_it_is_read(direction: str, originals: Path, tmp_path: Path) -> None:
    source = Path(
        shutil.copytree(originals / ("single" if direction == "to-megatron" else "megatron"), tmp_path / "in")
    )
    conversion = ToMegatron(source, dtype=None) if direction == "to-megatron" else ToHuggingFace(source, dtype=None)
    (file,) = [*source.glob("*.safetensors"), *source.glob("release/__1_0.distcp")]
    truncate(file, -20_000)
    with pytest.raises(WeightsError, match=rf"{file.name}: (ends at byte \d+, .* truncated|bytes .* hold no tensor)"):
        run(conversion, tmp_path / "out")
    assert names(tmp_path) == ["in"]


def run(conversion: ToMegatron | ToHuggingFace, destination: Path, **options: bool) -> Any:
    chosen = {"overwrite": False, "verify": False, "progress": False, **options}
    return convert(conversion, destination, Processes(), **chosen)


@pytest.mark.parametrize("dtype", [[], ["--dtype", "bf16"]], ids=["as_is", "bf16"])
def test_values_that_are_no_numbers_are_counted(
    dtype: list[str], originals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Path(shutil.copytree(originals / "single", tmp_path / "source"))

    def poison(tensors: dict[str, Tensor]) -> None:
        tensors[EXPERT][3, :2] = float("nan")
        tensors["model.norm.weight"][5] = float("-inf")

    edit(source, poison)
    assert main(["convert", "to-megatron", str(source), str(tmp_path / "m"), "--tp", "2", "--verify", *dtype]) == 0
    printed = capsys.readouterr().out
    warning = f"warning: 3 values are NaN or infinite, in 2 tensors:\n  {EXPERT}: 2\n  model.norm.weight: 1\n"
    assert warning in printed
    assert "87 tensors are equal bit for bit" in printed
    assert "logits: not compared: a model with values that are not finite" in printed
    assert main(["convert", "to-hf", str(tmp_path / "m"), str(tmp_path / "hf"), "--verify"]) == 0
    assert warning in capsys.readouterr().out
    back = load_file(tmp_path / "hf/model.safetensors")[EXPERT]
    assert back.isnan().nonzero().tolist() == [[3, 0], [3, 1]]


def test_what_training_checkpoints_hold_besides_the_model_is_left_out(originals: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(originals / "megatron", tmp_path / "m"))
    tensors, _ = metadata.read(folder / "release")
    state = tensors["decoder.final_layernorm.weight"]
    for name in ("optimizer.state.exp_avg", "chained_1.optimizer.state.exp_avg_sq"):
        tensors[f"{name}.decoder.final_layernorm.weight"] = state
    objects = dict.fromkeys(("rng_state/shard_0_1", "opt_param_scheduler/shard_0_1"), state.chunks[0].blob)
    metadata.write(folder / "release", tensors, objects)
    assert main(["convert", "to-hf", str(folder), str(tmp_path / "hf")]) == 0
    found, expected = (load_file(path / "model.safetensors") for path in (tmp_path / "hf", originals / "single"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


# --------------------------------------------------------------------------------------------------- bad destinations
def in_the_source(root: Path) -> Path:
    return root / "source" / "inside"


def around_the_source(root: Path) -> Path:
    return root


def another_name_of_the_source(root: Path) -> Path:
    (root / "link").symlink_to(root / "source")
    return root / "link"


def a_file(root: Path) -> Path:
    (root / "file").write_text("mine")
    return root / "file"


def below_a_file(root: Path) -> Path:
    return a_file(root) / "below"


def somebody_elses_folder(root: Path) -> Path:
    (root / "notes").mkdir()
    (root / "notes" / "notes.txt").write_text("mine")
    return root / "notes"


@pytest.mark.parametrize(
    ("destination", "message"),
    [
        (lambda root: root / "source", "source and destination lie in each other; choose another"),
        (in_the_source, "source and destination lie in each other"),
        (around_the_source, "source and destination lie in each other"),
        (another_name_of_the_source, "source and destination lie in each other"),
        (a_file, "file is not a folder; choose another destination"),
        (below_a_file, "below: .*file is not a folder; choose another destination"),
        (somebody_elses_folder, r"notes is not empty; choose another destination, or replace it by --overwrite"),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["real", "dry"])
def test_bad_destinations(
    destination: Callable[[Path], Path], message: str, dry: list[str],
    originals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    shutil.copytree(originals / "single", tmp_path / "source")
    target = destination(tmp_path)
    before = snapshot(tmp_path)
    assert main(["convert", "to-megatron", str(tmp_path / "source"), str(target), *dry]) == 2
    assert_matches(message, capsys.readouterr().err)
    assert snapshot(tmp_path) == before


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """All there is in a folder, with contents."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def test_overwriting_leaves_alone_what_is_no_checkpoint(
    originals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = somebody_elses_folder(tmp_path)
    assert main(["convert", "to-megatron", str(originals / "single"), str(target), "--overwrite"]) == 2
    assert "holds no config.json, so it is not a checkpoint and --overwrite leaves it alone" in capsys.readouterr().err
    assert names(target) == ["notes.txt"]


def test_overwriting_replaces_all_or_nothing(
    originals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    command = ["convert", "to-megatron", str(originals / "single"), str(target)]
    assert main([*command, "--tp", "2"]) == 0
    (target / "release" / "stale").touch()
    old = snapshot(target)
    assert main([*command, "--ep", "2"]) == 2  # not without being asked
    assert "--overwrite" in capsys.readouterr().err
    with file_size_limit(100_000):
        assert main([*command, "--ep", "2", "--overwrite"]) == 2
    assert "File too large" in capsys.readouterr().err
    assert snapshot(target) == old
    assert names(tmp_path) == ["out"]
    assert main([*command, "--ep", "2", "--overwrite", "--verify"]) == 0
    assert not (target / "release" / "stale").exists()
    assert names(tmp_path) == ["out"]


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes: stands for a disk that gets full in the middle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 100, 3_000, 30_000, 300_000])
@pytest.mark.parametrize("direction", ["to-megatron", "to-hf"])
def test_a_disk_that_gets_full(
    direction: str, size: int, originals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the first byte, in some small file of its own format, in the middle of the tensors."""
    source = originals / ("single" if direction == "to-megatron" else "megatron")
    with file_size_limit(size):
        assert main(["convert", direction, str(source), str(tmp_path / "out")]) == 2
    assert_matches(r"File too large: '.*\.out\.partial/", capsys.readouterr().err)
    assert names(tmp_path) == []


def test_a_disk_that_is_full_already(
    originals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", ["total", "used", "free"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 900_000, 100_000))
    assert main(["convert", "to-megatron", str(originals / "single"), str(tmp_path / "out")]) == 2
    assert_matches(r"out: 0\.00 GB are needed and 0\.00 GB are free there; make room or", capsys.readouterr().err)
    assert names(tmp_path) == []


def test_two_at_once(originals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["convert", "to-megatron", str(originals / "single"), str(tmp_path / "out")]
    with open(tmp_path / ".out.lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert main(command) == 2
        assert "out: another process is writing it" in capsys.readouterr().err
        assert names(tmp_path) == [".out.lock"]
    assert main(command) == 0  # its owner is gone, the file does not matter
    assert names(tmp_path) == ["out"]


# --------------------------------------------------------------------------------------------------- what is written
class Careless(ToMegatron):
    """Writes one wrong bit into a row of the embedding, of which those behind the vocabulary are padding."""

    row = 7

    def write(self, folder: Path, here: Processes, watch: Any) -> None:
        super().write(folder, here, watch)
        (extent,) = self.read_back(folder).extents("model.embed_tokens.weight", 0, VOCAB) or []
        with open(extent.file, "r+b") as file:
            file.seek(extent.offset + self.row * extent.row_bytes)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(("row", "message"), [(7, "1 of 8000 values differ"), (VOCAB, "rows that pad it are not zero")])
def test_verification_finds_one_wrong_bit(row: int, message: str, originals: Path, tmp_path: Path) -> None:
    conversion = Careless(originals / "single", dtype=None)
    conversion.row = row
    with pytest.raises(VerificationError, match=rf"should be:\n  model\.embed_tokens\.weight: .*{message}"):
        run(conversion, tmp_path / "out", verify=True)
    assert names(tmp_path) == []
    run(conversion, tmp_path / "out")  # without verification it is not seen


def test_padding_of_others_is_their_own(originals: Path, tmp_path: Path) -> None:
    """Megatron trains from padding that is not zero; it stays out of Hugging Face folders and is nobody's concern."""
    conversion = Careless(originals / "single", dtype=None)
    conversion.row = VOCAB
    run(conversion, tmp_path / "m")
    assert main(["convert", "to-hf", str(tmp_path / "m"), str(tmp_path / "hf"), "--verify"]) == 0
    assert load_file(tmp_path / "hf/model.safetensors")["model.embed_tokens.weight"].shape == (VOCAB, 32)
