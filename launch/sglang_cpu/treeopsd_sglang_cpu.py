"""A plugin of SGLang (entry point group `sglang.srt.plugins`), loaded by each of its processes."""

from __future__ import annotations

from typing import Any


def activate() -> None:
    """Allow deterministic sampling on a CPU, and host buffers for expert routes without CUDA."""
    import torch
    from sglang.srt.arg_groups import choices
    from sglang.srt.mem_cache.pool_host import common
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.utils import is_cpu

    if not is_cpu():
        return
    # A seed per request needs "deterministic inference", which SGLang offers for some GPU attention kernels only.
    # PyTorch's attention on a CPU works one request at a time, so it is as independent of the batch as those.
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    model_runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    HookRegistry.register(f"{model_runner}.maybe_enable_batch_invariant_mode", _skip, HookType.AROUND)

    def allocate(shape: Any, dtype: torch.dtype | None = None, **pinning: Any) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def _skip(original: Any, runner: Any) -> None:
    """In place of a method that replaces matrix products by Triton kernels."""
