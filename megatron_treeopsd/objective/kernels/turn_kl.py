"""The residual objective of a micro-batch as one kernel: `BernoulliKL` on a GPU.

One program a turn: it sums the turn's log ratios, forms student and teacher, the loss, what is reported, and writes the
gradient's coefficient to every token of the turn. The program that finishes last adds up the losses, in the order of
the turns, so that nothing depends on the order in which programs run.

    logprobs, behaviour [E] ─► l ─► x ─┐
    credit, kappa ─► u ─► q, x* ───────┴─► pull W eta (p - q) ─► coefficient [E];  losses [N] ─► loss

Token log ratios are taken in the precision of the log-probs; everything after that is float64 (a few hundred
operations a turn), rounded to that precision when it is stored.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_treeopsd.objective.base import Report, TurnTable
from megatron_treeopsd.objective.kernels.double import expm1, log1p, softplus, tanh_half
from megatron_treeopsd.objective.segments import log_ratios

BLOCK = 512
"""Tokens that a program takes at a time."""

WARPS = 4

REPORTED = ("loss", "log_ratio", "target_log_ratio", "pull", "dropped")
"""What the kernel reports of a turn, in the order of its rows."""


def turn_kl(
    logprobs: Tensor,
    turns: TurnTable,
    *,
    teacher: str,
    ratio: str,
    radius: float,
    kappa: str | float,
    one_sided: str,
    mixture_weight: bool,
    scale: str,
    max_log_ratio: float,
) -> tuple[Tensor, Report]:
    """Loss and report of `BernoulliKL` with these fields; the table has at least one turn.

    Raises `LogProbError` naming the turn if a log-prob is infinite or not a number.
    """
    options = {
        "TEACHER": teacher,
        "RATIO": ratio,
        "RADIUS": radius,
        "KAPPA": kappa,
        "ONE_SIDED": one_sided,
        "MIXTURE_WEIGHT": mixture_weight,
        "SCALE": scale,
        "MAX_LOG_RATIO": max_log_ratio,
    }
    loss, per_turn, kl_behaviour = _TurnKL.apply(logprobs, turns, options)
    return loss, dict(zip(REPORTED, per_turn, strict=True)) | {"kl_behaviour": kl_behaviour}


class _TurnKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, turns: TurnTable, options: dict[str, Any]) -> tuple[Tensor, ...]:
        count = turns.turn_count
        dtype = torch.promote_types(logprobs.dtype, turns.behaviour.dtype)
        per_turn = logprobs.new_empty((len(REPORTED), count), dtype=dtype)
        kl_behaviour = logprobs.new_empty(logprobs.shape, dtype=dtype)
        coefficient = logprobs.new_empty(logprobs.shape)
        loss = logprobs.new_empty((), dtype=dtype)
        columns = (logprobs, turns.behaviour, turns.offsets, turns.credit, turns.weight, turns.leaves, turns.peak)
        turn_kl_kernel[(count,)](
            *(column.contiguous() for column in columns),
            coefficient,
            kl_behaviour,
            per_turn,
            loss,
            _finished_programs(logprobs.device, _stream(logprobs.device)),
            count,
            **options,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
        if not math.isfinite(float(loss)):  # one copy of eight bytes; nothing else is launched
            log_ratios(logprobs, turns)
        ctx.save_for_backward(coefficient)
        ctx.mark_non_differentiable(per_turn, kl_behaviour)
        ctx.set_materialize_grads(False)  # or zeros would be made for them
        return loss, per_turn, kl_behaviour

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        (coefficient,) = ctx.saved_tensors
        return None if grad is None else coefficient * grad, None, None


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@functools.cache
def _finished_programs(device: torch.device, stream: int) -> Tensor:
    """int32: how many programs of the running launch are done. The last one sets it back to zero.

    So it is zero whenever no kernel runs, and need not be cleared by a launch of its own. One for each stream, since
    launches of one stream never overlap.
    """
    return torch.zeros((), dtype=torch.int32, device=device)


@triton.jit
def turn_kl_kernel(
    logprobs: tl.tensor,
    behaviour: tl.tensor,
    offsets: tl.tensor,
    credit: tl.tensor,
    weight: tl.tensor,
    leaves: tl.tensor,
    peak: tl.tensor,
    coefficient: tl.tensor,
    kl_behaviour: tl.tensor,
    per_turn: tl.tensor,
    loss: tl.tensor,
    finished_programs: tl.tensor,
    count: tl.tensor,
    TEACHER: tl.constexpr,
    RATIO: tl.constexpr,
    RADIUS: tl.constexpr,
    KAPPA: tl.constexpr,
    ONE_SIDED: tl.constexpr,
    MIXTURE_WEIGHT: tl.constexpr,
    SCALE: tl.constexpr,
    MAX_LOG_RATIO: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid: (count,). per_turn [5, count] in the order of `REPORTED`; a turn with a bad log-prob makes loss NaN."""
    turn = tl.program_id(0)
    begin = tl.load(offsets + turn)
    end = tl.load(offsets + turn + 1)
    lane = tl.arange(0, BLOCK)

    sums = tl.zeros((BLOCK,), tl.float64)
    for start in range(begin, end, BLOCK):
        token = start + lane
        here = token < end
        log_ratio = tl.load(logprobs + token, mask=here, other=0.0) - tl.load(behaviour + token, mask=here, other=0.0)
        wide = log_ratio.to(tl.float64)
        sums += wide
        tl.store(kl_behaviour + token, expm1(wide) - wide, mask=here)
    total = tl.sum(sums, 0)
    finite = tl.abs(total) < float("inf")

    # x = (beta / L) sum l, rounded to the precision in which it is reported
    length = (end - begin).to(tl.float64)
    share = tl.full((), 1.0, tl.float64)
    if RATIO == "mean":
        share = share / length
    elif RATIO == "sqrt":
        share = share / tl.sqrt(length)
    x = (total * share).to(per_turn.dtype.element_ty).to(tl.float64)

    # u = clip(C / kappa, -1, 1); 0 where kappa is 0
    if KAPPA == "sqrt_leaves":
        kappa = tl.sqrt((tl.load(leaves + turn) - 1).to(tl.float64))
    elif KAPPA == "max":
        kappa = tl.load(peak + turn).to(tl.float64)
    else:
        kappa = tl.full((), KAPPA, tl.float64)
    u = tl.where(kappa > 0.0, tl.load(credit + turn).to(tl.float64) / tl.where(kappa > 0.0, kappa, 1.0), 0.0)
    u = tl.where(u > 1.0, 1.0, tl.where(u < -1.0, -1.0, u))

    # the teacher: offset = q - 1/2, target = logit(q)
    if TEACHER == "affine_prob":
        offset = RADIUS * u
        target = log1p(4 * RADIUS * u / (1.0 - 2 * RADIUS * u))
    elif TEACHER == "affine_odds":
        offset = 4 * RADIUS * u / (2.0 * (2.0 + 4 * RADIUS * u))
        target = log1p(4 * RADIUS * u)
    else:
        offset = tanh_half(4 * RADIUS * u) / 2.0
        target = 4 * RADIUS * u

    scale = tl.load(weight + turn).to(tl.float64)
    if SCALE == "policy_gradient":
        scale = scale * kappa / RADIUS
    if MIXTURE_WEIGHT:
        scale = scale * (1.0 + 2 * RADIUS * u)
    pull = scale * (tanh_half(x) / 2.0 - offset)

    dropped = tl.abs(x) > MAX_LOG_RATIO
    idle = dropped
    if ONE_SIDED == "both":
        idle = dropped | (pull * u > 0.0)
    elif ONE_SIDED == "negative":
        idle = dropped | ((pull * u > 0.0) & (u < 0.0))

    divergence = softplus(x) - softplus(target) - (tanh_half(target) / 2.0 + 0.5) * (x - target)
    turn_loss = tl.where(idle, 0.0, scale * divergence)
    turn_loss = tl.where(finite, turn_loss, float("nan"))
    tl.store(per_turn + turn, turn_loss)
    tl.store(per_turn + count + turn, x)
    tl.store(per_turn + 2 * count + turn, target)
    tl.store(per_turn + 3 * count + turn, pull)
    tl.store(per_turn + 4 * count + turn, tl.where(dropped, 1.0, 0.0))

    slope = tl.where(idle, 0.0, pull) * share
    for start in range(begin, end, BLOCK):
        token = start + lane
        tl.store(coefficient + token, tl.zeros((BLOCK,), tl.float64) + slope, mask=token < end)

    # The losses of all turns are visible to the program that counts itself last.
    tl.debug_barrier()
    finished = tl.atomic_add(finished_programs, 1, sem="acq_rel", scope="gpu")
    if finished == count - 1:
        losses = tl.zeros((BLOCK,), tl.float64)
        for earlier in range(0, count, BLOCK):
            each = earlier + lane
            losses += tl.load(per_turn + each, mask=each < count, other=0.0, cache_modifier=".cg").to(tl.float64)
        tl.store(loss, tl.sum(losses, 0))
        tl.store(finished_programs, 0)
