"""What the trainer's side does when the engine's process fails, against a stand-in that fails on demand."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from engine_fixtures import checkpoint_weights, random_policy

from megatron_treeopsd import config
from megatron_treeopsd.engine import sglang_worker
from megatron_treeopsd.engine.base import Completion, EngineError, Sampling
from megatron_treeopsd.engine.sglang import SGLangEngine

pytestmark = pytest.mark.fast

HERE = Path(__file__).resolve().parent


class Stub:
    """Builds engines over the stand-in."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._monkeypatch = folder, monkeypatch
        random_policy().save_pretrained(folder / "policy")
        self.python = folder / "python"
        self.python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE / "stub_worker.py"}" "$3" "$4" "$5"\n')
        self.python.chmod(0o755)
        monkeypatch.setenv("STUB_FLAG", str(folder / "died"))
        self.behave("fine")

    def behave(self, mode: str) -> None:
        """How processes that are started from now on behave."""
        self._monkeypatch.setenv("STUB", mode)

    def engine(self, mode: str = "fine", **settings: object) -> SGLangEngine:
        self.behave(mode)
        section = config.SGLangEngine.model_validate({"name": "sglang", "python": self.python, **settings})
        return SGLangEngine(section, checkpoint=self.folder / "policy", dtype=torch.float32)

    def published(self, mode: str = "fine", **settings: object) -> SGLangEngine:
        engine = self.engine(mode, **settings)
        engine.publish(checkpoint_weights(self.folder / "policy").items(), version=1)
        return engine


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    return Stub(tmp_path, monkeypatch)


def sample(engine: SGLangEngine, requests: int = 3) -> list[Completion]:
    async def gather() -> list[Completion]:
        sampling = Sampling(8, frozenset({1}), 1.0)
        calls = (engine.generate([3, i], seed=i, sampling=sampling, session="x") for i in range(requests))
        return list(await asyncio.gather(*calls))

    return asyncio.run(gather())


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


# ------------------------------------------------------------------------------------------------------------- start
def test_an_engine_that_cannot_start_is_quoted(stub: Stub) -> None:
    with pytest.raises(EngineError, match=r"(?s)SGLang could not start; .*ValueError: there is no such kernel"):
        stub.engine("broken")


def test_a_start_has_an_end(stub: Stub) -> None:
    with pytest.raises(EngineError, match=r"(?s)within 1 s \(engine\.start_seconds\).*still compiling"):
        stub.engine("slow", start_seconds=1.0)


def test_a_port_in_use_is_named(stub: Stub) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(EngineError, match=rf"engine\.port={port} cannot be used: Address already in use"):
            stub.engine(port=port)


def test_a_missing_environment_says_how_to_make_it(stub: Stub) -> None:
    with pytest.raises(EngineError, match=r"engine\.python=.*nowhere: .*launch/sglang_env\.sh"):
        stub.engine(python=stub.folder / "nowhere")


def test_another_architecture_is_refused(stub: Stub) -> None:
    path = stub.folder / "policy" / "config.json"
    path.write_text(path.read_text().replace("qwen3_moe", "mixtral"))
    with pytest.raises(EngineError, match="model_type=mixtral; engine=sglang serves llama, qwen3, qwen3_moe"):
        stub.engine()


def test_the_engine_knows_nothing_of_torchrun(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its process group would wait for the trainer's launcher, and the start would hang."""
    torchrun = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR",
                "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID")  # fmt: skip
    for name in torchrun:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "1")
    engine = stub.engine()
    found = {item.partition("=")[0] for item in Path(f"/proc/{engine.pid}/environ").read_text().split("\0")}
    assert not found.intersection(torchrun)
    assert {"KEPT", "PYTHONPATH", "HF_HUB_OFFLINE"} <= found
    engine.close()


def test_nothing_is_sampled_from_arbitrary_weights(stub: Stub) -> None:
    engine = stub.engine()
    with pytest.raises(EngineError, match="nothing was published yet"):
        sample(engine)
    engine.close()


