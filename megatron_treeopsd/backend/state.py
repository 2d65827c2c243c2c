"""What of a policy's training state lives on this rank, as named pieces that know their place in the whole.

A parameter of the whole model is cut twice: by tensor parallelism into parts, and (by the distributed optimizer) each
part into flat ranges, one for each data-parallel rank.

    decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight
    part 0 ──────────────────────────────  part 1 ──────────────────────────────     tensor-parallel ranks
    weight   [0 ..................... n)   weight   [0 ..................... n)
    exp_avg  [0 ...... m)  [m ....... n)   exp_avg  [0 ...... m)  [m ....... n)      data-parallel ranks

Names are those of the name map, so that they say nothing of pipeline stages, expert placement or layer spec.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor, nn

from megatron_treeopsd.weights.families import weights_of
from megatron_treeopsd.weights.place import Held, held
from megatron_treeopsd.weights.rules import Shape, Weight

if TYPE_CHECKING:
    from megatron_treeopsd.backend.policy import Policy


@dataclass(frozen=True, slots=True)
class Piece:
    """A flat range of one part of one parameter's weight or optimizer state, in memory on this rank.

    Attributes:
        kind: "weight", "main" (float32 master of a bfloat16 weight), or the optimizer's name of the state.
        weight, part, parts, shape: which part of which weight, and the local shape of that part.
        start, stop: the range of the flattened part.
        tensor: flat view of the live memory, [stop - start].
        written_here: false where another rank holds the same and writes it.
    """

    kind: str
    weight: Weight
    part: int
    parts: int
    shape: Shape
    start: int
    stop: int
    tensor: Tensor
    written_here: bool

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.weight.key}"


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where an optimizer keeps what belongs to a parameter (or to the range of it that this rank updates)."""

    optimizer: torch.optim.Optimizer
    main: Tensor
    start: int
    stop: int
    sharded: bool


def pieces(policy: Policy) -> list[Piece]:
    """Weights and optimizer state of this rank. Optimizer state that does not exist yet is created, all zero.

    torch's optimizers create it at their first step, as zeros; a checkpoint must not depend on whether that was.
    """
    fill_state(policy.optimizer)
    slots = _slots(policy.optimizer)
    weights = weights_of(policy.hf_config)
    return [piece for item in held(policy.model, weights) for piece in _pieces_of(item, slots.get(item.parameter))]


def _pieces_of(item: Held, slot: _Slot | None) -> Iterator[Piece]:
    parameter, weight = item.parameter.detach(), item.weight
    if weight.expert is None:
        first_copy = mpu.get_data_parallel_rank(with_context_parallel=True) == 0
    else:
        first_copy = mpu.get_expert_data_parallel_rank() == 0
    parts = weight.parts(item.size)
    part = item.rank if parts > 1 else 0
    speaks = not item.copy and (parts > 1 or item.rank == 0)  # for its tensor-parallel and tied copies

    def piece(kind: str, tensor: Tensor, start: int, stop: int, sharded: bool) -> Piece:
        written = speaks and (sharded or first_copy)
        shape = tuple(parameter.shape)
        return Piece(kind, weight, part, parts, shape, start, stop, tensor.detach().view(-1), written)

    yield piece("weight", parameter, 0, parameter.numel(), False)
    if slot is None:  # the parameter is frozen, or another rank updates it
        return
    if slot.main.dtype != parameter.dtype:
        yield piece("main", slot.main, slot.start, slot.stop, slot.sharded)
    for kind, value in slot.optimizer.state[slot.main].items():
        if kind == "step":
            continue  # see `step_counts`
        if not isinstance(value, Tensor) or value.shape != slot.main.shape:
            raise TypeError(f"checkpoints do not know what {kind} of {type(slot.optimizer).__name__} is")
        yield piece(kind, value, slot.start, slot.stop, slot.sharded)


# --------------------------------------------------------------------------------------------------------- optimizer
def _parts_of(optimizer: MegatronOptimizer) -> list[Any]:
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [part for part in parts if not part.is_stub_optimizer]


