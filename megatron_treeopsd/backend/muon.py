"""Muon for the attention projections: momentum, orthogonalised by a Newton-Schulz iteration (Jordan et al., 2024).

q, k and v are three linear maps that Megatron keeps in one matrix. Orthogonalising the fused matrix would tie their
scales together, so each is orthogonalised by itself. megatron-core's own Muon does the same but needs a package that
is not available for every supported Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Quintic of the iteration: steepest at zero, keeps singular values near one without converging."""

Split = Callable[[Tensor], list[Tensor]]
"""Views of a parameter (or its momentum) that are one linear map each; [rows, columns] after flattening the front."""


class Muon(torch.optim.Optimizer):
    """Muon over 2-D parameters with decoupled weight decay and Nesterov momentum.

    A step moves each linear map by `lr * sqrt(max(1, rows / columns))` times its orthogonalised momentum.
    `split` says which linear maps a parameter consists of; parameters it does not list are one.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        split: dict[Tensor, Split],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        steps: int = 5,
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "steps": steps})
        self._split = split

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                velocity = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(velocity, group["momentum"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                split = self._split.get(parameter, lambda tensor: [tensor])
                for weight, direction in zip(split(parameter), split(update), strict=True):
                    rows, columns = direction.numel() // direction.shape[-1], direction.shape[-1]
                    scale = group["lr"] * math.sqrt(max(1.0, rows / columns))
                    turned = orthogonalize(direction.reshape(rows, columns), steps=group["steps"])
                    weight.sub_(turned.view(direction.shape), alpha=scale)


def orthogonalize(matrix: Tensor, *, steps: int) -> Tensor:
    """U S' V^T for the matrix U S V^T, with S' near one (between 0.5 and 1.5); [rows, columns] in and out."""
    a, b, c = COEFFICIENTS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.t()
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = wide @ wide.t()
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.t()


def qkv_split(*, groups: int, dim: int) -> Split:
    """The maps q, k, v inside Megatron's fused matrix [groups * (heads per group + 2) * dim, hidden]."""

    def split(fused: Tensor) -> list[Tensor]:
        parts = fused.view(groups, -1, dim, fused.shape[-1])
        return [parts[:, :-2], parts[:, -2], parts[:, -1]]

    return split
