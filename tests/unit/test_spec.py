"""The identities of ALGORITHMS.md §1.4, each checked on the functions that training uses, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from turn_tables import loss_and_gradient, random_case, turn_table

from megatron_treeopsd.credit.outcome import advantages
from megatron_treeopsd.objective import BernoulliKL, Clipped, Objective
from megatron_treeopsd.objective.bernoulli_kl import (
    divergence,
    mixture_weights,
    residual,
    target_log_ratio,
    teacher_offset,
)
from megatron_treeopsd.objective.segments import k3

pytestmark = pytest.mark.fast

TEACHERS = ("affine_prob", "affine_odds", "logistic")
UNCLIPPED = {"sum": Clipped(ratio="turn_sum", clip=False), "mean": Clipped(ratio="turn", clip=False)}


def naive_divergence(q: Tensor, x: Tensor) -> Tensor:
    p = torch.sigmoid(x)
    return q * torch.log(q / p) + (1 - q) * torch.log((1 - q) / (1 - p))


# ------------------------------------------------------------------------------------- A: divergence and its gradient
@pytest.mark.parametrize("ratio", ["sum", "mean", "sqrt"])
@pytest.mark.parametrize("teacher", TEACHERS)
def test_value_and_gradient_are_those_of_the_divergence(ratio: str, teacher: str) -> None:
    """dKL/dlogp_t = (beta_v / L_v)(p_v - q_v), and the loss is sum_v W_v eta KL."""
    for seed in range(20):
        logprobs, turns = random_case(seed)
        objective = BernoulliKL(ratio=ratio, teacher=teacher, radius=0.2, kappa=1.0)
        loss, gradient = loss_and_gradient(objective, logprobs, turns)

        expected_loss, expected_gradient = 0.0, torch.zeros_like(logprobs)
        for v in range(turns.turn_count):
            tokens = slice(int(turns.offsets[v]), int(turns.offsets[v + 1]))
            length = tokens.stop - tokens.start
            beta = {"sum": length, "mean": 1.0, "sqrt": math.sqrt(length)}[ratio]
            x = beta * (logprobs - turns.behaviour)[tokens].mean().detach()
            q = 0.5 + teacher_offset(turns.credit[v].clamp(-1, 1), 0.2, teacher)
            scale = float(turns.weight[v]) / 0.2
            expected_loss += scale * float(naive_divergence(q, x))
            expected_gradient[tokens] = scale * beta / length * (torch.sigmoid(x) - q)
        assert loss == pytest.approx(expected_loss, rel=1e-12, abs=1e-14)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stable_at_extreme_log_ratios(dtype: torch.dtype) -> None:
    x = torch.tensor([-800.0, -40.0, 0.0, 40.0, 800.0], dtype=dtype)
    turns = turn_table([1] * 5, [0.5] * 5, behaviour=torch.zeros(5), weight=[1.0] * 5, dtype=dtype)
    objective = BernoulliKL(radius=0.2, kappa=1.0, scale="one", max_log_ratio=1e9)
    loss, gradient = loss_and_gradient(objective, x, turns)  # q = 0.6
    torch.testing.assert_close(gradient, torch.tensor([-0.6, -0.6, -0.1, 0.4, 0.4], dtype=dtype))
    entropy = -(0.6 * math.log(0.6) + 0.4 * math.log(0.4))
    assert loss == pytest.approx(0.6 * 840 + 0.4 * 840 + math.log(2) - 5 * entropy, rel=1e-6)


def test_divergence_matches_finite_differences_of_itself() -> None:
    x, q, step = torch.tensor(0.37, dtype=torch.float64), 0.6, 1e-6
    target = torch.logit(torch.tensor(q, dtype=torch.float64))
    slope = (divergence(x + step, target) - divergence(x - step, target)) / (2 * step)
    assert float(slope) == pytest.approx(float(torch.sigmoid(x)) - q, abs=1e-8)


def test_surrogate_and_divergence_have_the_same_gradient() -> None:
    logprobs, turns = random_case(3)
    objective = BernoulliKL(radius=0.2, kappa=1.0, scale="one")
    _, gradient = loss_and_gradient(objective, logprobs, turns)
    sums = torch.stack([part.sum() for part in (logprobs - turns.behaviour).split(turns.lengths.tolist())])
    target = target_log_ratio(turns.credit.clamp(-1, 1), 0.2, "affine_prob")
    (expected,) = torch.autograd.grad((turns.weight * divergence(sums, target)).sum(), logprobs)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)


# --------------------------------------------------------------------------------------------------- B: teacher maps
@pytest.mark.parametrize("radius", [0.02, 0.05, 0.1, 0.2])
def test_ranges_of_targets_and_target_ratios(radius: float) -> None:
    u, r = torch.linspace(-1, 1, 201, dtype=torch.float64), 4 * radius
    bounds = {
        "affine_prob": (0.5 - radius, 0.5 + radius, math.log((1 - 2 * radius) / (1 + 2 * radius))),
        "affine_odds": ((1 - r) / (2 - r), (1 + r) / (2 + r), math.log(1 - r)),
        "logistic": (1 / (1 + math.exp(r)), 1 / (1 + math.exp(-r)), -r),
    }
    for teacher, (lowest, highest, lowest_log_ratio) in bounds.items():
        q = 0.5 + teacher_offset(u, radius, teacher)
        assert [float(q[0]), float(q[100]), float(q[-1])] == pytest.approx([lowest, 0.5, highest], abs=1e-14)
        assert (q.diff() > 0).all()
        target = target_log_ratio(u, radius, teacher)
        torch.testing.assert_close(target, torch.logit(q), rtol=1e-11, atol=1e-13)
        assert float(target[0]) == pytest.approx(lowest_log_ratio, abs=1e-14)


def test_target_log_ratios_of_the_radius_table() -> None:
    """ALGORITHMS.md §1.3: bound of |x*| by radius."""
    one = torch.tensor(1.0, dtype=torch.float64)
    table = {0.02: 0.080, 0.05: 0.201, 0.1: 0.405, 0.2: 0.847, 0.25: 1.099}
    for radius, bound in table.items():
        assert float(target_log_ratio(one, radius, "affine_prob")) == pytest.approx(bound, abs=5e-4)


def test_the_maps_agree_to_first_order() -> None:
    u = torch.linspace(-1, 1, 201, dtype=torch.float64)
    prob, odds, logistic = (teacher_offset(u, 1e-4, teacher) for teacher in TEACHERS)
    assert float((prob - odds).abs().max()) < 5e-8
    assert float((prob - logistic).abs().max()) < 5e-8


# ------------------------------------------------------------------ C: policy gradient, fixed point, residual, reversal
class Arms:
    """A softmax policy over six one-token turns with credits that are centred under it and at most one in size."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.theta = torch.randn(6, generator=generator, dtype=torch.float64)
        self.start = torch.softmax(self.theta, 0)
        credit = torch.randn(6, generator=generator, dtype=torch.float64)
        credit = credit - (self.start * credit).sum()
        self.credit = credit / credit.abs().max()
        self.turns = turn_table([1] * 6, self.credit, behaviour=self.start.log(), weight=self.start)

    def descent(self, objective: Objective, theta: Tensor) -> Tensor:
        theta = theta.detach().clone().requires_grad_()
        loss, _ = objective(torch.log_softmax(theta, 0), self.turns)
        (gradient,) = torch.autograd.grad(loss, theta)
        return -gradient

    def policy_gradient(self) -> Tensor:
        theta = self.theta.clone().requires_grad_()
        (gradient,) = torch.autograd.grad((self.start * self.credit * torch.log_softmax(theta, 0)).sum(), theta)
        return gradient

    def walk(self, objective: Objective, steps: int, rate: float) -> Tensor:
        theta = self.theta
        for _ in range(steps):
            theta = theta + rate * self.descent(objective, theta)
        return torch.softmax(theta, 0)


