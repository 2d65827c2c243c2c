"""Rotary frequencies of models that stretch them for longer contexts than they were trained on first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ROPE_TYPES = ("default", "llama3")


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """`rope_type: llama3` (Llama 3.1 and later): long waves are stretched by `factor`, short ones stay, and between
    them the two are mixed.

    A wave is long if fewer than `low` of it fit into `context` positions, and short if more than `high` do.
    """

    factor: float
    low: float
    high: float
    context: int

    def __call__(self, frequencies: Tensor) -> Tensor:
        """Angles per position, of the same shape and dtype."""
        waves = self.context * frequencies / (2 * math.pi)
        kept = ((waves - self.low) / (self.high - self.low)).clamp(0, 1)
        return torch.lerp(frequencies / self.factor, frequencies, kept)


def scaling_of(hf: PretrainedConfig) -> Llama3Scaling | None:
    """What changes the rotary frequencies of a model whose `rope_type` is one of `ROPE_TYPES`."""
    values = hf.rope_parameters
    if values["rope_type"] == "default":
        return None
    return Llama3Scaling(
        factor=values["factor"],
        low=values["low_freq_factor"],
        high=values["high_freq_factor"],
        context=values["original_max_position_embeddings"],
    )
