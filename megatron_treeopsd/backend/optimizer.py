"""Gradient buffers, optimizer and learning-rate schedule, from the recipe's `optimizer` section."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn

from megatron_treeopsd.backend.muon import Muon, qkv_split
from megatron_treeopsd.config import Layout, Optimizer, RecipeError

MUON_WEIGHTS = ("self_attention.linear_qkv.weight", "self_attention.linear_proj.weight")


def wrap_ddp(model: Any, layout: Layout) -> DistributedDataParallel:
    """Megatron's gradient buffers around `model`: gradients are summed over data-parallel ranks, in float32."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=model.config.params_dtype == torch.bfloat16,
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        check_for_nan_in_grad=False,  # `Policy.update` checks, and can say which turns it came from
    )
    return DistributedDataParallel(model.config, config, model)


def build_optimizer(section: Optimizer, layout: Layout, ddp: DistributedDataParallel) -> ChainedOptimizer:
    """AdamW over all parameters, or Muon over the attention projections and AdamW over the rest.

    Raises `RecipeError` where Muon would not see whole matrices.
    """
    model = ddp.module
    bf16 = model.config.params_dtype == torch.bfloat16
    if section.min_lr > section.lr:
        raise RecipeError(f"optimizer.min_lr={section.min_lr} is above optimizer.lr={section.lr}")
    config = OptimizerConfig(
        optimizer="adam",
        lr=section.lr,
        min_lr=section.min_lr,
        weight_decay=section.weight_decay,
        adam_beta1=section.beta1,
        adam_beta2=section.beta2,
        adam_eps=section.eps,
        clip_grad=section.clip_grad,
        use_distributed_optimizer=layout.distributed_optimizer,
        bf16=bf16,
        params_dtype=model.config.params_dtype,
    )
    matrices: list[nn.Parameter] = []
    if section.muon_lr is not None:
        check_muon(section.muon_lr, layout, bf16=bf16)
        matrices = [p for name, p in model.named_parameters() if name.endswith(MUON_WEIGHTS)]
    for matrix in matrices:  # Megatron's AdamW takes what requires a gradient
        matrix.requires_grad_(False)
    adam = get_megatron_optimizer(config, [ddp], use_gloo_process_groups=False)
    for matrix in matrices:
        matrix.requires_grad_(True)
    if not matrices:
        return adam
    return ChainedOptimizer([*adam.chained_optimizers, _muon(section, config, model, adam, matrices)])


def check_muon(lr: float, layout: Layout, *, bf16: bool) -> None:
    obstacles = {
        f"layout.tp={layout.tp} cuts the matrices that Muon orthogonalises": layout.tp > 1,
        "layout.distributed_optimizer=true scatters them over ranks": layout.distributed_optimizer,
        "model.dtype=bfloat16 keeps its master weights elsewhere": bf16,
    }
    for reason, present in obstacles.items():
        if present:
            raise RecipeError(f"optimizer.muon_lr={lr}: {reason}; change that or set optimizer.muon_lr=null (AdamW)")


def _muon(
    section: Optimizer, config: OptimizerConfig, model: Any, adam: ChainedOptimizer, matrices: list[nn.Parameter]
) -> FP32Optimizer:
    assert section.muon_lr is not None
    group = {
        "params": matrices,
        "max_lr": section.muon_lr,
        "min_lr": section.min_lr * section.muon_lr / section.lr,
        "wd_mult": 1.0,
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        "default_config": False,
    }
    split = qkv_split(groups=model.config.num_query_groups, dim=model.config.kv_channels)
    fused = {p: split for name, p in model.named_parameters() if name.endswith(MUON_WEIGHTS[0])}
    muon = Muon([group], split=fused, lr=section.muon_lr, weight_decay=section.weight_decay)

    def initialize_state(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
        for matrix in matrices:
            optimizer.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))

    wrapped = FP32Optimizer(muon, config, initialize_state)
    dense = adam.chained_optimizers[0]
    for name in ("grad_stats_parallel_group", "tp_group", "expert_tp_group"):
        setattr(wrapped, name, getattr(dense, name))
    return wrapped


def build_scheduler(
    section: Optimizer, optimizer: ChainedOptimizer, *, total_steps: int | None
) -> OptimizerParamScheduler:
    """Learning rate over optimizer steps: linear warm-up to `lr`, then constant, or linear or cosine to `min_lr`.

    Needed for a constant rate too: it is what keeps weight decay away from norm weights. Call `step(1)` before each
    optimizer step, so that the first one is at lr / warmup_steps and the last one at `min_lr`. Raises `RecipeError` if
    the schedule needs an end (`total_steps`) that is not known, or one before the end of the warm-up.
    """
    decays = section.schedule != "constant"
    if decays and total_steps is None:
        raise RecipeError(
            f"optimizer.schedule={section.schedule} needs to know the number of steps: set steps=N, or "
            "optimizer.schedule=constant for a run that is bounded by its budget only"
        )
    if decays and total_steps is not None and section.warmup_steps >= total_steps:
        raise RecipeError(
            f"optimizer.warmup_steps={section.warmup_steps} leaves nothing of the run's {total_steps} optimizer steps"
        )
    end = total_steps if decays and total_steps is not None else section.warmup_steps + 1
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=section.lr,
        min_lr=section.min_lr,
        lr_warmup_steps=section.warmup_steps,
        lr_decay_steps=end,
        lr_decay_style=section.schedule,
        start_wd=section.weight_decay,
        end_wd=section.weight_decay,
        wd_incr_steps=end,
        wd_incr_style="constant",
    )
