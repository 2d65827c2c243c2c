"""What SGLang is started with, on a CPU and on GPUs that are not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_treeopsd import config
from megatron_treeopsd.engine.base import EngineError
from megatron_treeopsd.engine.sglang_settings import engine_gpu, server_settings, tensor_parallel, variables
from megatron_treeopsd.engine.transport import resolve

pytestmark = pytest.mark.fast


def section(**values: Any) -> config.SGLangEngine:
    return config.SGLangEngine.model_validate({"name": "sglang", **values})


def settings(gpu: int | None, **values: Any) -> dict[str, Any]:
    return server_settings(section(**values), model=Path("m"), context=100, dtype="bfloat16", routes=False, gpu=gpu)


def test_one_engine_spans_the_gpus_of_the_processes_that_share_it() -> None:
    """Two engines on a node of eight GPUs."""
    shared = {"ranks_per_engine": 4}
    starts = [engine_gpu(section(**shared), own=own, visible=8) for own in (0, 4)]
    found = [settings(start, **shared) for start in starts]
    assert [(each["base_gpu_id"], each["tp_size"]) for each in found] == [(0, 4), (4, 4)]
    assert all(each["enable_memory_saver"] and "device" not in each for each in found)
    assert settings(1)["tp_size"] == 1


def test_engines_may_have_gpus_of_their_own() -> None:
    """Four training processes on GPUs 0 to 3, two engines of two GPUs behind them."""
    apart = {"ranks_per_engine": 2, "first_gpu": 4}
    assert [engine_gpu(section(**apart), own=own, visible=8) for own in (0, 2)] == [4, 6]
    assert not settings(4, **apart)["enable_memory_saver"], "nobody needs its memory"
    wide = {**apart, "ranks_per_engine": 4, "tensor_parallel": 2}
    assert engine_gpu(section(**wide), own=0, visible=6) == 4
    assert settings(4, **wide)["tp_size"] == 2


@pytest.mark.parametrize(
    ("values", "own", "visible"),
    [({"ranks_per_engine": 4}, 6, 8), ({"ranks_per_engine": 2}, 0, 1), ({"first_gpu": 8}, 0, 8)],
)
def test_an_engine_that_does_not_fit_is_refused(values: dict[str, Any], own: int, visible: int) -> None:
    with pytest.raises(EngineError, match=rf"does not fit on GPUs .* of the {visible} that"):
        engine_gpu(section(**values), own=own, visible=visible)


def test_an_engine_on_a_cpu_is_one_process_unless_it_is_asked_for_more() -> None:
    assert settings(None, ranks_per_engine=2)["tp_size"] == 1
    assert settings(None)["device"] == "cpu"
    assert "base_gpu_id" not in settings(None)
    divided = section(tensor_parallel=2)
    assert tensor_parallel(divided, None) == 2
    assert variables(divided, None)["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in variables(section(), None)
    assert "PYTHONPATH" in variables(section(), 0)


def test_an_engine_that_never_sleeps_needs_no_memory_saver() -> None:
    assert not settings(0, sleep_tags=[])["enable_memory_saver"]


def test_the_transport_follows_from_where_the_engine_is() -> None:
    assert resolve("auto", cuda=False, same_gpus=True) == "shared_memory"
    assert resolve("auto", cuda=True, same_gpus=True) == "cuda_ipc"
    assert resolve("auto", cuda=True, same_gpus=False) == "distributed"
    assert resolve("disk", cuda=True, same_gpus=True) == "disk"
