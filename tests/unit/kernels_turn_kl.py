"""The turn kernel against `BernoulliKL.reference`. Run by test_kernels.py, in Triton's interpreter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder
from turn_tables import turn_table

from megatron_treeopsd.objective import BernoulliKL, LogProbError, Report, TurnTable
from megatron_treeopsd.objective.kernels import turn_kl as kernel_module
from megatron_treeopsd.objective.kernels.turn_kl import BLOCK, _finished_programs, turn_kl

CLOSE = {"rtol": 1e-12, "atol": 1e-15}

Result = tuple[Tensor, Tensor, Report]


def by_kernel(objective: BernoulliKL, logprobs: Tensor, turns: TurnTable, upstream: float = 1.0) -> Result:
    leaf = logprobs.detach().clone().requires_grad_()
    loss, report = turn_kl(leaf, turns, **asdict(objective))
    (gradient,) = torch.autograd.grad(upstream * loss, leaf)
    return loss.detach(), gradient, report


def by_reference(objective: BernoulliKL, logprobs: Tensor, turns: TurnTable, upstream: float = 1.0) -> Result:
    leaf = logprobs.detach().clone().requires_grad_()
    loss, report = objective.reference(leaf, turns)
    (gradient,) = torch.autograd.grad(upstream * loss, leaf)
    return loss.detach(), gradient, report


def assert_same(ours: Result, expected: Result, **tolerance: float) -> None:
    tolerance = tolerance or CLOSE
    torch.testing.assert_close(ours[0], expected[0], **tolerance)
    torch.testing.assert_close(ours[1], expected[1], **tolerance)
    assert list(ours[2]) == list(expected[2])
    for name, values in expected[2].items():
        torch.testing.assert_close(ours[2][name], values, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def case(lengths: Sequence[int], *, spread: float = 0.02, seed: int = 0) -> tuple[Tensor, TurnTable]:
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    behaviour = -3 * torch.rand(tokens, generator=generator, dtype=torch.float64)
    turns = turn_table(
        lengths,
        2 * torch.randn(len(lengths), generator=generator, dtype=torch.float64),
        behaviour=behaviour,
        weight=torch.rand(len(lengths), generator=generator, dtype=torch.float64),
    )
    moved = spread * torch.randn(tokens, generator=generator, dtype=torch.float64)
    return behaviour + moved, replace(turns, leaves=torch.arange(2, 2 + len(lengths)))


@pytest.mark.parametrize("teacher", ["affine_prob", "affine_odds", "logistic"])
def test_options_and_their_combinations(teacher: str) -> None:
    """Turns of 3, 2, 2 and 1 tokens: short of the target, beyond it for both signs of credit, and too far to keep."""
    logprobs = torch.tensor([-1.0, -0.9, -1.1, -0.6, -0.7, -1.6, -1.4, -4.0], dtype=torch.float64)
    turns = turn_table([3, 2, 2, 1], [0.9, 0.4, -0.3, 0.5], weight=[0.1, 0.2, 0.3, 0.4], leaves=3, peak=0.9)
    seen = set()
    for ratio, (kappa, scale), one_sided in itertools.product(
        ("sum", "mean", "sqrt"),
        (("sqrt_leaves", "policy_gradient"), ("max", "one"), (0.7, "policy_gradient")),
        ("none", "negative", "both"),
    ):
        objective = BernoulliKL(
            teacher=teacher,
            ratio=ratio,
            radius=0.2,
            kappa=kappa,
            one_sided=one_sided,
            mixture_weight=teacher == "affine_odds" and scale == "policy_gradient",
            scale=scale,
            max_log_ratio=2.0,
        )
        ours = by_kernel(objective, logprobs, turns, upstream=3.0)
        assert_same(ours, by_reference(objective, logprobs, turns, upstream=3.0))
        assert ours[2]["dropped"].tolist() == [0, 0, 0, 1]
        seen.add(tuple(ours[1][turns.offsets[:-1]].ne(0).tolist()))
    assert len(seen) > 1  # the cases tell the settings of `one_sided` apart


def test_turns_of_any_length() -> None:
    """Around the size of a block; a value in each block, and in its first and last place, must count."""
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7, 2]
    logprobs, turns = case(lengths)
    assert_same(
        by_kernel(BernoulliKL(kappa=1.5), logprobs, turns), by_reference(BernoulliKL(kappa=1.5), logprobs, turns)
    )


@settings(max_examples=12)
@given(
    lengths=st.lists(st.integers(1, 3 * BLOCK), min_size=1, max_size=6),
    spread=st.sampled_from([1e-6, 1e-2, 0.3]),
    ratio=st.sampled_from(["sum", "mean", "sqrt"]),
    seed=st.integers(0, 2**16),
)
def test_random_tables(lengths: list[int], spread: float, ratio: str, seed: int) -> None:
    logprobs, turns = case(lengths, spread=spread, seed=seed)
    objective = BernoulliKL(ratio=ratio, radius=0.1, max_log_ratio=1.0)
    # Sums in another order differ by rounding of the largest term.
    assert_same(by_kernel(objective, logprobs, turns), by_reference(objective, logprobs, turns), rtol=1e-10, atol=1e-13)


def test_more_turns_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last program adds the losses block after block."""
    monkeypatch.setattr(kernel_module, "BLOCK", 32)
    count = 2 * 32 + 3
    turns = turn_table([1] * count, torch.linspace(-1, 1, count), behaviour=torch.zeros(count))
    logprobs = torch.linspace(-0.5, 0.3, count, dtype=torch.float64)
    objective = BernoulliKL(kappa=1.0)
    assert_same(by_kernel(objective, logprobs, turns), by_reference(objective, logprobs, turns))


