"""A process that runs `sglang_worker`, and the conversation with it over a socket pair.

The socket pair needs no port and ends with either side: if the engine dies, every open request fails at once with
`EngineDied`; if this process dies, the engine sees it and ends too. Answers are read by a thread, so requests work from
any event loop and from none.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from megatron_treeopsd.engine.base import EngineError
from megatron_treeopsd.engine.engine_folder import EngineFolder

WORKER = Path(__file__).with_name("sglang_worker.py")
SHIM = Path(__file__).resolve().parents[2] / "launch" / "sglang_cpu"


class EngineDied(EngineError):
    """The engine's process is gone, or as good as gone; requests can be sent again to another one."""


class EngineProcess:
    """One engine process. Construction starts it; `wait_until_ready` waits for it.

    Args:
        python: interpreter of SGLang's environment.
        settings: arguments of `sglang.Engine`.
        variables: environment variables on top of this process's own.
        folder: for its files; takes what it prints.
    """

    def __init__(
        self, python: Path, settings: Mapping[str, Any], *, variables: Mapping[str, str], folder: EngineFolder
    ) -> None:
        self._folder = folder
        self._log = folder.path / "log.txt"
        self._lock = threading.Lock()
        self._next = 0
        self._open: dict[int, tuple[Future[Any], Callable[[], None] | None]] = {}
        self._ready: Future[Any] = Future()
        self._gone: EngineDied | None = None
        self._socket, theirs = socket.socketpair()
        with theirs, self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(python), "-P", str(WORKER), str(theirs.fileno()), json.dumps(settings), str(folder.shared_memory)],
                env={**_environment(), **folder.variables(), **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a group of its own, which `kill` ends as a whole
            )
        threading.Thread(target=self._read, name="sglang-answers", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self, seconds: float) -> None:
        """Raise `EngineDied` with the last lines of its output if the engine does not come up in time."""
        try:
            self._ready.result(seconds)
        except TimeoutError:
            self.kill()
            raise EngineDied(f"SGLang did not start within {seconds:g} s (engine.start_seconds); its last output:\n"
                             f"{self.last_lines()}") from None  # fmt: skip
        except EngineDied:
            self.kill()
            raise EngineDied(f"SGLang could not start; its last output:\n{self.last_lines()}") from None

    def send(self, call: str, *, prefilled: Callable[[], None] | None = None, **fields: Any) -> tuple[int, Future[Any]]:
        """Ask for `call`; returns the number of the request and its answer to come.

        The future raises `EngineError` if the engine refuses and `EngineDied` if it ends first. `prefilled` is called
        from another thread when the prompt of a "generate" is computed.
        """
        answer: Future[Any] = Future()
        with self._lock:
            number = self._next
            self._next += 1
            if self._gone is not None:
                answer.set_exception(self._gone)
                return number, answer
            self._open[number] = (answer, prefilled)
            with contextlib.suppress(OSError):  # it has just ended; the reader fails all that are open
                self._socket.sendall(json.dumps({"id": number, "call": call, **fields}).encode() + b"\n")
        return number, answer

    def call(self, call: str, *, seconds: float, **fields: Any) -> Any:
        """`send` and wait. Raises `EngineDied` if there is no answer within `seconds`."""
        _, answer = self.send(call, **fields)
        try:
            return answer.result(seconds)
        except TimeoutError:
            raise EngineDied(f"SGLang did not answer '{call}' within {seconds:g} s (engine.request_seconds)") from None

    def last_lines(self, count: int = 15) -> str:
        """The end of what the process printed."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-count:])

    def kill(self) -> None:
        """End the process and those it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._socket.close()
        self._folder.forget_shared_memory()

    def close(self, seconds: float = 10) -> None:
        """Let the process end by itself, then make sure that nothing of it is left."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._socket.shutdown(socket.SHUT_WR)
            self._process.wait(seconds)
        self.kill()

    # ---------------------------------------------------------------------------------------------------- answers
    def _read(self) -> None:
        # Killed in the middle of a line, it leaves half an answer.
        with contextlib.suppress(OSError, json.JSONDecodeError), self._socket.makefile("rb") as lines:
            for line in lines:
                self._take(json.loads(line))
        with self._lock:
            self._gone = EngineDied(f"the SGLang process (pid {self.pid}) ended")
            waiting = [self._ready, *(answer for answer, _ in self._open.values())]
            self._open.clear()
        for answer in waiting:
            if not answer.done():
                _settle(answer, error=self._gone)

    def _take(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self._ready.set_result(None)
            return
        with self._lock:
            answer, prefilled = self._open[message["id"]]
            if "prefilled" not in message:
                del self._open[message["id"]]
        if "prefilled" in message:
            assert prefilled is not None
            prefilled()
        elif "error" in message:
            _settle(answer, error=EngineError(message["error"]))
        else:
            _settle(answer, value=message["ok"])


def _environment() -> dict[str, str]:
    """This process's variables without those that say which rank of a training it is.

    With them, PyTorch in the engine's processes would wait for torchrun to bring them together.
    """
    launcher = re.compile(r"(LOCAL_|GROUP_|ROLE_|)(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")
    return {name: value for name, value in os.environ.items() if not launcher.fullmatch(name)}


def _settle(answer: Future[Any], *, value: Any = None, error: EngineError | None = None) -> None:
    """Set a future that its waiter may have cancelled."""
    if answer.set_running_or_notify_cancel():
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)