def _slots(optimizer: MegatronOptimizer) -> dict[nn.Parameter, _Slot]:
    slots: dict[nn.Parameter, _Slot] = {}
    for part in _parts_of(optimizer):
        if isinstance(part, DistributedOptimizer):
            for parameter, (group, order) in part.model_param_group_index_map.items():
                owned = part._get_model_param_range_map(parameter)["param"]
                main = part.optimizer.param_groups[group]["params"][order]
                slots[parameter] = _Slot(part.optimizer, main, owned.start, owned.end, sharded=True)
        elif isinstance(part, (Float16OptimizerWithFloat16Params, FP32Optimizer)):
            mains = {id(main) for group in part.optimizer.param_groups for main in group["params"]}
            for parameter in _model_parameters(part):
                main = getattr(parameter, "main_param", parameter)
                assert id(main) in mains, "the optimizer updates a tensor that is not the parameter's master"
                slots[parameter] = _Slot(part.optimizer, main, 0, parameter.numel(), sharded=False)
        else:
            raise TypeError(f"checkpoints do not know the optimizer {type(part).__name__}")
    return slots


def _model_parameters(part: Float16OptimizerWithFloat16Params | FP32Optimizer) -> list[nn.Parameter]:
    if isinstance(part, FP32Optimizer):
        return [parameter for group in part.optimizer.param_groups for parameter in group["params"]]
    return [parameter for group in [*part.float16_groups, *part.fp32_from_fp32_groups] for parameter in group]


def fill_state(optimizer: MegatronOptimizer) -> None:
    """Give every parameter the zero state that the optimizer would create at its first step."""
    for part in _parts_of(optimizer):
        part.init_state_fn(part.optimizer, part.config)
        if isinstance(part.optimizer, torch.optim.Adam):  # torch's own; its step counter is not Megatron's concern
            for group in part.optimizer.param_groups:
                for main in group["params"]:
                    part.optimizer.state[main].setdefault("step", torch.zeros((), dtype=torch.float32))


def step_counts(optimizer: MegatronOptimizer) -> dict[str, float]:
    """Optimizer class -> the number of steps that it has counted, where it counts (Adam's bias correction does).

    torch keeps a counter for each parameter, Transformer Engine one for each group. All must agree.
    """
    counts: dict[str, set[float]] = {}
    for part in _parts_of(optimizer):
        found = [state["step"] for state in part.optimizer.state.values() if "step" in state]
        if _counts_by_group(part.optimizer):
            found += [group.get("step", 0) for group in part.optimizer.param_groups if group["params"]]
        if found:
            counts.setdefault(type(part.optimizer).__name__, set()).update(float(value) for value in found)
    for name, values in counts.items():
        if len(values) != 1:
            raise ValueError(f"{name} has counted different numbers of steps for its parameters: {sorted(values)}")
    return {name: values.pop() for name, values in counts.items()}


def set_step_counts(optimizer: MegatronOptimizer, counts: dict[str, float]) -> None:
    """Undo `step_counts`. Each parameter's counter is filled in place: torch increments them one by one."""
    for part in _parts_of(optimizer):
        name = type(part.optimizer).__name__
        for state in part.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(counts[name])
        if _counts_by_group(part.optimizer):
            for group in part.optimizer.param_groups:
                group["step"] = int(counts[name])


def _counts_by_group(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__name__ == "FusedAdam"


# ------------------------------------------------------------------------------------------------------ random states
def random_states() -> dict[str, Tensor]:
    """States of all generators that a run may draw from on this rank, as uint8 tensors."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states = {
        "torch": torch.get_rng_state(),
        "python": _to_bytes(random.getstate()),
        "numpy": _to_bytes([kind, np.asarray(keys).tolist(), position, has_gauss, gauss]),
        **{f"megatron/{name}": state for name, state in get_cuda_rng_tracker().get_states().items()},
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: state.cpu() for name, state in states.items()}


def set_random_states(states: dict[str, Tensor]) -> None:
    """Undo `random_states`."""
    torch.set_rng_state(states["torch"])
    version, internal, gauss = _from_bytes(states["python"])
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = _from_bytes(states["numpy"])
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    prefix = "megatron/"
    tracked = {name.removeprefix(prefix): state for name, state in states.items() if name.startswith(prefix)}
    get_cuda_rng_tracker().set_states(tracked)
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _to_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_bytes(tensor: Tensor) -> Any:
    return json.loads(tensor.numpy().tobytes())
