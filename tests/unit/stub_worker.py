"""Stands in for SGLang's side of the socket in tests of what happens when it fails; needs no SGLang.

The environment variable STUB says how it behaves: "fine", "broken" (cannot start), "slow" (never ready), "dies" (at
every generate), "dies once", "hangs" (at generate). "dies once" leaves the file STUB_FLAG behind when it has died.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    mode = os.environ["STUB"]
    connection = socket.socket(fileno=int(sys.argv[1]))
    if mode == "broken":
        print("loading the model\nValueError: there is no such kernel", flush=True)
        sys.exit(3)
    if mode == "slow":
        print("still compiling", flush=True)
        time.sleep(600)
    stream = connection.makefile("rwb")

    def send(message: dict[str, Any]) -> None:
        stream.write(json.dumps(message).encode() + b"\n")
        stream.flush()

    send({"ready": True})
    version = "default"
    for line in stream:
        request = json.loads(line)
        number, call = request["id"], request["call"]
        answer: Any = None
        if call == "update":
            version = request["version"]
            sizes = [4 * _product(shape) for _, shape, _, _ in request["tensors"]]
            answer = {"tensors": len(sizes), "bytes": sum(sizes)}
        elif call == "score":
            answer = {"logprobs": [-1.0], "prompt_tokens": len(request["ids"]), "cached_tokens": 0}
        elif call == "generate":
            if mode == "hangs":
                continue
            flag = Path(os.environ["STUB_FLAG"])
            if mode == "dies" or (mode == "dies once" and not flag.exists()):
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if request["announce"]:
                send({"id": number, "prefilled": True})
            answer = {"ids": [7, 1], "logprobs": [-1.0, -2.0], "finish": "stop", "prompt_tokens": len(request["ids"]),
                      "cached_tokens": 0, "versions": [version]}  # fmt: skip
        send({"id": number, "ok": answer})


def _product(shape: list[int]) -> int:
    out = 1
    for size in shape:
        out *= size
    return out


if __name__ == "__main__":
    main()
