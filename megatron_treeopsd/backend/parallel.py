"""Process groups: who this process is in the tensor, pipeline, expert and data parallel layout."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel

from megatron_treeopsd.config import Layout, RecipeError


@dataclass(frozen=True, slots=True)
class ParallelState:
    """One process's place in the layout. world = dp_size * cp * tp * pp; experts are spread over dp_size * cp ranks.

    Attributes:
        rank, world: of all processes.
        dp_rank, dp_size: which share of the micro-batches this process works on, of how many.
        tp, tp_rank: tensor parallel; ranks of one tensor-parallel group hold slices of the same layers.
        cp, cp_rank: context parallel; ranks of one group share the rows of a micro-batch.
        pp, pp_rank: pipeline parallel; ranks of one pipeline hold consecutive layers.
        ep, ep_rank: expert parallel; ranks of one group hold different experts and exchange tokens.
        etp: tensor parallel inside an expert.
        device: where this process computes.
    """

    rank: int
    world: int
    dp_rank: int
    dp_size: int
    tp: int
    tp_rank: int
    cp: int
    cp_rank: int
    pp: int
    pp_rank: int
    ep: int
    ep_rank: int
    etp: int
    device: torch.device

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1


def all_gather_objects(item: Any) -> list[Any]:
    """What every process of the run passed, by rank. Collective over all processes; the items are pickled."""
    return _gather(item, None)


def gather_over_data(item: Any) -> list[Any]:
    """What the processes of this data-parallel group passed, by `dp_rank`. Collective over that group."""
    return _gather(item, mpu.get_data_parallel_group())


def _gather(item: Any, group: dist.ProcessGroup | None) -> list[Any]:
    size = dist.get_world_size(group)
    if size == 1:
        return [item]
    items: list[Any] = [None] * size
    dist.all_gather_object(items, item, group=group)
    return items


def check_world(layout: Layout, world: int) -> None:
    """Raise `RecipeError`, with every factor and the world size, unless the layout divides the world."""
    for name, factors in (
        ("attention and dense layers", {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp}),
        ("experts", {"etp": layout.etp, "ep": layout.ep, "pp": layout.pp}),
    ):
        product = 1
        for factor in factors.values():
            product *= factor
        if world % product:
            shown = " * ".join(f"{key}={value}" for key, value in factors.items())
            raise RecipeError(
                f"layout: {shown} = {product} processes for {name} do not divide the world of {world} "
                f"(tp={layout.tp} cp={layout.cp} pp={layout.pp} ep={layout.ep} etp={layout.etp}); "
                f"start a multiple of {product} processes or change the layout"
            )


def initialize(layout: Layout, seed: int) -> ParallelState:
    """Join the run: process group, Megatron's model-parallel groups, threads, random seeds.

    Under `torchrun` its environment variables say who this process is; without it the process is a world of its own
    and opens no port. NCCL where CUDA is there, else gloo.

    Raises `RecipeError` if the layout does not divide the world.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    check_world(layout, world)
    torch.set_num_threads(layout.threads)
    device = torch.device("cpu")
    backend = "gloo"
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=layout.timeout_seconds)
    if "RANK" in os.environ:
        _join(backend, timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return divide(layout, seed, device)


def divide(layout: Layout, seed: int, device: torch.device) -> ParallelState:
    """Form Megatron's groups among the processes that have joined, and seed their random numbers."""
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=layout.timeout_seconds / 60,
        create_gloo_process_groups=False,
    )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return ParallelState(
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        dp_rank=mpu.get_data_parallel_rank(),
        dp_size=mpu.get_data_parallel_world_size(),
        tp=layout.tp,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        cp=layout.cp,
        cp_rank=mpu.get_context_parallel_rank(),
        pp=layout.pp,
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        ep=layout.ep,
        ep_rank=mpu.get_expert_model_parallel_rank(),
        etp=layout.etp,
        device=device,
    )


def _join(backend: str, timeout: timedelta) -> None:
    """Meet the other processes where the launcher says. Raises `RecipeError` if that place cannot be reached."""
    try:
        dist.init_process_group(backend, timeout=timeout)
    except dist.DistNetworkError as error:
        where = f"MASTER_ADDR={os.environ.get('MASTER_ADDR')} MASTER_PORT={os.environ.get('MASTER_PORT')}"
        reason = str(error).splitlines()[0]
        raise RecipeError(
            f"the processes of this run cannot meet at {where}: {reason}. If the port is taken, choose another one "
            "(launch/local.sh lets the system pick it)"
        ) from None


def shutdown() -> None:
    """Leave the run. Safe to call when nothing was initialized."""
    if mpu.is_initialized():
        mpu.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