@pytest.mark.parametrize("radius", [0.05, 0.2])
def test_policy_gradient_is_recovered_exactly_at_ratio_one(radius: float) -> None:
    arms = Arms()
    for objective in (
        BernoulliKL(teacher="affine_prob", radius=radius, kappa=1.0),
        BernoulliKL(teacher="affine_odds", mixture_weight=True, radius=radius, kappa=1.0),
    ):
        torch.testing.assert_close(arms.descent(objective, arms.theta), arms.policy_gradient(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("teacher", "cosine_at_large_radius"), [("affine_odds", 0.95), ("logistic", 0.999)])
def test_policy_gradient_is_recovered_to_first_order(teacher: str, cosine_at_large_radius: float) -> None:
    arms = Arms()
    wanted = arms.policy_gradient()

    def error(radius: float) -> float:
        step = arms.descent(BernoulliKL(teacher=teacher, radius=radius, kappa=1.0), arms.theta)
        return float((step - wanted).norm() / wanted.norm())

    large = arms.descent(BernoulliKL(teacher=teacher, radius=0.2, kappa=1.0), arms.theta)
    assert cosine_at_large_radius < float(torch.cosine_similarity(large, wanted, dim=0)) < 1 - 1e-6
    assert error(1e-4) < 5e-4
    assert error(0.1) > 100 * error(1e-4)


def test_only_affine_odds_has_a_target_policy() -> None:
    arms = Arms()
    mass = {t: float((arms.start * target_log_ratio(arms.credit, 0.2, t).exp()).sum()) for t in TEACHERS}
    assert mass["affine_odds"] == pytest.approx(1, abs=1e-14)
    assert mass["affine_prob"] > 1.01
    assert mass["logistic"] > 1.01


def test_fixed_point_of_affine_odds_is_the_target_policy() -> None:
    arms = Arms()
    objective = BernoulliKL(teacher="affine_odds", radius=0.2, kappa=1.0, scale="one")
    torch.testing.assert_close(arms.walk(objective, 700, 20.0), arms.start * (1 + 0.8 * arms.credit), rtol=0, atol=1e-8)


def test_closed_forms_of_the_residual() -> None:
    ratio, u, radius = 1.3, torch.tensor(-0.25, dtype=torch.float64), 0.2
    target = 1 + 4 * radius * float(u)  # rho* = 0.8
    x = torch.tensor(math.log(ratio), dtype=torch.float64)
    value = residual(x, teacher_offset(u, radius, "affine_odds"))
    assert float(value) == pytest.approx((ratio - target) / ((1 + ratio) * (1 + target)), abs=1e-15)
    weighted = mixture_weights(u, radius) * value
    assert float(weighted) == pytest.approx((ratio - target) / (2 * (1 + ratio)), abs=1e-15)


def test_the_residual_reverses_beyond_the_target() -> None:
    x = torch.tensor([-1.0, 0.0, math.log(1.5), 1.0], dtype=torch.float64)
    values = residual(x, torch.tensor(0.1, dtype=torch.float64))  # q = 0.6, x* = log 1.5
    assert (values[:2] < 0).all()
    assert float(values[2]) == pytest.approx(0, abs=1e-16)
    assert values[3] > 0


def test_repeated_steps_on_one_batch_end_at_the_target_and_not_beyond() -> None:
    """Fixed credit keeps pushing; the clip and the residual hold it (toy check of ALGORITHMS.md §1.3)."""
    arms = Arms()

    def moved(objective: Objective, steps: int) -> float:
        policy = arms.walk(objective, steps, 0.5)
        return float((policy * (policy / arms.start).log()).sum())

    bounded = BernoulliKL(radius=0.2, kappa=1.0)
    fixed, clipped = UNCLIPPED["sum"], Clipped(ratio="turn_sum")
    assert moved(fixed, 150) > 5 * moved(bounded, 150)
    assert moved(fixed, 150) > 5 * moved(clipped, 150)
    assert moved(bounded, 300) == pytest.approx(moved(bounded, 150), rel=0.02)


# ------------------------------------------------------------------------------------------- D: ratios of the clip arm
def test_gradient_of_the_sequence_ratio() -> None:
    """d(s A)/dlogp_t = A s / |y| once the turns weigh by their tokens."""
    lengths, credit = [4, 2, 3], 0.7
    behaviour = -torch.rand(9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    turns = turn_table(lengths, [credit] * 3, behaviour=behaviour, weight=[n / 9 for n in lengths], sequence=[0, 0, 0])
    logprobs = behaviour + 0.01 * torch.arange(9, dtype=torch.float64)
    loss, gradient = loss_and_gradient(Clipped(ratio="sequence", clip=False), logprobs, turns)
    s = math.exp(0.01 * 4)
    assert loss == pytest.approx(-s * credit, rel=1e-14)
    torch.testing.assert_close(gradient, torch.full_like(gradient, -credit * s / 9), rtol=1e-13, atol=0)


def test_turn_ratio_is_the_token_trick() -> None:
    """sg(s_v) pi(y_t)/sg(pi(y_t)) averaged over the tokens: the same value and gradient."""
    logprobs, turns = random_case(5)
    loss, gradient = loss_and_gradient(UNCLIPPED["mean"], logprobs, turns)
    expected = torch.zeros((), dtype=torch.float64)
    for v, part in enumerate((logprobs - turns.behaviour).split(turns.lengths.tolist())):
        ratio = torch.exp(part.mean().detach() + part - part.detach())
        expected = expected - turns.weight[v] * (ratio * turns.credit[v]).mean()
    assert loss == pytest.approx(expected.item(), rel=1e-13)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logprobs)[0], rtol=1e-12, atol=1e-15)


