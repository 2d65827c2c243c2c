"""`Policy`: the model under training. Log-probs and updates over micro-batches of packed trees, any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_treeopsd import weights
from megatron_treeopsd.backend import parallel as process_groups
from megatron_treeopsd.backend.model import PolicyModel, build_model, read_config
from megatron_treeopsd.backend.optimizer import build_optimizer, build_scheduler, wrap_ddp
from megatron_treeopsd.backend.parallel import ParallelState
from megatron_treeopsd.backend.replay import Routing
from megatron_treeopsd.batch.packed import PackedTrees
from megatron_treeopsd.config import Mismatch, Recipe, RecipeError
from megatron_treeopsd.objective.base import Objective, Report
from megatron_treeopsd.objective.segments import LogProbError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_NAMED_TURNS = 8


class NonFiniteError(FloatingPointError):
    """Loss or gradient is not a number; the message names the turns it came from. The policy is unusable now."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one optimizer step reports, equal on all ranks but for `reports`.

    Attributes:
        loss: of the whole mini-batch, summed over micro-batches and data-parallel ranks.
        grad_norm: of the whole model, before clipping.
        lr: learning rate of the step (that of AdamW where Muon trains the projections).
        reports: what the objective reported for this rank's micro-batches, on the CPU. Ranks that computed the same
            numbers as another one (tensor, context and pipeline parallel) have none, so gathering over all ranks gives
            each report once.
    """

    loss: float
    grad_norm: float
    lr: float
    reports: list[Report]


class Policy:
    """The policy of a recipe, spread over the run's processes. All methods are collective over all of them.

    Attributes:
        model: this rank's `PolicyModel`; `ddp` wraps it with gradient buffers.
        optimizer, scheduler: Megatron's; None steps have been taken at the start.
        temperature: that of sampling; log-probs are of the distribution that turns were sampled from.
        hf_config: the checkpoint's Hugging Face config.
        routing: router replay; None if routes are ignored.
        parallel: this rank's place in the layout.
    """

    def __init__(self, recipe: Recipe, parallel: ParallelState, *, total_steps: int | None = None) -> None:
        """Build the model and read its weights from `recipe.model.checkpoint`.

        `total_steps` is the number of optimizer steps of the run, for schedules that decay. Raises `RecipeError` if the
        checkpoint's architecture, or its split by `recipe.layout`, is not supported.
        """
        folder = recipe.model.checkpoint
        self.parallel = parallel
        self.temperature = recipe.rollout.temperature
        self.hf_config = read_config(folder)
        self.model = build_model(
            self.hf_config,
            recipe.layout,
            parallel,
            dtype=DTYPES[recipe.model.dtype],
            recompute=recipe.model.recompute,
        )
        weights.load_pretrained(self.model, folder, self.hf_config)
        self.routing = _routing(self.model, recipe.mismatch)
        self.ddp = wrap_ddp(self.model, recipe.layout)
        self.optimizer = build_optimizer(recipe.optimizer, recipe.layout, self.ddp)
        self.scheduler = build_scheduler(recipe.optimizer, self.optimizer, total_steps=total_steps)
        self.model.config.no_sync_func = self.ddp.no_sync
        self.model.config.finalize_model_grads_func = _sum_gradients

    def log_probs(self, micro_batches: Sequence[PackedTrees]) -> list[Tensor]:
        """Log-probs of the trained tokens of each micro-batch: float32 [E] on the CPU, on every rank of the model.

        No gradient, nothing is updated.
        """
        if not micro_batches:
            return []
        self.model.eval()
        with torch.no_grad():
            outputs = self._run(
                micro_batches, lambda _, logprobs: (logprobs.sum(), logprobs), self.temperature, train=False
            )
        sizes = [packed.edge_labels.numel() for packed in micro_batches]
        joined = torch.cat(outputs) if outputs else torch.empty(sum(sizes), device=self.parallel.device)
        if self.parallel.pp > 1:
            last = mpu.get_pipeline_model_parallel_last_rank()
            dist.broadcast(joined, last, group=mpu.get_pipeline_model_parallel_group())
        return list(joined.cpu().split(sizes))

    def update(self, micro_batches: Sequence[PackedTrees], objective: Objective) -> UpdateResult:
        """One optimizer step on a mini-batch: the plain sum of the objective over all micro-batches and ranks.

        Every data-parallel rank passes its own micro-batches, equally many of them; one may be without trained
        tokens. Raises `NonFiniteError`, on all ranks, naming the turns, if loss or gradient is not finite.
        """
        if not micro_batches:
            raise ValueError("update needs at least one micro-batch on every rank; pack an empty one")
        self.model.train()
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        traces: list[_Trace] = []

        def loss_of(packed: PackedTrees, logprobs: Tensor) -> tuple[Tensor, _Trace]:
            if packed.importance is not None:  # the values stay, their gradients are weighed
                logprobs = logprobs.detach() + packed.importance * (logprobs - logprobs.detach())
            try:
                loss, report = objective(logprobs, packed.turns)
            except LogProbError as error:
                raise NonFiniteError(f"{packed.name(error.turn)}: {error.problem}") from error
            trace = _Trace(packed, logprobs.detach(), loss.detach(), report)
            if logprobs.requires_grad:
                logprobs.register_hook(trace.keep_gradient)
            traces.append(trace)
            return loss, trace

        # What is compared with the behaviour policy is what was sampled from; a plain likelihood has no temperature.
        self._run(micro_batches, loss_of, self.temperature if objective.uses_behaviour else 1.0, train=True)
        loss = self._total_loss(traces)
        if not math.isfinite(loss):
            raise self._non_finite(f"the loss is {loss}", traces)
        self.scheduler.step(1)
        _, grad_norm, _ = self.optimizer.step()
        if not math.isfinite(grad_norm):
            raise self._non_finite(f"the gradient norm is {grad_norm}", traces)
        return UpdateResult(
            loss=loss,
            grad_norm=float(grad_norm),
            lr=float(self.optimizer.param_groups[0]["lr"]),
            reports=[_to_cpu(trace.report) for trace in traces] if self._speaks_for_its_model else [],
        )

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The current weights as whole tensors under Hugging Face names, in a fixed order, on every rank."""
        return weights.stream(self.model, self.hf_config)

    @cached_property
    def parameter_count(self) -> int:
        """Parameters of the whole policy, tied ones counted once."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.hf_config)
        return sum(parameter.numel() for parameter in model.parameters())

    @property
    def attention(self) -> str:
        """The attention kernel, and why it was chosen."""
        return self.model.kernel.name

    @property
    def _speaks_for_its_model(self) -> bool:
        return self.parallel.is_last_stage and self.parallel.tp_rank == self.parallel.cp_rank == 0

    def _run(
        self,
        micro_batches: Sequence[PackedTrees],
        finish: Callable[[PackedTrees, Tensor], tuple[Tensor, Any]],
        temperature: float,
        *,
        train: bool,
    ) -> list[Any]:
        """Megatron's schedule over the micro-batches. `finish` turns log-probs into a loss and something to keep.

        Returns what was kept, on the last pipeline stage; nothing elsewhere.
        """

        def forward_step(batches: Iterator[PackedTrees], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            packed = next(batches).to(self.parallel.device)
            return model(packed, temperature), partial(loss_function, packed)

        def loss_function(packed: PackedTrees, logprobs: Tensor) -> tuple[Tensor, Tensor, Any]:
            loss, kept = finish(packed, logprobs)
            # Three values tell Megatron not to divide; the token count that it would divide by later is not used.
            return loss, torch.zeros((), dtype=torch.int), kept

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=[self.ddp],
            num_microbatches=len(micro_batches),
            seq_length=1,  # unused: pipeline stages exchange the shapes of each micro-batch
            micro_batch_size=1,
            forward_only=not train,
        )

    def _total_loss(self, traces: Sequence[_Trace]) -> float:
        mine = sum((trace.loss.double() for trace in traces), torch.zeros((), dtype=torch.float64))
        total = (mine if self._speaks_for_its_model else torch.zeros_like(mine)).to(self.parallel.device)
        dist.all_reduce(total)
        return float(total)

    def _non_finite(self, what: str, traces: Sequence[_Trace]) -> NonFiniteError:
        local = [turn for trace in traces for turn in trace.offending_turns()] if self._speaks_for_its_model else []
        turns = [turn for part in process_groups.all_gather_objects(local) for turn in part]
        named = ", ".join(turns[:MAX_NAMED_TURNS])
        more = f" and {len(turns) - MAX_NAMED_TURNS} more" if len(turns) > MAX_NAMED_TURNS else ""
        source = f"; turns whose log-probs or gradients are not finite: {named}{more}" if turns else ""
        return NonFiniteError(f"{what} in this mini-batch{source}. Lower the learning rate, or look at these turns.")


class _Trace:
    """What is kept of one micro-batch to report it, and to find the turns at fault if something is not finite."""

    def __init__(self, packed: PackedTrees, logprobs: Tensor, loss: Tensor, report: Report) -> None:
        self.packed = packed
        self.logprobs = logprobs
        self.loss = loss
        self.report = report
        self.gradient: Tensor | None = None

    def keep_gradient(self, gradient: Tensor) -> None:
        self.gradient = gradient.detach()

    def offending_turns(self) -> list[str]:
        bad = ~self.logprobs.isfinite()
        if self.gradient is not None:
            bad |= ~self.gradient.isfinite()
        turns = self.packed.turns.turn_of_token[bad].unique().tolist()
        return [self.packed.name(turn) for turn in turns]


def _routing(model: PolicyModel, section: Mismatch) -> Routing | None:
    if section.routes == "ignore":
        return None
    if model.config.num_moe_experts is None:
        raise RecipeError(f"mismatch.routes={section.routes}: this model has no experts; set mismatch.routes=ignore")
    return Routing(model, replay=section.routes == "replay")


def _sum_gradients(model: list[Any], _: Tensor | None, **options: Any) -> None:
    """Megatron's gradient reduction without its division by a token count."""
    finalize_model_grads(model, None, **options)


def _to_cpu(report: Report) -> Report:
    return {name: values.detach().cpu() for name, values in report.items()}