def test_a_request_that_can_never_fit_says_so(stub: Stub) -> None:
    path = stub.folder / "policy" / "config.json"
    path.write_text(path.read_text().replace('"max_position_embeddings": 256', '"max_position_embeddings": 1024'))
    engine = stub.published(cache_tokens=256)

    def ask(prompt: int, tokens: int) -> Completion:
        sampling = Sampling(tokens, frozenset(), 1.0)
        return asyncio.run(engine.generate([3] * prompt, seed=0, sampling=sampling, session="x"))

    assert ask(200, 56).ids
    with pytest.raises(EngineError, match=r"200 tokens that may sample 57 .* engine\.cache_tokens=256"):
        ask(200, 57)
    engine.close()


# ----------------------------------------------------------------------------------------------------------- failures
def test_a_death_is_survived_and_told(stub: Stub, caplog: pytest.LogCaptureFixture) -> None:
    engine = stub.published("dies once")
    pid = engine.pid
    with caplog.at_level(logging.WARNING):
        completions = sample(engine)
    assert [completion.ids for completion in completions] == [[7, 1]] * 3
    assert engine.pid != pid
    assert not alive(pid)
    assert f"the SGLang process (pid {pid}) ended; starting it again with version 1" in caplog.text
    engine.close()


def test_too_many_deaths_end_the_run(stub: Stub) -> None:
    engine = stub.published("dies", restarts=2)
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"started again 2 times since the last publish \(engine\.restarts\)"):
        sample(engine)
    with pytest.raises(EngineError, match="started again 2 times"):
        sample(engine)
    assert time.monotonic() - started < 30
    engine.close()
    assert not alive(engine.pid)


def test_a_death_during_a_publish_is_survived(stub: Stub) -> None:
    engine = stub.published()
    os.kill(engine.pid, signal.SIGKILL)
    engine.publish(checkpoint_weights(stub.folder / "policy").items(), version=2)
    assert [completion.version for completion in sample(engine)] == [2] * 3
    engine.close()


def test_a_death_before_sleep_is_survived(stub: Stub) -> None:
    engine = stub.published(restarts=2)
    pid = engine.pid
    os.kill(pid, signal.SIGKILL)
    engine.sleep()
    assert engine.pid != pid
    with pytest.raises(EngineError, match="sleeps"):
        sample(engine)
    os.kill(engine.pid, signal.SIGKILL)  # while it sleeps
    engine.publish(checkpoint_weights(stub.folder / "policy").items(), version=2)
    assert [completion.version for completion in sample(engine)] == [2] * 3
    engine.close()


def test_an_engine_that_hangs_counts_as_dead(stub: Stub) -> None:
    engine = stub.published("hangs", request_seconds=1.0, restarts=0)
    with pytest.raises(EngineError, match=r"did not answer a request within 1 s \(engine\.request_seconds\)"):
        sample(engine)
    engine.close()


def test_an_engine_does_not_outlive_the_trainer(stub: Stub, tmp_path: Path) -> None:
    script = (
        "import sys, time, torch\nfrom pathlib import Path\nfrom megatron_treeopsd import config\n"
        "from megatron_treeopsd.engine.sglang import SGLangEngine\n"
        "section = config.SGLangEngine(name='sglang', python=sys.argv[1])\n"
        "engine = SGLangEngine(section, checkpoint=Path(sys.argv[2]), dtype=torch.float32)\n"
        "print(engine.pid, flush=True)\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-c", script, str(stub.python), str(stub.folder / "policy")]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "TMPDIR": str(tmp_path)}
    trainer = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    pid = int(trainer.stdout.readline())
    assert alive(pid)
    trainer.kill()
    trainer.communicate()
    deadline = time.monotonic() + 20
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def test_an_engine_that_is_still_starting_does_not_either(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: killed.append(number))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"{")
        sglang_worker.end_with_the_other_side(ours)
        assert killed == []
        assert ours.recv(1) == b"{", "the request is still there"
        theirs.close()
        sglang_worker.end_with_the_other_side(ours)
        assert killed == [signal.SIGKILL]