def test_single_precision_is_as_exact_as_its_inputs() -> None:
    """float32 in, float64 inside: equal to the float64 reference on the same numbers to the rounding of the results."""
    logprobs, turns = case([5, 700, 3, 40], spread=1e-4)
    single = turn_table(
        turns.lengths.tolist(), turns.credit.float(), behaviour=turns.behaviour.float(), weight=turns.weight.float(),
        dtype=torch.float32,
    )  # fmt: skip
    double = replace(
        single, behaviour=single.behaviour.double(), credit=single.credit.double(), weight=single.weight.double()
    )
    objective = BernoulliKL(ratio="mean", radius=1e-3, kappa=3.0)
    loss, gradient, report = by_kernel(objective, logprobs.float(), single)
    exact = by_reference(objective, logprobs.float().double(), double)
    assert {loss.dtype, gradient.dtype, *(values.dtype for values in report.values())} == {torch.float32}
    torch.testing.assert_close(report["log_ratio"].double(), exact[2]["log_ratio"], rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient.double(), exact[1], rtol=1e-5, atol=0)
    torch.testing.assert_close(report["kl_behaviour"].double(), exact[2]["kl_behaviour"], rtol=1e-3, atol=0)


@pytest.mark.parametrize("x", [-800.0, -40.0, -1e-9, 0.0, 1e-12, 30.0, 800.0])
def test_extreme_log_ratios(x: float) -> None:
    turns = turn_table([1, 1, 1], [1.0, -1.0, 0.0], behaviour=torch.zeros(3))
    for teacher in ("affine_prob", "affine_odds", "logistic"):
        objective = BernoulliKL(teacher=teacher, radius=0.2, kappa=1.0, max_log_ratio=1e9)
        ours = by_kernel(objective, torch.full((3,), x, dtype=torch.float64), turns)
        assert_same(
            ours, by_reference(objective, torch.full((3,), x, dtype=torch.float64), turns), rtol=1e-11, atol=1e-15
        )


@pytest.mark.parametrize("kappa", ["sqrt_leaves", "max"])
def test_a_question_that_compares_nothing(kappa: str) -> None:
    turns = turn_table([2], [0.0], leaves=1, peak=0.0)
    objective = BernoulliKL(kappa=kappa)
    logprobs = torch.tensor([-0.7, -1.0], dtype=torch.float64)
    ours = by_kernel(objective, logprobs, turns)
    assert_same(ours, by_reference(objective, logprobs, turns))
    assert ours[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["policy", "behaviour"])
def test_log_probs_that_are_not_finite_raise_and_name_the_turn(bad: float, where: str) -> None:
    logprobs, turns = case([2, 3, 1])
    (logprobs if where == "policy" else turns.behaviour)[3] = bad
    with pytest.raises(LogProbError, match=r"turn 1 .* token 1 is ") as caught:
        turn_kl(logprobs, turns, **asdict(BernoulliKL()))
    assert caught.value.turn == 1
    logprobs[3] = turns.behaviour[3] = -1.0
    assert math.isfinite(by_kernel(BernoulliKL(), logprobs, turns)[0])  # nothing is left over for the next launch


def test_a_credit_that_is_not_a_number_gives_such_a_loss() -> None:
    """Log-probs are checked here; credits are the caller's, who looks at the loss."""
    logprobs, turns = case([2, 3])
    turns.credit[1] = math.nan
    for loss, gradient, _ in (by_kernel(BernoulliKL(), logprobs, turns), by_reference(BernoulliKL(), logprobs, turns)):
        assert math.isnan(loss)
        assert gradient.isnan().tolist() == [False, False, True, True, True]


def test_nothing_depends_on_the_order_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    logprobs, turns = case([3, 1, 600, 2, 9])
    forwards = by_kernel(BernoulliKL(), logprobs, turns)
    place = interpreter_builder.set_grid_idx
    monkeypatch.setattr(interpreter_builder, "set_grid_idx", lambda x, y, z: place(4 - x, y, z))
    assert_same(by_kernel(BernoulliKL(), logprobs, turns), forwards, rtol=0, atol=0)


def test_columns_of_wider_tables() -> None:
    logprobs, turns = case([3, 1, 5])
    spread = replace(turns, behaviour=turns.behaviour.repeat(2, 1).t()[:, 0], weight=turns.weight[:1].expand(3))
    ours = by_kernel(BernoulliKL(), logprobs.repeat(2, 1).t()[:, 0], spread)
    assert_same(ours, by_reference(BernoulliKL(), logprobs, spread))


def test_programs_are_counted_from_zero_each_time() -> None:
    logprobs, turns = case([3, 1])
    for _ in range(2):
        by_kernel(BernoulliKL(), logprobs, turns)
        assert int(_finished_programs(torch.device("cpu"), 0)) == 0


def test_the_objective_uses_the_kernel_where_it_can() -> None:
    logprobs, turns = case([3, 1])
    loss, report = BernoulliKL()(logprobs.requires_grad_(), turns)
    assert "TurnKL" in type(loss.grad_fn).__name__
    assert not any(values.requires_grad for values in report.values())
    expected = by_reference(BernoulliKL(), logprobs, turns)[2]
    assert BernoulliKL().summarise(report) == pytest.approx(BernoulliKL().summarise(expected))


def test_no_turns() -> None:
    logprobs = torch.empty(0, dtype=torch.float64, requires_grad=True)
    loss, _ = BernoulliKL()(logprobs, turn_table([], []))
    loss.backward()
    assert loss.item() == 0
    assert logprobs.grad is not None


def test_without_gradient() -> None:
    logprobs, turns = case([3, 1])
    with torch.no_grad():
        loss, _ = BernoulliKL()(logprobs, turns)
    assert not loss.requires_grad
