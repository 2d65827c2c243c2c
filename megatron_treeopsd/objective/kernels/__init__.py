"""Triton kernels of objectives and of token log-probs, and the one place that decides whether they run.

The torch code that they stand for is the reference: same values, same gradients, and the path of every other device.
Modules of this package import Triton, so import them only where `choose` says that kernels are used.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether kernels run, and why (for people: logs, `treeopsd plan`)."""

    kernels: bool
    reason: str


def choose(device: torch.device) -> Choice:
    """Kernels where they can run on tensors of `device`, else torch."""
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")
    if device.type != "cuda" and not (device.type == "cpu" and interpreted):
        return Choice(False, f"torch: Triton kernels need a GPU, and the tensors are on {device.type}")
    if importlib.util.find_spec("triton") is None:
        return Choice(
            False, "torch: Triton is not installed (it comes with the GPU builds of torch: pip install triton)"
        )
    if interpreted:
        return Choice(True, "Triton kernels, interpreted (TRITON_INTERPRET is set): exact, and very slow")
    return Choice(True, "Triton kernels")
