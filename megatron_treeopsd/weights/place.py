"""Which weights of the whole model one rank holds, and under which local names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from megatron_treeopsd.weights.rules import Shape, Weight, WeightsError, listing

_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+|(?<=\.linear_fc[12]\.weight)\d+$")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands in the layout.

    Attributes:
        tp, etp, ep: (rank, size) of tensor, expert tensor and expert parallelism.
        layers: global numbers of the decoder layers that the rank holds, in local order.
        first, last: whether it is the first or the last pipeline stage.
        experts: experts of one layer in the whole model.
    """

    tp: tuple[int, int] = (0, 1)
    etp: tuple[int, int] = (0, 1)
    ep: tuple[int, int] = (0, 1)
    layers: tuple[int, ...] = ()
    first: bool = True
    last: bool = True
    experts: int = 0

    @classmethod
    def of(cls, model: nn.Module) -> Place:
        """The place of this process, whose part of the model is `model` (a `GPTModel` without wrapper)."""
        from megatron.core import parallel_state as state  # here: the map itself needs no Megatron

        return cls(
            tp=(state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
            etp=(state.get_expert_tensor_parallel_rank(), state.get_expert_tensor_parallel_world_size()),
            ep=(state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()),
            layers=tuple(layer.layer_number - 1 for layer in model.decoder.layers),
            first=model.pre_process,
            last=model.post_process,
            experts=model.config.num_moe_experts or 0,
        )

    @property
    def local_experts(self) -> range:
        """Global numbers of the experts of a layer that the rank holds."""
        rank, size = self.ep
        if self.experts % size:
            raise WeightsError(f"{self.experts} experts cannot be divided over expert parallel {size}")
        count = self.experts // size
        return range(rank * count, (rank + 1) * count)

    def split(self, weight: Weight) -> tuple[int, int]:
        """(rank, size) of the parallelism that splits the weight."""
        return self.tp if weight.expert is None else self.etp

    def holds(self, weight: Weight) -> bool:
        """Whether the rank has to have the weight. (Copies of a tied embedding are extra.)"""
        if weight.layer in ("first", "last"):
            return self.first if weight.layer == "first" else self.last
        return weight.layer in self.layers and (weight.expert is None or weight.expert in self.local_experts)

    def global_name(self, local: str) -> str:
        """Local parameter name with the layer and expert numbers of the whole model.

        >>> Place(ep=(1, 2), experts=8, layers=(2, 3)).global_name("decoder.layers.1.mlp.experts.linear_fc1.weight0")
        'decoder.layers.3.mlp.experts.linear_fc1.weight4'
        """
        name = _LAYER.sub(lambda found: str(self.layers[int(found[0])]), local)
        return _EXPERT.sub(lambda found: str(self.local_experts.start + int(found[0])), name)


def bind(weights: Sequence[Weight], parameters: Mapping[str, Shape], place: Place) -> dict[str, Weight]:
    """Local parameter name -> weight, for every parameter of a rank; a pure function of names and shapes.

    Raises `WeightsError` listing parameters without a rule, weights without a parameter, and shapes that differ.
    """
    by_name = {name: weight for weight in weights for name in weight.megatron}
    bound: dict[str, Weight] = {}
    unknown, misshaped = [], []
    for local, shape in parameters.items():
        weight = by_name.get(place.global_name(local))
        if weight is None:
            unknown.append(f"{local} {tuple(shape)}")
            continue
        bound[local] = weight
        size = place.split(weight)[1]
        if not weight.fits(shape, size):
            misshaped.append(f"{local}: {tuple(shape)} in the model, {weight.shard_shape(size)} by the checkpoint")
    keys = {weight.key for weight in bound.values()}
    missing = [weight.key for weight in weights if place.holds(weight) and weight.key not in keys]
    problems = [
        ("the model has parameters that the name map does not know", unknown),
        ("the model has no parameter for these weights", missing),
        ("the model's shapes contradict the Hugging Face configuration", misshaped),
    ]
    if text := "\n".join(f"{what}:{listing(names)}" for what, names in problems if names):
        raise WeightsError(text)
    return bound


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside data-parallel and precision wrappers."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    return model


@dataclass(frozen=True, slots=True)
class Held:
    """A weight that this rank holds: its parameter and which shard of the weight that is."""

    weight: Weight
    name: str
    parameter: nn.Parameter
    rank: int
    size: int

    @property
    def copy(self) -> bool:
        """A second parameter for the same weight: the head of a tied model on the last pipeline stage."""
        return self.weight.vocabulary and self.name != self.weight.key


def held(model: nn.Module, weights: Sequence[Weight]) -> list[Held]:
    """All parameters of this rank's `model` with their weights. Raises `WeightsError` as `bind` does."""
    model = unwrapped(model)
    place = Place.of(model)
    parameters = dict(model.named_parameters())
    bound = bind(weights, {name: tuple(p.shape) for name, p in parameters.items()}, place)
    return [Held(w, name, parameters[name], *place.split(w)) for name, w in bound.items()]
