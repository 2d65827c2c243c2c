"""The kernels and tree attention on a GPU: exact against float64, and how close to what this GPU can do.

    tools/bench/gpu.sh [--out FILE] [--json]            on an H100 or H200, less than 8 minutes
    tools/bench/gpu.sh --device cpu --interpret         dry run of every line, on tiny sizes; its times mean nothing

Rates are set beside ceilings measured in the same run: bytes/s of a copy, FLOP/s of a square matrix product. Times are
medians of repetitions between CUDA events, each after the L2 cache was overwritten. Exits with 1 if any check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

if "--interpret" in sys.argv:  # read when Triton is first imported
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from gpu_attention import Shape, TreeCase
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron_treeopsd.backend import logprob
from megatron_treeopsd.backend.logprob import token_logprobs
from megatron_treeopsd.objective import BernoulliKL, LogProbError, TurnTable
from megatron_treeopsd.objective.kernels import choose
from megatron_treeopsd.objective.kernels.token_logprobs import combine_ranks, row_statistics, write_gradient

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a run: on a GPU those of a large model, in a dry run as small as they can be."""

    copy_bytes: int
    square: int
    exact_rows: int
    rows: int
    vocabulary: int
    hidden: int
    projected_rows: int
    chunk_elements: tuple[int, ...]
    turns: int
    turn_tokens: int
    attention: Shape
    repetitions: int


LARGE = Sizes(
    copy_bytes=2 * GIB,
    square=8192,
    exact_rows=256,
    rows=4096,
    vocabulary=151936,
    hidden=2048,
    projected_rows=8192,
    chunk_elements=(1 << 24, 1 << 26, 1 << 28),
    turns=2000,
    turn_tokens=400,
    attention=Shape(heads=32, groups=4, width=128, trunk=16384, forks=(4096, 10240)),
    repetitions=20,
)
TINY = Sizes(
    copy_bytes=1 << 20,
    square=64,
    exact_rows=4,
    rows=4,
    vocabulary=5008,
    hidden=16,
    projected_rows=8,
    chunk_elements=(4 * 5008, 16 * 5008),
    turns=5,
    turn_tokens=30,
    attention=Shape(heads=4, groups=2, width=16, trunk=96, forks=(16, 64)),
    repetitions=2,
)


@dataclass(frozen=True, slots=True)
class Check:
    """Something that must hold. `found` is an error or a count, which `limit` bounds."""

    name: str
    found: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.found <= self.limit


@dataclass(frozen=True, slots=True)
class Rate:
    """Work a second beside the ceiling of its kind. `unit` is "TB/s" or "TFLOP/s"."""

    name: str
    milliseconds: float
    reached: float
    ceiling: float
    unit: str


@dataclass
class Found:
    checks: list[Check] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    def check(self, name: str, found: float, limit: float) -> None:
        self.checks.append(Check(name, found, limit))


