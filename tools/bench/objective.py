"""What the loss costs: passes over the logits, logits held at once, launches, registers. Counted, not timed.

    python tools/bench/objective.py [--rows N] [--vocabulary N] [--dtype bfloat16] [--json]

Four ways from hidden states to a gradient on the same tokens, forward and backward:

    ours, kernels   `token_logprobs` and `BernoulliKL` as on a GPU; the kernels run in Triton's interpreter
    ours, torch     the same functions as on a CPU
    eager           all logits, `cross_entropy`, and the objective in torch operations
    liger           liger-kernel's chunked GRPO loss: a clipped loss on the same log-probs and behaviour log-probs, so
                    another objective; it has none of turns (left out if liger-kernel is not installed)

A pass is one read or one write of every logit outside of matrix products, which all arms have alike. Registers and
spills are what the assembler says for sm_90 (tools/bench/kernel_resources.py).

With --json the last line is one object: logit_passes, peak_chunks (logits held at once, in chunks of the model's type),
launches (of the turn objective, forward and backward) and spills (bytes, all kernels) of our kernels; `arms` and
`kernels` hold the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

# Read when Triton is first imported.
os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from traffic import Traffic, watch

from megatron_treeopsd.backend import logprob
from megatron_treeopsd.backend.logprob import token_logprobs
from megatron_treeopsd.objective import BernoulliKL, TurnTable

HERE = Path(__file__).resolve().parent
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 2e-5, torch.float64: 1e-10}
"""Of gradients of two arms, relative to their size."""
LIGER_VOCABULARY_CHUNK = 4096
"""Columns of the blocks of logits that liger-kernel works on."""

Arm = Callable[["Problem"], None]
"""Computes the loss of a problem and leaves the gradients in its hidden states and weight."""


@dataclass(frozen=True, slots=True)
class Problem:
    """E trained tokens in turns of different lengths: hidden [E, H], weight [V, H], labels [E], the turn table."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    turns: TurnTable
    objective: BernoulliKL

    @property
    def vocabulary(self) -> int:
        return self.weight.shape[0]


def make_problem(rows: int, vocabulary: int, width: int, turn_count: int, dtype: torch.dtype) -> Problem:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocabulary, width, generator=generator) / width**0.5
    hidden = 3 * torch.randn(rows, width, generator=generator)
    labels = torch.randint(0, vocabulary, (rows,), generator=generator)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    current = (hidden.double() @ weight.double().t()).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    cuts = torch.randperm(rows - 1, generator=generator)[: turn_count - 1].sort().values + 1
    real = torch.promote_types(dtype, torch.float32)
    turns = TurnTable(
        offsets=torch.cat((torch.tensor([0]), cuts, torch.tensor([rows]))),
        behaviour=(current + 0.02 * torch.randn(rows, generator=generator)).to(real),
        credit=torch.randn(turn_count, generator=generator).to(real),
        weight=torch.full((turn_count,), 1 / turn_count).to(real),
        leaves=torch.full((turn_count,), 12),
        peak=torch.full((turn_count,), 3.0).to(real),
        sequence=torch.zeros(turn_count, dtype=torch.int64),
    )
    return Problem(hidden.requires_grad_(), weight.requires_grad_(), labels, turns, BernoulliKL())


@contextlib.contextmanager
def kernels(used: bool) -> Iterator[None]:
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1" if used else "0"}):
        yield


def ours(problem: Problem) -> None:
    logprobs, _ = token_logprobs(problem.hidden, problem.weight, problem.labels)
    loss, _ = problem.objective(logprobs, problem.turns)
    loss.backward(torch.ones_like(loss))


def ours_by_kernels(problem: Problem) -> None:
    with kernels(True):
        ours(problem)


def ours_by_torch(problem: Problem) -> None:
    with kernels(False):
        ours(problem)


def eager(problem: Problem) -> None:
    real = problem.turns.behaviour.dtype
    logprobs = -cross_entropy((problem.hidden @ problem.weight.t()).to(real), problem.labels, reduction="none")
    loss, _ = problem.objective.reference(logprobs, problem.turns)
    loss.backward(torch.ones_like(loss))


def liger(problem: Problem) -> None:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, loss_type="grpo")
    rows = problem.labels.numel()
    value, _ = loss(
        problem.hidden[None],
        problem.weight,
        problem.labels[None],
        torch.ones(1, rows),
        problem.turns.credit[:1],
        old_per_token_logps=problem.turns.behaviour[None],
    )
    value.backward(torch.ones_like(value))


def measure(arm: Arm, problem: Problem) -> Traffic:
    problem.hidden.grad = problem.weight.grad = None
    with watch(problem.vocabulary, LIGER_VOCABULARY_CHUNK) as traffic:
        arm(problem)
    return traffic


def objective_launches(problem: Problem, *, by_kernels: bool) -> Traffic:
    """The turn objective alone, from log-probs to their gradient."""
    leaf = (problem.turns.behaviour + 0.01).requires_grad_()
    one = torch.ones((), dtype=leaf.dtype)
    with kernels(by_kernels):
        problem.objective(leaf, problem.turns)  # whatever is set up once
        with watch(problem.vocabulary) as traffic:
            loss, _ = problem.objective(leaf, problem.turns)
            torch.autograd.grad(loss, leaf, one)
    return traffic


