"""The other side of `sglang_process`: an SGLang engine behind a socket. Runs on the Python of SGLang's environment.

    python -P sglang_worker.py FD SETTINGS FILE

    FD          an inherited socket
    SETTINGS    JSON, arguments of sglang.Engine
    FILE        takes the names of SGLang's files in shared memory, which outlive it if it is killed

A request is one line of JSON, {"id", "call", ...}; its answer is {"id", "ok"} or {"id", "error"}. A "generate" that
asks for it gets {"id", "prefilled"} in between, as soon as its prompt is in SGLang's cache. Requests run side by side.
When the other end of the socket closes, whatever the reason, this process ends and takes SGLang's processes with it.

Nothing of megatron_treeopsd is imported here: the two environments hold different versions of everything.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import mmap
import os
import signal
import socket
import sys
import threading
from typing import Any

LINE_BYTES = 1 << 28


class Refused(Exception):
    """SGLang answered that it could not do what was asked."""


class Worker:
    """Calls by name: each public coroutine below is one; its keyword arguments are the fields of the request."""

    def __init__(self, engine: Any, tensor_parallel: int) -> None:
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._tensor_parallel = tensor_parallel
        self._writer: asyncio.StreamWriter | None = None

    async def serve(self, connection: socket.socket) -> None:
        """Answer requests until the other end closes the connection."""
        reader, self._writer = await asyncio.open_connection(sock=connection, limit=LINE_BYTES)
        self._send({"ready": True})
        try:
            async with asyncio.TaskGroup() as running:  # what goes wrong in one request, unforeseen, ends the process
                while line := await reader.readline():
                    running.create_task(self._answer(json.loads(line)))
                raise EOFError
        except* EOFError:  # nobody waits for what is still running
            pass

    async def _answer(self, request: dict[str, Any]) -> None:
        number, call = request.pop("id"), request.pop("call")
        try:
            if call == "generate":
                answer = {"id": number, "ok": await self.generate(number, **request)}
            else:
                answer = {"id": number, "ok": await getattr(self, call)(**request)}
        except (Refused, ValueError) as error:  # SGLang raises ValueError for requests it does not take
            answer = {"id": number, "error": str(error)}
        self._send(answer)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._writer is not None
        self._writer.write(json.dumps(message).encode() + b"\n")

    # --------------------------------------------------------------------------------------------------- sampling
    async def generate(
        self,
        number: int,
        ids: list[int],
        sampling: dict[str, Any],
        max_new_tokens: int,
        session: str,
        priority: int,
        announce: bool,
        routes: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """Sample behind `ids`; see `sglang.SGLangEngine` for the fields of the answer.

        `routes` {"from": position, "dtype": numpy's name} asks for the experts of the tokens from a position on.
        """
        wanted = {} if routes is None else {"return_routed_experts": True, "routed_experts_start_len": routes["from"]}
        chunks = await self._engine.async_generate(
            input_ids=ids,
            sampling_params={**sampling, "max_new_tokens": max_new_tokens},
            return_logprob=True,
            stream=True,
            rid=_request_id(number),
            session_id=session,
            priority=priority,
            **wanted,
        )
        last: dict[str, Any] = {}
        async for chunk in chunks:
            last = chunk  # each holds all so far
            if announce:
                self._send({"id": number, "prefilled": True})
                announce = False
        meta = last["meta_info"]
        if not last["output_ids"]:  # aborted in SGLang's queue
            return {"ids": [], "finish": "abort", "why": meta["finish_reason"].get("message")}
        return {
            "ids": last["output_ids"],
            "logprobs": [entry[0] for entry in meta["output_token_logprobs"]],
            "finish": meta["finish_reason"]["type"],
            "prompt_tokens": meta["prompt_tokens"],
            "cached_tokens": meta["cached_tokens"],
            "retractions": meta["num_retractions"],
            "versions": sorted({span["version"] for span in meta["weight_versions"]}),
            "routes": None if routes is None else _smaller(meta.get("routed_experts"), routes["dtype"]),
        }

    async def score(self, ids: list[int], start: int, session: str | None = None, priority: int = 0) -> dict[str, Any]:
        """Log-probabilities of `ids[start:]`, at temperature 1."""
        answer = await self._engine.async_generate(
            input_ids=ids,
            sampling_params={"max_new_tokens": 0, "temperature": 1.0},
            return_logprob=True,
            logprob_start_len=start - 1,  # the first entry has no log-probability: it says what the others follow
            session_id=session,
            priority=priority,
        )
        meta = answer["meta_info"]
        return {
            "logprobs": [entry[0] for entry in meta["input_token_logprobs"][1:]],
            "prompt_tokens": meta["prompt_tokens"],
            "cached_tokens": meta["cached_tokens"],
        }

    async def abort(self, number: int) -> None:
        """Stop a request; it is answered with what it has sampled."""
        self._manager.abort_request(rid=_request_id(number))

    async def close_session(self, session: str) -> None:
        """Let go of what the requests of a session have cached."""
        from sglang.srt.managers.io_struct import CloseSessionReqInput

        await self._manager.close_session(CloseSessionReqInput(session_id=session), None)

    # ---------------------------------------------------------------------------------------------------- weights
    async def begin(self) -> None:
        """Open a weight update."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        _check("begin_weight_update", *await self._manager.begin_weight_update(BeginWeightUpdateReqInput(), None))

    async def update(self, path: str, nbytes: int, tensors: list[list[Any]], version: str) -> dict[str, int]:
        """Load one bucket: `nbytes` of memory behind `path`, in which `tensors` [name, shape, dtype, offset] lie."""
        import torch
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

        metadata = []
        for name, shape, dtype_name, offset in tensors:
            dtype = getattr(torch, dtype_name)
            size = torch.Size(shape).numel() * dtype.itemsize
            metadata.append(FlattenedTensorMetadata(name, torch.Size(shape), dtype, offset, offset + size, size))
        with open(path, "rb+") as file:  # mapped, not read; PyTorch copies it once when it hands it on
            memory = torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
        # One each: what is serialised can be opened once.
        handles = [
            MultiprocessingSerializer.serialize({"flattened_tensor": memory, "metadata": metadata})
            for _ in range(self._tensor_parallel)
        ]
        return await self.update_by_handle(handles, tensors, version)

    async def update_by_handle(self, handles: list[Any], tensors: list[list[Any]], version: str) -> dict[str, int]:
        """Load one bucket; `handles` are what SGLang's processes unpickle, one each, and are not opened here."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        update = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=handles,
            load_format="flattened_bucket",
            flush_cache=False,  # once, at the end
            weight_version=version,
        )
        _check("update_weights_from_tensor", *await self._manager.update_weights_from_tensor(update, None))
        return _taken(tensors)

    async def join(self, name: str, port: int, ranks: int, backend: str) -> None:
        """Make a process group with the trainer's process, which is rank 0 and holds the store at `port`."""
        from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput

        group = InitWeightsUpdateGroupReqInput(
            master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=ranks, group_name=name,
            backend=backend,
        )  # fmt: skip
        _check("init_weights_update_group", *await self._manager.init_weights_update_group(group, None))

    async def update_by_broadcast(self, name: str, tensors: list[list[Any]], version: str) -> dict[str, int]:
        """Load one bucket, which rank 0 of the group `name` sends; see `join`."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput

        names, shapes, dtypes, _ = zip(*tensors, strict=True)
        update = UpdateWeightsFromDistributedReqInput(
            names=list(names), dtypes=list(dtypes), shapes=list(shapes), group_name=name,
            load_format="flattened_bucket", flush_cache=False, weight_version=version,
        )  # fmt: skip
        _check("update_weights_from_distributed", *await self._manager.update_weights_from_distributed(update, None))
        return _taken(tensors)

    async def update_from_disk(self, path: str, version: str) -> dict[str, int]:
        """Load the Hugging Face folder `path`; SGLang opens and closes an update by itself."""
        from safetensors import safe_open
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        update = UpdateWeightFromDiskReqInput(
            model_path=path, load_format="safetensors", flush_cache=False, weight_version=version
        )
        success, message, _ = await self._manager.update_weights_from_disk(update, None)
        _check("update_weights_from_disk", success, message)
        count = nbytes = 0
        for name in sorted(os.listdir(path)):
            if name.endswith(".safetensors"):
                with safe_open(os.path.join(path, name), "pt") as file:
                    sizes = [file.get_tensor(key).nbytes for key in file.keys()]  # noqa: SIM118 (no mapping)
                count, nbytes = count + len(sizes), nbytes + sum(sizes)
        return {"tensors": count, "bytes": nbytes}

    async def end(self) -> None:
        """Close a weight update."""
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        _check("end_weight_update", *await self._manager.end_weight_update(EndWeightUpdateReqInput(), None))

    async def flush(self) -> None:
        """Forget every cached key and value."""
        answer = await self._manager.flush_cache(timeout_s=30)
        _check("flush_cache", answer.success, answer.message)

    async def checksum(self) -> str:
        """A hash over all weights as SGLang holds them."""
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        success, message, _, checksum = await self._manager.check_weights(CheckWeightsReqInput(action="checksum"), None)
        _check("check_weights", success, message)
        return str(checksum)

    # ----------------------------------------------------------------------------------------------------- memory
    async def release_memory(self, tags: list[str]) -> None:
        """Give memory back: of "kv_cache", "weights", "cuda_graph". Waits for what runs, and empties the cache."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self.flush()  # refused while something runs, which would end SGLang's scheduler here
        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags), None)

    async def resume_memory(self, tags: list[str]) -> None:
        """Undo `release_memory`."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags), None)


def _smaller(routes: str | None, dtype: str) -> str | None:
    """SGLang's expert numbers, int32 in base64, as a smaller integer type in base64."""
    import numpy as np

    if routes is None:
        return None
    return base64.b64encode(np.frombuffer(base64.b64decode(routes), np.int32).astype(dtype).tobytes()).decode()