class Bench:
    """One run on one device."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.device = device
        self.sizes = sizes
        self.found = Found()
        self.generator = torch.Generator(device).manual_seed(0)
        self.cache = torch.empty(sizes.copy_bytes // 8, dtype=torch.int8, device=device)

    # --------------------------------------------------------------------------------------------------------- tools
    def seconds(self, work: Callable[[], object]) -> float:
        """Of one call: median over repetitions, the first calls not counted."""
        for _ in range(2):
            work()
        times = []
        for _ in range(self.sizes.repetitions):
            self.cache.zero_()
            if self.device.type == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                work()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) / 1e3)
            else:
                start = time.perf_counter()
                work()
                times.append(time.perf_counter() - start)
        return statistics.median(times)

    def rate(self, name: str, work: Callable[[], object], amount: float, unit: str) -> None:
        seconds = self.seconds(work)
        ceiling = self.found.notes["copy TB/s" if unit == "TB/s" else "matrix product TFLOP/s"]
        self.found.rates.append(Rate(name, 1e3 * seconds, amount / seconds / 1e12, ceiling, unit))

    def launches(self, work: Callable[[], object]) -> int:
        """Kernels that a call runs on the GPU, by torch's profiler; copies and fills of memory included."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        work()
        with torch.profiler.profile(activities=activities) as profile:
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        events = profile.events()
        return sum(
            event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Memcpy")
            for event in (events if events is not None else [])
        )

    def randn(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, device=self.device, generator=self.generator).to(dtype)

    def labels(self, rows: int) -> Tensor:
        return torch.randint(0, self.sizes.vocabulary, (rows,), device=self.device, generator=self.generator)

    # ------------------------------------------------------------------------------------------------------ sections
    def ceilings(self) -> None:
        source = torch.empty(self.sizes.copy_bytes, dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        seconds = self.seconds(lambda: target.copy_(source))
        self.found.notes["copy TB/s"] = 2 * self.sizes.copy_bytes / seconds / 1e12
        side = self.sizes.square
        left, right = (self.randn(side, side, dtype=torch.bfloat16) for _ in range(2))
        self.found.notes["matrix product TFLOP/s"] = 2 * side**3 / self.seconds(lambda: left @ right) / 1e12

    def token_kernels(self) -> None:
        sizes = self.sizes
        for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-6)):
            logits = self.randn(sizes.exact_rows, sizes.vocabulary, dtype=dtype) * 4
            labels = self.labels(sizes.exact_rows)
            logits[0, (labels[0] + 1) % sizes.vocabulary] = float("-inf")
            upstream = self.randn(sizes.exact_rows, dtype=torch.promote_types(dtype, torch.float32))
            exact = logits.double().requires_grad_()
            normalised = exact.log_softmax(-1)
            expected = normalised.gather(1, labels[:, None])[:, 0]
            (gradient,) = torch.autograd.grad(expected, exact, upstream.double())
            entropies = torch.special.entr(normalised.detach().exp()).sum(-1)
            half = sizes.vocabulary // 2
            halves = [
                row_statistics(part, labels, first=first, entropy=True)
                for first, part in ((0, logits[:, :half]), (half, logits[:, half:]))
            ]
            logprobs, normalizers, entropy = combine_ranks(torch.stack(halves))
            self.found.check(f"log-probs {dtype}, two ranks", _error(logprobs, expected), limit)
            self.found.check(f"entropies {dtype}", _error(entropy, entropies), 10 * limit)
            write_gradient(logits, labels, normalizers, upstream)
            # The interpreter cuts a bfloat16 off where a GPU rounds it.
            rounding = 2.0 ** (-8 if self.device.type == "cuda" else -7) if dtype == torch.bfloat16 else 10 * limit
            self.found.check(f"gradient of logits {dtype}", _error(logits, gradient), rounding)
        for dtype in (torch.bfloat16, torch.float32):
            logits = self.randn(sizes.rows, sizes.vocabulary, dtype=dtype)
            labels = self.labels(sizes.rows)
            _, normalizers = combine_ranks(row_statistics(logits, labels)[None])
            upstream = torch.ones_like(normalizers)
            size = logits.numel() * logits.element_size()
            self.rate(f"row_statistics {dtype}", lambda x=logits, y=labels: row_statistics(x, y), size, "TB/s")
            self.rate(
                f"write_gradient {dtype}",
                lambda x=logits, y=labels, n=normalizers, c=upstream: write_gradient(x, y, n, c),
                2 * size,
                "TB/s",
            )

    def turn_kernel(self) -> None:
        for teacher, ratio, kappa, one_sided in (
            ("affine_prob", "sum", "sqrt_leaves", "none"),
            ("affine_odds", "mean", "max", "negative"),
            ("logistic", "sqrt", 1.0, "both"),
        ):
            objective = BernoulliKL(teacher=teacher, ratio=ratio, kappa=kappa, one_sided=one_sided, radius=0.2)  # type: ignore[arg-type]
            for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
                logprobs, turns = self._turns(dtype)
                loss, gradient = _with_gradient(objective, logprobs, turns)
                exact_loss, exact_gradient = _with_gradient(objective.reference, logprobs.double(), _double(turns))
                name = f"turn_kl {teacher} {ratio} {dtype}"
                self.found.check(f"{name}, loss", _error(loss, exact_loss), limit)
                self.found.check(f"{name}, gradient", _error(gradient, exact_gradient), 10 * limit)
                again = [_with_gradient(objective, logprobs, turns) for _ in range(self.sizes.repetitions)]
                unequal = sum(not (torch.equal(loss, a) and torch.equal(gradient, b)) for a, b in again)
                self.found.check(f"{name}, repetitions that differ in a bit", unequal, 0)

        objective = BernoulliKL()
        logprobs, turns = self._turns(torch.float32)
        one = torch.ones((), device=self.device)
        launches = self.launches(lambda: _with_gradient(objective, logprobs, turns, one))
        self.found.check("turn_kl launches, forward and backward", launches, 2)
        launches = self.launches(lambda: _with_gradient(objective.reference, logprobs, turns, one))
        self.found.notes["launches of the turn objective in torch"] = launches
        for name, call in (("turn_kl", objective), ("turn objective in torch", objective.reference)):
            work = self.seconds(lambda call=call: _with_gradient(call, logprobs, turns))
            self.found.notes[f"{name}, ms"] = round(1e3 * work, 4)
        logprobs[-1] = float("nan")
        try:
            objective(logprobs, turns)
            named = -1
        except LogProbError as error:
            named = error.turn
        self.found.check("turn_kl, a NaN is not named", named != turns.turn_count - 1, 0)

    def _turns(self, dtype: torch.dtype) -> tuple[Tensor, TurnTable]:
        count = self.sizes.turns
        lengths = torch.randint(1, 2 * self.sizes.turn_tokens, (count,), device=self.device, generator=self.generator)
        offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
        tokens = int(offsets[-1])
        behaviour = -self.randn(tokens, dtype=dtype).abs()
        turns = TurnTable(
            offsets=offsets,
            behaviour=behaviour,
            credit=self.randn(count, dtype=dtype),
            weight=self.randn(count, dtype=dtype).abs() / count,
            leaves=lengths % 11 + 2,
            peak=torch.full((count,), 3.0, device=self.device, dtype=dtype),
            sequence=torch.zeros_like(lengths),
        )
        return behaviour + 0.01 * self.randn(tokens, dtype=dtype), turns

    def projection(self) -> None:
        sizes = self.sizes
        weight = (self.randn(sizes.vocabulary, sizes.hidden, dtype=torch.bfloat16) / 16).requires_grad_()
        hidden = self.randn(sizes.projected_rows, sizes.hidden, dtype=torch.bfloat16).requires_grad_()
        labels = self.labels(sizes.projected_rows)
        upstream = torch.ones(sizes.projected_rows, device=self.device)

        def ours() -> tuple[Tensor, ...]:
            logprobs, _ = token_logprobs(hidden, weight, labels)
            return logprobs.detach(), *torch.autograd.grad(logprobs, (hidden, weight), upstream)

        def eager() -> tuple[Tensor, ...]:
            logprobs = -cross_entropy((hidden @ weight.t()).float(), labels, reduction="none")
            return logprobs.detach(), *torch.autograd.grad(logprobs, (hidden, weight), upstream)

        names = ("log-probs", "gradient of hidden", "gradient of weight")
        for name, mine, other in zip(names, ours(), eager(), strict=True):
            self.found.check(f"projection in bfloat16, {name} against torch", _error(mine, other), 2e-2)
        product = 2 * sizes.projected_rows * sizes.hidden * sizes.vocabulary
        for elements in self.sizes.chunk_elements:
            with mock.patch.object(logprob, "CHUNK_ELEMENTS", elements):
                rows = elements // sizes.vocabulary
                self.rate(f"token_logprobs, 4 products, {rows} rows a chunk", ours, 4 * product, "TFLOP/s")
        self.rate("all logits in torch, 3 products", eager, 3 * product, "TFLOP/s")
        if self.device.type == "cuda":
            chunk = 2 * logprob.CHUNK_ELEMENTS
            # gradients in bfloat16, the weight's also in float32 while it is summed
            expected = 2 * hidden.numel() + (2 + 4) * weight.numel() + chunk
            extra = self._peak_bytes(ours) - expected
            self.found.check("memory beyond gradients and one chunk, in chunks", extra / chunk, 0.25)
            self.found.notes["all logits in torch, GiB beyond gradients"] = round(
                (self._peak_bytes(eager) - 2 * (hidden.numel() + weight.numel())) / GIB, 2
            )

    def _peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        return torch.cuda.max_memory_allocated(self.device) - before

    def attention(self) -> None:
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        case = TreeCase(self.sizes.attention, self.device, dtype)
        compared = case.compare()
        self.found.notes |= {"attention": compared.kernel, "tokens, flattened over tree": compared.token_ratio}
        self.found.check("tree attention against flattened, output", compared.output_error, 1e-2)
        self.found.check("tree attention against flattened, gradients", compared.gradient_error, 2e-2)
        self.rate("tree attention, forward and backward", case.tree, compared.tree_flop, "TFLOP/s")
        self.rate("flattened attention, forward and backward", case.flat, compared.flat_flop, "TFLOP/s")
        tree, flat = self.found.rates[-2:]
        self.found.notes["attention, flattened over tree: seconds"] = flat.milliseconds / tree.milliseconds
        self.found.notes["attention, flattened over tree: pairs"] = compared.flat_flop / compared.tree_flop


