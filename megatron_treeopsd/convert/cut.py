"""How a layout cuts a model: which rank's file each part of a weight belongs into."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_treeopsd.weights.rules import Weight, WeightsError


@dataclass(frozen=True, slots=True)
class Cut:
    """A layout of the smallest world that has it. Ranks are numbered as Megatron does: tensor parallel innermost,
    then (for experts) expert parallel, pipeline stages outermost.

    Attributes:
        tp, ep, etp, pp: sizes of tensor, expert, expert tensor and pipeline parallelism.
        layers, experts: of the model; experts of one layer.
    """

    tp: int
    ep: int
    etp: int
    pp: int
    layers: int
    experts: int

    @classmethod
    def of(cls, weights: Sequence[Weight], *, tp: int = 1, ep: int = 1, etp: int = 1, pp: int = 1) -> Cut:
        """The cut of a model. Raises `WeightsError` if the layout does not divide it."""
        layers = 1 + max((weight.layer for weight in weights if isinstance(weight.layer, int)), default=-1)
        experts = 1 + max((weight.expert for weight in weights if weight.expert is not None), default=-1)
        for name, size in (("tp", tp), ("ep", ep), ("etp", etp), ("pp", pp)):
            if size < 1:
                raise WeightsError(f"{name}={size}: a parallel size is at least 1")
            if name in ("ep", "etp") and size > 1 and not experts:
                raise WeightsError(f"{name}={size}: the model has no experts to divide; leave {name} at 1")
        for what, count, name, size in (("layers", layers, "pp", pp), ("experts", experts, "ep", ep)):
            if count % size:
                raise WeightsError(f"{name}={size} does not divide the model's {count} {what}")
        cut = cls(tp, ep, etp, pp, layers, experts)
        for weight in weights:
            weight.shard_shape(cut.size(weight))
        return cut

    @property
    def ranks_per_stage(self) -> int:
        return math.lcm(self.tp, self.etp * self.ep)

    @property
    def ranks(self) -> int:
        return self.pp * self.ranks_per_stage

    def size(self, weight: Weight) -> int:
        """Into how many parts tensor parallelism cuts the weight, if it is cut at all."""
        return self.tp if weight.expert is None else self.etp

    def rank(self, weight: Weight, part: int) -> int:
        """The first rank that holds a part of a weight."""
        if isinstance(weight.layer, int):
            stage = weight.layer * self.pp // self.layers
        else:
            stage = 0 if weight.layer == "first" else self.pp - 1
        within = part
        if weight.expert is not None:
            within += weight.expert * self.ep // self.experts * self.etp
        return stage * self.ranks_per_stage + within

    def __str__(self) -> str:
        return f"tp={self.tp} ep={self.ep} etp={self.etp} pp={self.pp} ({self.ranks} ranks)"
