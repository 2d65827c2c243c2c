"""megatron-core on a machine without CUDA, over gloo. The only place that knows how; no effect where CUDA is there.

megatron-core asks `torch.cuda` for devices, streams and RNG states, names "cuda" as the device of new tensors, and
imports Triton kernels. On a CPU each of these has an honest equivalent (the CPU device, a no-op stream, the default
generator), which `install` puts in place. It patches private names, hence the exact version.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import logging
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

MEGATRON_VERSION = "0.19.2"

_CPU = torch.device("cpu")
_FACTORIES = ("zeros", "ones", "empty", "tensor", "full", "arange", "zeros_like", "empty_like", "ones_like")


@functools.cache
def install() -> None:
    """Make `megatron.core` importable and runnable on a CPU. Call before the first import of megatron.

    Raises RuntimeError if the installed megatron-core is not the version that the patches were written for.
    """
    _quieten()
    if torch.cuda.is_available():
        return
    version = importlib.metadata.version("megatron-core")
    if version != MEGATRON_VERSION:
        raise RuntimeError(
            f"megatron-core {version} is installed; its CPU support here is written for {MEGATRON_VERSION}. "
            f"Install it with: pip install --no-deps --ignore-requires-python megatron-core=={MEGATRON_VERSION}"
        )
    if importlib.util.find_spec("triton") is None:
        _stand_in_for_triton_kernels()
    _redirect_cuda_functions()
    _redirect_cuda_devices()
    _patch_megatron()


def _quieten() -> None:
    """Silence what megatron-core says at every start about packages it would like and plans it has."""
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    for name in ("models.gpt.gpt_model", "distributed.distributed_data_parallel"):
        logging.getLogger(f"megatron.core.{name}").setLevel(logging.ERROR)


class _Stream:
    """Operations on a CPU are complete when they return, so streams and events have nothing to wait for."""

    device = _CPU

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def _stand_in_for_triton_kernels() -> None:
    """The one module of megatron-core that imports Triton unconditionally serves a feature that stays off here."""
    name = "megatron.core.transformer.moe.ops.paged_stash"

    def unavailable(*_: Any, **__: Any) -> None:
        raise RuntimeError("moe_paged_stash needs Triton and a GPU")

    module = types.ModuleType(name)
    module.__dict__.update(
        GLOBAL_BLOCK_SIZE=1024, paged_stash_copy_kernel=unavailable, paged_stash_pop_kernel=unavailable
    )
    sys.modules[name] = module


def _redirect_cuda_functions() -> None:
    replacements: dict[str, Callable[..., Any]] = {
        "current_device": lambda: _CPU,
        "set_device": lambda *_: None,
        "synchronize": lambda *_, **__: None,
        "empty_cache": lambda: None,
        "current_stream": lambda *_: _Stream(),
        "default_stream": lambda *_: _Stream(),
        "stream": lambda _: contextlib.nullcontext(),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "get_device_capability": lambda *_: (0, 0),
        "Stream": _Stream,
        "Event": _Event,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)


def _redirect_cuda_devices() -> None:
    """`device="cuda"` and `.cuda()` mean the CPU; pinned memory is ordinary memory."""
    # `with torch.device(...)` recognises factories by identity, in a set that is built on first use. It has to hold the
    # originals, which the wrappers call; with the wrappers in it, models "on meta" are built from uninitialised memory.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]
    torch.Tensor.record_stream = lambda self, _: None  # type: ignore[method-assign, assignment]


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **options: Any) -> torch.Tensor:
        device = options.get("device")
        if device is not None and torch.device(device).type == "cuda":
            options["device"] = _CPU
        if options.get("pin_memory"):
            options["pin_memory"] = False
        return factory(*args, **options)

    return create


def _patch_megatron() -> None:
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    def get_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    def as_numpy(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    random._get_cuda_rng_state, random._set_cuda_rng_state = get_state, set_state
    # The original converts CUDA tensors only, and the all-to-all needs its splits as numbers.
    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = as_numpy

    type_name = torch.Tensor.type

    def cuda_type_name(self: torch.Tensor, dtype: Any = None, *args: Any, **options: Any) -> Any:
        # The mixed-precision optimizers sort parameters by names like "torch.cuda.FloatTensor".
        if dtype is None and sys._getframe(1).f_globals["__name__"].startswith("megatron.core.optimizer"):
            return type_name(self).replace("torch.", "torch.cuda.", 1)
        return type_name(self, dtype, *args, **options)

    torch.Tensor.type = cuda_type_name  # type: ignore[method-assign, assignment]
