"""What an SGLang process is started with: its arguments, its environment variables, its devices, its model folder.

    training processes   0 1 2 3 4 5 6 7          ranks_per_engine=4: two engines of four GPUs, on those of the
    their GPUs           0 1 2 3 4 5 6 7          training processes that share them
    engines             [-- 0 --][-- 1 --]

Nothing with a GPU was ever run; what is below for one follows SGLang's source.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from megatron_treeopsd import config
from megatron_treeopsd.engine.base import EngineError
from megatron_treeopsd.engine.sglang_process import SHIM

FAMILIES = ("llama", "qwen3", "qwen3_moe")
"""`model_type` values that SGLang is tested with."""

SPARE_TOKENS = 8
"""SGLang keeps a few positions of the context, and of the cache, for itself."""


def server_settings(
    section: config.SGLangEngine, *, model: Path, context: int, dtype: str, routes: bool, gpu: int | None
) -> dict[str, Any]:
    """Arguments of `sglang.Engine`.

    Args:
        section: the recipe's `engine` section.
        model: folder with the config that is served.
        context: tokens of the longest sequence.
        dtype: what the engine computes in, by its name in torch.
        routes: whether requests may ask for the experts of their tokens.
        gpu: the engine's first GPU, of those that this process sees; None: there is none, it runs on the CPU.
    """
    settings: dict[str, Any] = {
        "model_path": str(model),
        "load_format": "dummy",  # the weights come with the first publish
        "dtype": dtype,
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "context_length": context + SPARE_TOKENS,
        "max_running_requests": section.max_batch,
        "max_total_tokens": section.cache_tokens + SPARE_TOKENS,
        "schedule_policy": "fcfs",  # the gate has chosen already, and says so in the priorities
        "enable_priority_scheduling": True,
        "disable_priority_preemption": True,
        "default_priority_value": 0,
        "enable_session_radix_cache": True,
        "stream_interval": 1 << 20,  # the first token, and all at the end
        "sleep_on_idle": True,  # else its scheduler takes a whole core from the trainer, also while nothing is asked
        "enable_deterministic_inference": section.deterministic,
        "random_seed": 0,
        "log_level": "warning",
        "nccl_port": section.port or None,
        "enable_return_routed_experts": routes,
        "tp_size": tensor_parallel(section, gpu),
    }
    if gpu is not None:
        return {
            **settings,
            "base_gpu_id": gpu,
            "mem_fraction_static": section.memory_fraction,
            "enable_memory_saver": section.first_gpu is None and bool(section.sleep_tags),
        }
    return {
        **settings,
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.1,
    }


def tensor_parallel(section: config.SGLangEngine, gpu: int | None) -> int:
    """Devices of one engine: by default those of the training processes that share it, and one CPU."""
    return section.tensor_parallel or (1 if gpu is None else section.ranks_per_engine)


def engine_gpu(section: config.SGLangEngine, *, own: int, visible: int) -> int:
    """The first GPU of the engine whose first training process has GPU `own` of `visible`.

    Raises `EngineError` if the engine does not fit behind it on this machine.
    """
    size = tensor_parallel(section, own)
    first = own if section.first_gpu is None else section.first_gpu + own // section.ranks_per_engine * size
    if own % section.ranks_per_engine or first + size > visible:
        raise EngineError(
            f"an engine of {size} GPUs (engine.tensor_parallel={section.tensor_parallel}, engine.ranks_per_engine="
            f"{section.ranks_per_engine}) does not fit on GPUs {first} to {first + size - 1} of the {visible} that the "
            f"training process on GPU {own} sees; an engine and the processes that share it are on one machine"
        )
    return first


def variables(section: config.SGLangEngine, gpu: int | None) -> dict[str, str]:
    """Environment variables of the process, on top of the trainer's."""
    found = {
        "HF_HUB_OFFLINE": "1",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "PYTHONPATH": "",  # nothing of the trainer's environment
    }
    if gpu is not None:
        return found
    # Without a compiler cache the first token would take half a minute of compiling.
    found |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCH_COMPILE_DISABLE": "1", "PYTHONPATH": str(SHIM)}
    if (size := tensor_parallel(section, gpu)) > 1:  # else SGLang asks for a NUMA node for each
        found["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(size)))
    return found


def serving_folder(checkpoint: Path, folder: Path) -> PretrainedConfig:
    """Write the config that SGLang serves into `folder`; returns the checkpoint's.

    They differ in the end-of-sequence token, which SGLang does not get: a turn ends where its request says.
    """
    path = checkpoint / "config.json"
    if not path.is_file():
        raise EngineError(f"{checkpoint}: not a Hugging Face checkpoint folder (there is no config.json in it)")
    model = AutoConfig.from_pretrained(checkpoint)
    if model.model_type not in FAMILIES:
        raise EngineError(f"{path}: model_type={model.model_type}; engine=sglang serves {', '.join(FAMILIES)}")
    served = {**json.loads(path.read_text()), "eos_token_id": None, "tie_word_embeddings": model.tie_word_embeddings}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(served))
    return model