def test_k3_is_never_negative_and_unbiased() -> None:
    start = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    now = torch.tensor([0.25, 0.3, 0.45], dtype=torch.float64)
    values = k3((now / start).log())
    assert (values >= 0).all()
    assert float((start * values).sum()) == pytest.approx(float((start * (start / now).log()).sum()), abs=1e-15)


# ---------------------------------------------------------------------- E: credit (trees: see test_credit.py) and G
def test_samuelson_bound_holds_and_is_attained() -> None:
    rewards = np.array([1.0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1])
    assert np.abs(advantages(rewards, "mean_std")).max() <= math.sqrt(11)
    one = np.zeros(12)
    one[0] = 1
    # 1e-6 is added to the standard deviation, sqrt(11)/12
    assert advantages(one, "mean_std").max() == pytest.approx(math.sqrt(11), abs=2e-5)


def test_equal_rewards_give_no_gradient_at_ratio_one_and_a_pull_back_later() -> None:
    credit = advantages(np.ones(12), "mean_std")
    assert (credit == 0).all()
    turns = turn_table([3] * 12, torch.from_numpy(credit))
    objective = BernoulliKL(kappa=1.0)
    assert (loss_and_gradient(objective, turns.behaviour, turns)[1] == 0).all()
    assert (loss_and_gradient(objective, turns.behaviour + 0.1, turns)[1] > 0).all()


@pytest.mark.parametrize("ratio", ["sum", "mean"])
@pytest.mark.parametrize("teacher", ["affine_prob", "affine_odds"])
def test_first_step_equals_that_of_the_tree_policy_gradient(ratio: str, teacher: str) -> None:
    """eta = kappa/delta: at the sampling point both objectives have the same gradient, of all turns and questions."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(3, 30, (12,), generator=generator).tolist()
    turns = turn_table(lengths, torch.randn(12, generator=generator, dtype=torch.float64), leaves=12)
    objective = BernoulliKL(ratio=ratio, teacher=teacher, radius=0.1, mixture_weight=teacher == "affine_odds")
    first = loss_and_gradient(objective, turns.behaviour, turns)[1]
    for other in (UNCLIPPED[ratio], Clipped(ratio=UNCLIPPED[ratio].ratio, clip_low=0.2, clip_high=0.2)):
        second = loss_and_gradient(other, turns.behaviour, turns)[1]
        assert float((first - second).abs().max()) < 1e-12
        assert float(second.abs().max()) > 1e-3
