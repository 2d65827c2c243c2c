"""Who samples tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_treeopsd.engine.base import Engine

if TYPE_CHECKING:
    import torch

    from megatron_treeopsd import config


def build(section: config.Engine, *, checkpoint: Path, dtype: str | torch.dtype) -> Engine:
    """The engine of a recipe, serving the Hugging Face folder `checkpoint`; `dtype` is a torch dtype or its name."""
    import torch

    from megatron_treeopsd.engine.embedded import EmbeddedEngine
    from megatron_treeopsd.engine.sglang import SGLangEngine

    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if section.name == "sglang":
        return SGLangEngine(section, checkpoint=checkpoint, dtype=dtype)
    return EmbeddedEngine.from_checkpoint(
        checkpoint, dtype=dtype, max_batch=section.max_batch, cache_tokens=section.cache_tokens
    )
