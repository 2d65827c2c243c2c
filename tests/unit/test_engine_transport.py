"""The trainer's side of the ways to give SGLang its weights; tests/unit/test_engine_another_process.py has both."""

from __future__ import annotations

import base64
import io
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import checkpoint_weights, random_policy
from transformers import AutoModelForCausalLM

from megatron_treeopsd.engine.base import EngineError
from megatron_treeopsd.engine.staging import StagedWeights
from megatron_treeopsd.engine.transport import distributed
from megatron_treeopsd.engine.transport.cuda_ipc import CudaIPC
from megatron_treeopsd.engine.transport.disk import Disk

pytestmark = pytest.mark.fast

CPU = torch.device("cpu")


@pytest.fixture
def weights(tmp_path: Path) -> StagedWeights:
    """Those of a tiny policy, saved in `tmp_path`, in several buckets."""
    random_policy().save_pretrained(tmp_path / "policy")
    tensors = checkpoint_weights(tmp_path / "policy")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return StagedWeights(tensors.items(), shapes=shapes, tied=False, dtype=torch.float32, bucket_bytes=2**14)


class Scheduler:
    """Opens what it is sent as SGLang's scheduler does: harmless types only, each rank its own."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.calls: list[str] = []
        self.taken: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks)]

    def __call__(self, call: str, **fields: Any) -> Any:
        self.calls.append(call)
        if call != "update_by_handle":
            return None
        assert len(fields["handles"]) == self.ranks
        for taken, handle in zip(self.taken, fields["handles"], strict=True):
            bucket = Harmless(io.BytesIO(base64.b64decode(handle))).load()
            for each in bucket["metadata"]:
                part = bucket["flattened_tensor"][each.start_idx : each.end_idx]
                assert each.numel == part.numel()
                taken[each.name] = part.view(each.dtype).reshape(each.shape).clone()
        return {
            "tensors": len(bucket["metadata"]),
            "bytes": sum(each.numel for each in bucket["metadata"]),
        }


class Harmless(pickle.Unpickler):
    """Knows the names that SGLang's own reader of updates allows, of those that can occur."""

    ALLOWED = frozenset(
        {
            ("builtins", "dict"), ("types", "SimpleNamespace"), ("torch", "Size"), ("torch", "Tensor"),
            ("torch", "float32"), ("torch.storage", "UntypedStorage"), ("torch.storage", "TypedStorage"),
            ("torch.multiprocessing.reductions", "rebuild_tensor"),
            ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
            ("torch.multiprocessing.reductions", "rebuild_storage_filename"), ("torch", "uint8"),
        }
    )  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return super().find_class(module, name)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_handle_is_all_that_a_scheduler_needs(weights: StagedWeights, tmp_path: Path, ranks: int) -> None:
    scheduler = Scheduler(ranks)
    strategy = torch.multiprocessing.get_sharing_strategy()
    with weights:
        CudaIPC(CPU, ranks=ranks).load(scheduler, weights, version=1)
        assert scheduler.calls == ["begin", *["update_by_handle"] * len(weights.buckets), "end"]
        assert len(weights.buckets) > 2
    expected = checkpoint_weights(tmp_path / "policy")
    for taken in scheduler.taken:
        assert taken.keys() == expected.keys()
        assert all(torch.equal(taken[name], expected[name]) for name in expected)
    assert torch.multiprocessing.get_sharing_strategy() == strategy


def test_an_engine_that_takes_less_is_noticed(weights: StagedWeights) -> None:
    def call(call: str, **fields: Any) -> Any:
        return {"tensors": 1, "bytes": 4}

    with weights, pytest.raises(EngineError, match=r"SGLang took .*'tensors': 1.* of a bucket of \d+ tensors"):
        CudaIPC(CPU, ranks=1).load(call, weights, version=1)


def test_a_folder_of_weights_is_whole_and_goes_again(weights: StagedWeights, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    read: dict[str, Any] = {}

    def call(call: str, *, path: str, version: str) -> Any:
        assert (call, version) == ("update_from_disk", "7")
        assert [each.name for each in (tmp_path / "out").iterdir()] == ["weights-7"]
        read.update(AutoModelForCausalLM.from_pretrained(path).state_dict())
        return {"tensors": sum(len(bucket.tensors) for bucket in weights.buckets), "bytes": weights.nbytes}

    disk = Disk(tmp_path / "out", tmp_path / "policy" / "config.json")
    with weights:
        disk.load(call, weights, version=7)
        assert list((tmp_path / "out").iterdir()) == []
        expected = random_policy().state_dict()
        assert all(torch.equal(read[name], expected[name]) for name in expected)
        with pytest.raises(EngineError, match=r"SGLang took None of a bucket of"):
            disk.load(lambda call, **fields: None, weights, version=8)
    assert list((tmp_path / "out").iterdir()) == []


def test_both_sides_of_a_broadcast_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_SECONDS_BEHIND", 0.1)
    done = threading.Event()
    assert distributed.meanwhile(done.set, lambda: done.wait(5)) is True

    def broken() -> None:
        raise RuntimeError("connection closed by peer")

    def refused() -> None:
        raise EngineError("no session is open")

    with pytest.raises(EngineError, match="could not be sent to SGLang: connection closed"):
        distributed.meanwhile(broken, lambda: None)
    never = threading.Event()
    with pytest.raises(EngineError, match="no session is open"):
        distributed.meanwhile(lambda: never.wait() and None, refused)
    with pytest.raises(EngineError, match="answered 5, but has not taken"):
        distributed.meanwhile(lambda: never.wait() and None, lambda: 5)
    never.set()


def test_trainer_and_engine_meet_where_other_machines_do_not_see_it() -> None:
    store = distributed.Distributed(CPU, ranks=1, seconds=5)._open_store(2)
    port = f":{store.port:04X}"
    tables = [Path(f"/proc/net/{name}").read_text().splitlines() for name in ("tcp", "tcp6")]
    listening = [line.split()[1] for table in tables for line in table if line.split()[3] == "0A"]
    assert [address for address in listening if address.endswith(port)] == ["0100007F" + port]
    client = torch.distributed.TCPStore("127.0.0.1", store.port, 2, is_master=False)
    client.set("key", "value")
    assert store.get("key") == b"value"
