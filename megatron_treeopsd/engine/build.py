"""Which engine a recipe asks for."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_treeopsd import config
from megatron_treeopsd.engine.base import Engine
from megatron_treeopsd.engine.embedded import EmbeddedEngine
from megatron_treeopsd.engine.guest import GuestEngine
from megatron_treeopsd.engine.sglang import SGLangEngine


def build_engine(
    section: config.Engine, *, checkpoint: Path, dtype: str | torch.dtype, rank: int = 0, routes: bool = False
) -> Engine:
    """The engine of training process `rank`, serving the Hugging Face folder `checkpoint`.

    `dtype` is a torch dtype or its name; `routes` says whether completions can carry the experts of their tokens. Where
    several processes share an engine, the first of them holds it.
    """
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if rank % section.ranks_per_engine:
        return GuestEngine()
    if section.name == "sglang":
        return SGLangEngine(section, checkpoint=checkpoint, dtype=dtype, routes=routes)
    return EmbeddedEngine.from_checkpoint(
        checkpoint, dtype=dtype, max_batch=section.max_batch, cache_tokens=section.cache_tokens, routes=routes
    )