def _with_gradient(
    objective: Callable[..., Any], logprobs: Tensor, turns: TurnTable, one: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Loss and gradient. Without `one`, the gradient of the loss itself, torch makes it: another launch."""
    leaf = logprobs.detach().requires_grad_()
    loss, _ = objective(leaf, turns)
    (gradient,) = torch.autograd.grad(loss, leaf, one)
    return loss.detach(), gradient


def _double(turns: TurnTable) -> TurnTable:
    wide = {name: getattr(turns, name).double() for name in ("behaviour", "credit", "weight", "peak")}
    return replace(turns, **wide)


def _error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference relative to the norm of what is expected."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def table(found: Found, device: str, dry: bool) -> str:
    lines = [device]
    if dry:
        lines.append("DRY RUN without a GPU: the checks count, no time or rate below means anything.")
    lines += ["", f"{'check':64}{'found':>10}{'limit':>10}"]
    for check in found.checks:
        verdict = "" if check.passed else "  FAILED"
        lines.append(f"{check.name:64}{check.found:>10.1e}{check.limit:>10.1e}{verdict}")
    lines += ["", f"{'':46}{'ms':>10}{'reached':>12}{'ceiling':>10}{'share':>8}"]
    for rate in found.rates:
        lines.append(
            f"{rate.name:46}{rate.milliseconds:>10.3f}{rate.reached:>12.3f}{rate.ceiling:>10.3f}"
            f"{rate.reached / rate.ceiling:>8.0%} {rate.unit}"
        )
    lines.append("")
    for name, value in found.notes.items():
        lines.append(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--interpret", action="store_true", help="with --device cpu: a dry run in Triton's interpreter")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line instead of a table")
    options = parser.parse_args(arguments)
    if options.interpret != (options.device == "cpu"):
        parser.error("--interpret and --device cpu belong together: interpreted kernels run on tensors of the CPU")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU is visible to torch; a dry run without one: --device cpu --interpret")
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    bench = Bench(device, LARGE if device.type == "cuda" else TINY)
    bench.found.notes |= {"kernels": choose(device).reason, "torch": torch.__version__}
    for section in (bench.ceilings, bench.token_kernels, bench.turn_kernel, bench.projection, bench.attention):
        start = time.monotonic()
        section()
        print(f"{section.__name__}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    text = table(bench.found, name, dry=options.interpret)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")
    print(json.dumps({"device": name, "dry_run": options.interpret, **asdict(bench.found)}) if options.json else text)
    return 0 if all(check.passed for check in bench.found.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
