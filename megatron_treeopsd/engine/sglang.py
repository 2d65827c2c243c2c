"""The engine for production: SGLang in a process of its own, on the same machine; only token ids and weights cross.

    SGLangEngine ── Requests ── EngineProcess ══ socket pair ══ sglang_worker ── sglang.Engine
         └─────────── StagedWeights ─────────── shared memory ───────┘

The process may die without taking the trainer with it: it is started again, gets the weights that were published last,
and the requests that it has not answered are asked again. A request's result depends on prompt, seed and weights only,
so they come out as if nothing had happened.
"""

from __future__ import annotations

import base64
import functools
import logging
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from megatron_treeopsd import config
from megatron_treeopsd.engine import transport
from megatron_treeopsd.engine.base import Completion, Engine, EngineError, Sampling
from megatron_treeopsd.engine.checks import check_generate, check_routes, check_score
from megatron_treeopsd.engine.engine_folder import EngineFolder
from megatron_treeopsd.engine.handover import hand_over
from megatron_treeopsd.engine.nap import SLEEPS
from megatron_treeopsd.engine.sglang_process import EngineDied, EngineProcess
from megatron_treeopsd.engine.sglang_requests import Requests
from megatron_treeopsd.engine.sglang_settings import (
    engine_gpu,
    server_settings,
    serving_folder,
    tensor_parallel,
    variables,
)
from megatron_treeopsd.engine.staging import StagedWeights, checkpoint_shapes
from megatron_treeopsd.routes import route_dtype
from megatron_treeopsd.tree import Finish

logger = logging.getLogger(__name__)