def kernel_resources() -> list[dict[str, Any]]:
    """In a process of its own, where Triton compiles instead of interpreting."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(HERE / "kernel_resources.py"), "--json"], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"tools/bench/kernel_resources.py failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])["kernels"]


def require_same_gradient(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    """A count of something wrong is worth nothing."""
    for mine, other in zip(ours, theirs, strict=True):
        difference = float((mine.double() - other.double()).norm() / other.double().norm())
        if not difference < TOLERANCE[dtype]:
            raise RuntimeError(f"the arms disagree: gradients differ by {difference:.1e} of their size")


def find(problem: Problem, chunk_rows: int) -> dict[str, Any]:
    arms: dict[str, Arm] = {"ours, kernels": ours_by_kernels, "ours, torch": ours_by_torch, "eager": eager}
    if importlib.util.find_spec("liger_kernel"):
        arms["liger"] = liger
    every_logit = problem.labels.numel() * problem.vocabulary
    chunk = chunk_rows * problem.vocabulary * problem.hidden.element_size()
    found: dict[str, dict[str, Any]] = {}
    gradients: dict[str, tuple[Tensor, Tensor]] = {}
    with mock.patch.object(logprob, "CHUNK_ELEMENTS", chunk_rows * problem.vocabulary):
        for name, arm in arms.items():
            traffic = measure(arm, problem)
            assert problem.hidden.grad is not None
            assert problem.weight.grad is not None
            gradients[name] = problem.hidden.grad, problem.weight.grad
            found[name] = {
                "passes": round(traffic.accesses / every_logit, 3),
                "reads": round(traffic.reads / every_logit, 3),
                "writes": round(traffic.writes / every_logit, 3),
                "peak_chunks": round(traffic.peak_logit_bytes / chunk, 3),
                "peak_logit_bytes": traffic.peak_logit_bytes,
                "launches_in_all": traffic.launches,
            }
    for name in ("ours, torch", "eager"):
        require_same_gradient(gradients["ours, kernels"], gradients[name], problem.hidden.dtype)
    for name, by_kernels in (("ours, kernels", True), ("ours, torch", False)):
        traffic = objective_launches(problem, by_kernels=by_kernels)
        found[name] |= {"launches": traffic.launches, "copies_to_host": traffic.copies_to_host}
    found["eager"] |= {name: found["ours, torch"][name] for name in ("launches", "copies_to_host")}
    resources = kernel_resources()
    mine = found["ours, kernels"]
    return {
        "logit_passes": mine["passes"],
        "peak_chunks": mine["peak_chunks"],
        "launches": mine["launches"],
        "spills": sum(kernel["spill_bytes"] for kernel in resources),
        "registers": max(kernel["registers"] for kernel in resources),
        "arms": found,
        "kernels": resources,
        "rows": problem.labels.numel(),
        "vocabulary": problem.vocabulary,
        "turns": problem.turns.turn_count,
        "chunk_rows": chunk_rows,
        "dtype": str(problem.hidden.dtype).removeprefix("torch."),
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("torch", "triton", *(["liger_kernel"] if "liger" in found else []))
        },
    }


def table(found: dict[str, Any]) -> str:
    arms = found["arms"]
    lines = [
        f"{found['rows']} tokens in {found['turns']} turns, vocabulary {found['vocabulary']}, {found['dtype']}, "
        f"chunks of {found['chunk_rows']} rows",
        f"{'':44}" + "".join(f"{name:>15}" for name in arms),
    ]
    for title, key in (
        ("passes over the logits", "passes"),
        ("    read", "reads"),
        ("    written", "writes"),
        ("logits held at once, in chunks", "peak_chunks"),
        ("    in bytes", "peak_logit_bytes"),
        ("launches of the turn objective", "launches"),
        ("    values that the host waits for", "copies_to_host"),
        ("launches in all, projection and copies included", "launches_in_all"),
    ):
        lines.append(f"{title:44}" + "".join(f"{arm.get(key, '-'):>15}" for arm in arms.values()))
    if "liger" not in arms:
        lines.append("liger: liger-kernel is not installed (extra bench)")
    lines += ["", f"{'compiled for sm_90':44}{'registers':>15}{'spilled bytes':>15}{'access bits':>15}"]
    for kernel in found["kernels"]:
        lines.append(
            f"{kernel['label']:44}{kernel['registers']:>15}{kernel['spill_bytes']:>15}{kernel['access_bits']:>15}"
        )
    lines.append("versions: " + ", ".join(f"{name} {value}" for name, value in found["versions"].items()))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=96, help="trained tokens")
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--width", type=int, default=64, help="size of a hidden state")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--chunk-rows", type=int, default=32, help="rows of a chunk of logits")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of hidden states, weight and logits")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line instead of a table")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    problem = make_problem(options.rows, options.vocabulary, options.width, options.turns, DTYPES[options.dtype])
    with np.errstate(all="ignore"):  # the interpreter computes both sides of a choice
        found = find(problem, options.chunk_rows)
    print(json.dumps(found) if options.json else table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
