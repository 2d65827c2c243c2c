"""Router replay: the experts that a token goes to in training are those that it went to in the engine.

    PackedTrees.routes [T, layers, k] ─► TreeSequence.routes, this rank's rows ─► before each layer ─► its router

The routes travel with their micro-batch, and a layer takes its own as it begins. So it does not matter in which order a
pipeline runs micro-batches forward and backward, nor whether a layer is computed again for its gradient. What Megatron
offers itself keeps routes in queues, which must be filled and switched from forward to backward at the right moments.

The weights of the chosen experts, and with them the gradient of the router, are those of the trainer's own scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class RouteCounts:
    """Pairs of a token and a layer, over all ranks.

    Attributes:
        known: those whose route in the engine is known.
        own: among them, where the trainer's router by itself chooses the same experts, in any order.
        taken: among them, where the token went to the same experts.
    """

    known: int
    own: int
    taken: int


class LayerRoutes(RouterReplay):
    """What Megatron's router of one layer asks for the experts of its tokens.

    Attributes:
        target: int8/int16 [rows, experts a token], negative where a row's route is not known; None for none.
        counting: whether to count where tokens go. Not in training: recomputed layers would be counted twice.
        counts: int64 [3], as `RouteCounts`.
    """

    def __init__(self, *, replay: bool) -> None:
        # The base class would put this into a list that lives as long as the process, to find all layers again.
        self.target: Tensor | None = None
        self.counting = False
        self.counts: Tensor | None = None
        self._replay = replay

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and numbers [rows, topk] of the experts that each row goes to, from the `scores` of all experts."""
        assert default_compute_topk is not None
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.target is None:
            return values, own
        target = self.target.to(scores.device, own.dtype)
        known = target[:, 0] >= 0
        taken = own
        if self._replay:
            taken = torch.where(known[:, None], target, own)
            values = scores.gather(1, taken)
        if self.counting:
            self._count(target[known], own[known], taken[known])
        return values, taken

    def _count(self, target: Tensor, own: Tensor, taken: Tensor) -> None:
        expected = target.sort(1).values
        found = [target.new_tensor(len(target)), *(_equal_rows(expected, routes) for routes in (own, taken))]
        counts = torch.stack(found)
        self.counts = counts if self.counts is None else self.counts + counts


class Routing:
    """Router replay of one rank's part of a model.

    Args:
        model: its layers of experts get a `LayerRoutes` each.
        replay: let tokens follow the engine's routes; without it, differences are counted only.
    """

    def __init__(self, model: Any, *, replay: bool) -> None:
        self._layers: list[LayerRoutes] = []
        for layer in model.decoder.layers:
            routes = LayerRoutes(replay=replay)
            layer.mlp.router.router_replay = routes
            layer.register_forward_pre_hook(_hand_routes(routes), with_kwargs=True)
            self._layers.append(routes)

    def take_counts(self, device: torch.device) -> RouteCounts:
        """What passes in evaluation mode have counted since the last time. Collective over all ranks.

        Every rank holds other layers or other rows: those of tensor-parallel ranks are divided by sequence parallelism.
        """
        total = torch.zeros(3, dtype=torch.int64, device=device)
        for routes in self._layers:
            if routes.counts is not None:
                total += routes.counts
                routes.counts = None
        dist.all_reduce(total)
        return RouteCounts(*total.tolist())


def _hand_routes(routes: LayerRoutes) -> Callable[[nn.Module, Any, dict[str, Any]], None]:
    def before_layer(layer: nn.Module, arguments: Any, options: dict[str, Any]) -> None:
        given = options["packed_seq_params"].routes
        routes.target = None if given is None else given[:, layer.layer_number - 1]  # type: ignore[operator]
        routes.counting = not layer.training

    return before_layer


def _equal_rows(sorted_rows: Tensor, rows: Tensor) -> Tensor:
    """Number of rows that hold the same numbers, in any order."""
    return (sorted_rows == rows.sort(1).values).all(1).sum()
