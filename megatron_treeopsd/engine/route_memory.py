"""The experts of every token that the embedded engine has computed, beside its keys and values (see `kv.py`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatron_treeopsd.engine.base import EngineError
from megatron_treeopsd.routes import route_dtype


class RouteMemory:
    """Listens to the routers of a model; keeps what they choose for the tokens of the rows and of the pool.

    Args:
        model: of transformers; each of its layers has a router `mlp.gate` that returns expert indices last.
        rows, slots: as those of `KeyValueMemory`.

    Raises `EngineError` for a model without experts.
    """

    def __init__(self, model: PreTrainedModel, *, rows: int, slots: int) -> None:
        config = model.config
        routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        if len(routers) != config.num_hidden_layers:
            raise EngineError(
                f"mismatch.routes asks for the experts of every token, but {len(routers)} of the "
                f"{config.num_hidden_layers} layers of this {config.model_type} have any; set mismatch.routes=ignore"
            )
        shape = (config.num_hidden_layers, config.num_experts_per_tok)
        dtype = torch.int8 if route_dtype(config.num_experts) is np.int8 else torch.int16
        # The operating system hands out these pages when they are first touched, so unused capacity costs nothing.
        self._pool = torch.empty(slots, *shape, dtype=dtype)
        self._rows = torch.empty(rows, config.max_position_embeddings, *shape, dtype=dtype)
        self._chosen: list[Tensor] = []
        for router in routers:
            router.register_forward_hook(self._listen)

    def _listen(self, router: nn.Module, arguments: Any, output: tuple[Tensor, ...]) -> None:
        self._chosen.append(output[-1])

    def note(self, token_rows: Tensor, positions: Tensor) -> None:
        """Take what the routers chose in the forward pass that has just ended: int64 [tokens] each."""
        self._rows[token_rows, positions] = torch.stack(self._chosen, 1).to(self._rows.dtype)
        self._chosen.clear()

    def load(self, row: int, slots: Tensor) -> None:
        """Copy those of a cached prefix, int64 [n] slots, to the first n positions of a row."""
        self._rows[row, : len(slots)] = self._pool[slots]

    def save(self, row: int, start: int, slots: Tensor) -> None:
        """Copy those of the positions from `start` on of a row to `slots` of the pool."""
        self._pool[slots] = self._rows[row, start : start + len(slots)]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy those of the first `length` positions of one row over another."""
        self._rows[target, :length] = self._rows[source, :length]

    def of(self, row: int, start: int, stop: int) -> np.ndarray:
        """[stop - start, layers, experts a token] of the positions from `start` to `stop` of a row."""
        return self._rows[row, start:stop].numpy().copy()