def _taken(tensors: list[list[Any]]) -> dict[str, int]:
    """What a bucket held, for the trainer to compare; `tensors` are [name, shape, dtype, offset]."""
    import torch

    sizes = [torch.Size(shape).numel() * getattr(torch, dtype).itemsize for _, shape, dtype, _ in tensors]
    return {"tensors": len(sizes), "bytes": sum(sizes)}


def _request_id(number: int) -> str:
    """SGLang's name of a request. It ends with a stop: an abort hits every request whose name begins with its own."""
    return f"{number}."


def _check(what: str, success: bool, message: str) -> None:
    if not success:
        raise Refused(f"{what}: {message}")


def end_with_the_other_side(connection: socket.socket) -> None:
    """Watch for a trainer that goes away while SGLang starts and cannot look; returns when it first asks something."""
    if not connection.recv(1, socket.MSG_PEEK):
        os.killpg(os.getpgrp(), signal.SIGKILL)


def shared_memory(group: int) -> list[str]:
    """Names of SGLang's own files in shared memory that the processes of a group have mapped."""
    found: set[str] = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getpgid(int(pid)) == group:
                with open(f"/proc/{pid}/maps") as file:
                    found |= {line.partition("/dev/shm/")[2].strip() for line in file if "/dev/shm/" in line}
        except (ProcessLookupError, FileNotFoundError):  # it has just ended
            continue
    return sorted(name for name in found if name.startswith(("sglang_loads_", "sgl_shm_")) and " " not in name)


def main() -> None:
    """Start the engine, say that it is ready, serve."""
    connection, settings = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    threading.Thread(target=end_with_the_other_side, args=[connection], daemon=True).start()
    import sglang

    engine = sglang.Engine(**settings)
    left_behind = shared_memory(os.getpgrp())
    with open(sys.argv[3], "w") as file:
        file.write("\n".join(left_behind))
    try:
        engine.loop.run_until_complete(Worker(engine, settings.get("tp_size", 1)).serve(connection))
    finally:
        connection.close()
    engine.shutdown()
    for name in left_behind:  # the trainer may be dead, and cannot
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"/dev/shm/{name}")
    os.killpg(os.getpgrp(), signal.SIGKILL)  # what has not ended by now; this process leads a group of its own


if __name__ == "__main__":  # SGLang's processes import this file again
    main()