class SGLangEngine(Engine):
    """`Engine` over one SGLang process.

    Construction starts the process, which takes half a minute. Nothing can be sampled before the first `publish`: the
    process starts with arbitrary weights.

    Args:
        section: the recipe's `engine` section.
        checkpoint: Hugging Face folder; its config says what is served, its safetensors headers what a publish must
            consist of.
        dtype: what the engine computes in.
        routes: let `Completion.routes` be asked for.
    """

    def __init__(
        self, section: config.SGLangEngine, *, checkpoint: Path, dtype: torch.dtype, routes: bool = False
    ) -> None:
        super().__init__()
        self._section = section
        self._dtype = dtype
        self._gpu = (
            engine_gpu(section, own=torch.cuda.current_device(), visible=torch.cuda.device_count())
            if torch.cuda.is_available()
            else None
        )
        self._shapes = checkpoint_shapes(checkpoint)
        self._folder = EngineFolder()
        self._closed = False
        self._asleep: tuple[str, ...] = ()
        try:
            model = serving_folder(checkpoint, self._folder.path / "model")
            self._route_shape = _route_shape(model) if routes else None
            self._tied: bool = model.tie_word_embeddings
            self._vocabulary: int = model.vocab_size
            self._context: int = model.max_position_embeddings
            self._weights: StagedWeights | None = None
            self.take_weights_by(section.transport)
            self._requests = Requests(section, current=lambda: self._process, replace=self._replace)
            self._restarts_left = section.restarts
            self._failure: EngineError | None = None
            self._restarting = threading.Lock()
            self._process = self._start()
        except BaseException:
            self._folder.remove()
            raise

    # ------------------------------------------------------------------------------------------------------ contract
    async def generate(
        self, prompt_ids: Sequence[int], *, seed: int, sampling: Sampling, session: str, routes_from: int = 0
    ) -> Completion:
        """See `Engine.generate`. Raises `EngineError` also if the engine died more often than `engine.restarts`."""
        self._check_open()
        check_generate(prompt_ids, sampling, vocabulary=self._vocabulary, context=self._context)
        check_routes(sampling, len(prompt_ids), routes_from, returned=self._route_shape is not None)
        parameters = {
            "temperature": sampling.temperature,
            "sampling_seed": seed % 2**63,
            "stop_token_ids": sorted(sampling.stop_ids),
        }
        wanted = None
        if sampling.routes and self._route_shape is not None:
            wanted = {"from": routes_from, "dtype": self._route_shape[0]}
        answer = await self._ask(
            "generate",
            prompt_ids,
            session=session,
            new_tokens=min(sampling.max_new_tokens, self._context - len(prompt_ids)),
            sampling=parameters,
            routes=wanted,
        )
        if answer["versions"] != [str(self.version)]:
            raise EngineError(f"SGLang sampled a turn with weights of version {answer['versions']}, not {self.version}")
        ids = answer["ids"]
        routes = self._routes_in(answer, len(prompt_ids), routes_from) if sampling.routes else None
        self.counters.generated_tokens += len(ids)
        # SGLang looks at the length first, the contract at the stop token.
        finish: Finish = "stop" if ids[-1] in sampling.stop_ids else answer["finish"]
        return Completion(ids, answer["logprobs"], finish, answer["cached_tokens"], self.version, routes)

    def _routes_in(self, answer: dict[str, Any], prompt: int, start: int) -> np.ndarray:
        """The routes of an answer; those of a request that was aborted may end earlier."""
        assert self._route_shape is not None
        dtype, *shape = self._route_shape
        routes = np.frombuffer(base64.b64decode(answer["routes"] or ""), dtype).reshape(-1, *shape)
        expected = prompt + len(answer["ids"]) - 1 - start
        if len(routes) != expected and answer["finish"] != "abort":
            raise EngineError(
                f"SGLang returned the routes of {len(routes)} tokens, not of {expected} (mismatch.routes)"
            )
        return routes

    async def score(self, prefix_ids: Sequence[int], continuation_ids: Sequence[int], *, session: str) -> list[float]:
        """See `Engine.score`."""
        self._check_open()
        check_score(prefix_ids, continuation_ids, vocabulary=self._vocabulary, context=self._context)
        answer = await self._ask("score", [*prefix_ids, *continuation_ids], session=session, start=len(prefix_ids))
        logprobs: list[float] = answer["logprobs"]
        return logprobs

    def publish(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """See `Engine.publish`. The engine sees nothing of a set that is not complete and right.

        If the engine fails while it takes the weights, it is started again with those it had, and `EngineError` is
        raised. Also raised while requests are waiting or running.
        """
        self._check_open()
        if unanswered := self._requests.unanswered:
            raise EngineError(f"version {version} was published while {unanswered} requests wait or run; "
                              "wait for them first")  # fmt: skip
        staged = StagedWeights(
            weights,
            shapes=self._shapes,
            tied=self._tied,
            dtype=self._dtype,
            bucket_bytes=self._section.bucket_mb * 2**20,
        )
        try:
            self._hand_over(staged, version)
        except BaseException:
            staged.free()
            raise
        if self._weights is not None:
            self._weights.free()
        self._weights, self.version = staged, version
        self._restarts_left = self._section.restarts
        self._requests.forget_cache()

    def open(self, session: str, *, tokens: int) -> None:
        """See `Engine.open`."""
        self._requests.open(session, tokens=tokens)

    def release(self, session: str) -> None:
        """See `Engine.release`; what SGLang does then, says `sglang_requests`."""
        self._requests.release(session)

    def abort(self, session: str) -> None:
        """See `Engine.abort`."""
        self._requests.abort(session)

    def sleep(self) -> None:
        """See `Engine.sleep`: SGLang gives back what `engine.sleep_tags` names; all of it loses its contents."""
        self._check_open()
        tags = () if self._section.first_gpu is not None else self._section.sleep_tags
        if not tags or self._asleep:
            return
        if unanswered := self._requests.unanswered:
            raise EngineError(f"the engine cannot sleep while {unanswered} requests wait or run")
        with self.naps.sleeping(_device_bytes):
            self._release(tags)
        self._asleep = tags
        self._requests.forget_cache()

    def _release(self, tags: Sequence[str]) -> None:
        while True:
            process = self._process
            try:
                process.call("release_memory", tags=list(tags), seconds=self._section.request_seconds)
                return
            except EngineDied as error:
                self._replace(process, str(error))

    def close(self) -> None:
        """Stop the process; open requests raise `EngineError`, later ones too."""
        if not self._closed:
            self._closed = True
            self._process.close()
            self._transport.close()
            if self._weights is not None:
                self._weights.free()
            self._folder.remove()

    def take_weights_by(self, name: transport.Name) -> None:
        """From now on weights come by this transport."""
        section, cuda = self._section, self._gpu is not None
        self._transport = transport.build(
            transport.resolve(name, cuda=cuda, same_gpus=section.first_gpu is None),
            device=torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
            ranks=tensor_parallel(section, self._gpu),
            folder=self._folder.path,
            seconds=section.request_seconds,
        )

    def checksum(self) -> str:
        """A hash over all weights as the engine holds them."""
        return str(self._process.call("checksum", seconds=self._section.request_seconds))

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    async def _ask(self, call: str, ids: Sequence[int], **fields: Any) -> dict[str, Any]:
        if self.version < 0:
            raise EngineError("nothing was published yet; the engine has no weights to sample from")
        if self._asleep:
            raise EngineError(SLEEPS)
        answer = await self._requests.ask(call, ids, **fields)
        self.counters.requests += 1
        self.counters.prompt_tokens += answer["prompt_tokens"]
        self.counters.cached_tokens += answer["cached_tokens"]
        return answer

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        if self._failure is not None:
            raise self._failure

    # ------------------------------------------------------------------------------------------------------- weights
    def _hand_over(self, weights: StagedWeights, version: int) -> None:
        """Load a set; into a new process where one dies over it."""
        while True:
            try:
                self._load(self._process, weights, version)
                return
            except EngineDied as error:
                self._replace(self._process, str(error))
            except EngineError as error:
                self._replace(self._process, f"publishing version {version} failed: {error}")
                raise EngineError(f"version {version} could not be published, version {self.version} stays in use: "
                                  f"{error}") from error  # fmt: skip

    def _load(self, process: EngineProcess, weights: StagedWeights, version: int) -> None:
        call = functools.partial(process.call, seconds=self._section.request_seconds)

        def wake(tags: Sequence[str]) -> None:
            if tags:
                with self.naps.waking():
                    call("resume_memory", tags=list(tags))

        hand_over(
            call, weights, transport=self._transport, version=version, vocabulary=self._vocabulary,
            asleep=self._asleep, wake=wake,
        )  # fmt: skip
        self._asleep = ()

    # -------------------------------------------------------------------------------------------------- the process
    def _start(self) -> EngineProcess:
        section = self._section
        if section.port:
            _check_port(section.port)
        if not section.python.is_file():
            raise EngineError(f"engine.python={section.python}: there is no such file; make SGLang's environment with "
                              "./launch/sglang_env.sh")  # fmt: skip
        process = EngineProcess(
            section.python.absolute(),  # not resolved: a virtual environment is known by the path of its link
            server_settings(
                section,
                model=self._folder.path / "model",
                context=self._context,
                dtype=str(self._dtype).removeprefix("torch."),
                routes=self._route_shape is not None,
                gpu=self._gpu,
            ),
            variables=variables(section, self._gpu),
            folder=self._folder,
        )
        process.wait_until_ready(section.start_seconds)
        return process

    def _replace(self, dead: EngineProcess, reason: str) -> None:
        """Start a new process with the weights published last, unless another request has done so already.

        Runs in worker threads. Raises `EngineError` if the bound is reached or the new process does not come up.
        """
        with self._restarting:
            self._check_open()
            if self._process is not dead:
                return
            output = dead.last_lines()
            dead.kill()
            self._transport.close()
            self._asleep = ()
            if self._restarts_left == 0:
                self._failure = EngineError(
                    f"{reason}; it was started again {self._section.restarts} times since the last publish "
                    f"(engine.restarts), which is all that is allowed. Its last output:\n{output}"
                )
                raise self._failure
            self._restarts_left -= 1
            logger.warning("%s; starting it again with version %d, lost requests follow", reason, self.version)
            started = time.monotonic()
            try:
                process = self._start()
                if self._weights is not None:
                    self._load(process, self._weights, self.version)
            except EngineError as error:
                self._failure = error
                raise
            self._requests.forget_cache()
            self._process = process
            logger.warning("the engine is back after %.1f s (pid %d)", time.monotonic() - started, process.pid)


def _device_bytes() -> int:
    """Bytes in use on this process's GPU, by anybody; 0 where there is none."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def _route_shape(model: PretrainedConfig) -> tuple[str, int, int]:
    """numpy's name of the type of expert numbers, number of layers, experts a token."""
    if not hasattr(model, "num_experts"):
        raise EngineError(
            f"mismatch.routes asks for the experts of every token, but {model.model_type} has none; set "
            "mismatch.routes=ignore"
        )
    return np.dtype(route_dtype(model.num_experts)).name, model.num_hidden_layers, model.num_experts_per_tok


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise EngineError(f"engine.port={port} cannot be used: {error.strerror}. Choose another one, or 0 for any "
                              "that is free") from None  # fmt: skip
