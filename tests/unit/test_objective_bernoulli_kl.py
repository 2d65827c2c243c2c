"""The residual objective: every option by hand, its numerics, and what it reports. The identities are in test_spec."""

from __future__ import annotations

import math

import pytest
import torch
from turn_tables import loss_and_gradient, random_case, turn_table

from megatron_treeopsd.objective import BernoulliKL, LogProbError
from megatron_treeopsd.objective.bernoulli_kl import residual, teacher_offset

pytestmark = pytest.mark.fast

LOG_1_5 = math.log(1.5)
"""x* of q = 0.6, that is radius 0.2 and u = 1/2."""


def pulls(objective: BernoulliKL, x: list[float], credit: list[float], **table: float) -> list[float]:
    """Gradient with respect to x_v of one-token turns of weight one."""
    turns = turn_table([1] * len(x), credit, behaviour=torch.zeros(len(x)), weight=[1.0] * len(x), **table)
    return loss_and_gradient(objective, torch.tensor(x, dtype=torch.float64), turns)[1].tolist()


def test_one_turn_by_hand() -> None:
    """Turn of 4 tokens, sum l = 0.8, C = 0.5, kappa 1, delta 0.2: q = 0.6; p = sigmoid(0.8), sigmoid(0.2), ..(0.4)."""
    turns = turn_table([4], [0.5], weight=[0.25])
    logprobs = torch.tensor([-0.9, -0.4, -1.2, -0.7], dtype=torch.float64)
    for ratio, x, per_token in (("sum", 0.8, 1.0), ("mean", 0.2, 0.25), ("sqrt", 0.4, 0.5)):
        objective = BernoulliKL(ratio=ratio, radius=0.2, kappa=1.0)
        loss, gradient = loss_and_gradient(objective, logprobs, turns)
        p = 1 / (1 + math.exp(-x))
        divergence = 0.6 * math.log(0.6 / p) + 0.4 * math.log(0.4 / (1 - p))
        assert loss == pytest.approx(0.25 * 5 * divergence, rel=1e-12)
        assert gradient.tolist() == pytest.approx([0.25 * 5 * (p - 0.6) * per_token] * 4, rel=1e-12)


@pytest.mark.parametrize(
    ("kappa", "u", "eta"),
    [(2.0, 0.25, 20.0), ("sqrt_leaves", 0.25, 20.0), ("max", 0.5, 10.0), (0.25, 1.0, 2.5)],
)
def test_kappa_scales_and_clips_the_credit(kappa: float | str, u: float, eta: float) -> None:
    """C = 0.5 among 5 leaves with a peak of 1; delta 0.1, so that -gradient = eta delta u = C unless clipped."""
    (pull,) = pulls(BernoulliKL(radius=0.1, kappa=kappa), [0.0], [0.5], leaves=5, peak=1.0)
    assert pull == pytest.approx(-eta * 0.1 * u, rel=1e-14)
    assert pull == pytest.approx(-min(0.5, kappa if isinstance(kappa, float) else 1), rel=1e-14)


@pytest.mark.parametrize("kappa", ["sqrt_leaves", "max"])
def test_a_question_that_compares_nothing_has_no_loss(kappa: str) -> None:
    """One leaf, or all credits zero: kappa = 0. No division by zero, and nothing to learn."""
    assert pulls(BernoulliKL(kappa=kappa), [0.3], [0.0], leaves=1, peak=0.0) == [0.0]


def test_scale_one_leaves_the_plain_divergence() -> None:
    objective = BernoulliKL(radius=0.1, kappa=1.0, scale="one")
    assert pulls(objective, [0.0, 0.0], [0.5, -1.0]) == pytest.approx([-0.05, 0.1], rel=1e-14)


def test_mixture_weight_by_hand() -> None:
    """delta 0.2, u = -1/2, r u = -0.4: weight 0.8, q = 0.6/1.6 = 0.375; at ratio one 5 * 0.8 * (0.5 - 0.375)."""
    options = {"teacher": "affine_odds", "radius": 0.2, "kappa": 1.0}
    assert pulls(BernoulliKL(**options), [0.0], [-0.5]) == pytest.approx([5 * 0.125], rel=1e-14)
    assert pulls(BernoulliKL(**options, mixture_weight=True), [0.0], [-0.5]) == pytest.approx([0.5], rel=1e-14)


def test_one_sided_switches_reversal_off() -> None:
    """Four turns: C > 0 short of and beyond its target, C < 0 short of and beyond; one without credit."""
    x, credit = [0.0, 1.0, 0.0, -1.0, 0.7], [0.5, 0.5, -0.5, -0.5, 0.0]
    p = 1 / (1 + math.exp(-1.0))
    full = [-0.1, p - 0.6, 0.1, 0.6 - p, 1 / (1 + math.exp(-0.7)) - 0.5]
    masks = {"none": [1, 1, 1, 1, 1], "negative": [1, 1, 1, 0, 1], "both": [1, 0, 1, 0, 1]}
    for one_sided, mask in masks.items():
        objective = BernoulliKL(radius=0.2, kappa=1.0, scale="one", one_sided=one_sided)
        expected = [value * keep for value, keep in zip(full, mask, strict=True)]
        assert pulls(objective, x, credit) == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("one_sided", ["none", "negative", "both"])
@pytest.mark.parametrize("ratio", ["sum", "mean", "sqrt"])
def test_value_and_gradient_belong_to_one_function(one_sided: str, ratio: str) -> None:
    logprobs, turns = random_case(11)
    objective = BernoulliKL(ratio=ratio, radius=0.2, kappa=1.0, one_sided=one_sided)
    assert torch.autograd.gradcheck(lambda values: objective(values, turns)[0], logprobs.detach().requires_grad_())


def test_large_log_ratios_are_dropped_and_counted() -> None:
    turns = turn_table([2, 1, 1], [0.5, 0.5, -0.5], weight=[0.2, 0.3, 0.5])
    logprobs = torch.tensor([-0.9, -0.9, 5.5, -7.0], dtype=torch.float64)  # x = 0.2, 6.5, -6
    objective = BernoulliKL(radius=0.2, kappa=1.0)
    loss, gradient = loss_and_gradient(objective, logprobs, turns)
    alone, gradient_alone = loss_and_gradient(objective, logprobs[:2], turn_table([2], [0.5], weight=[0.2]))
    assert loss == pytest.approx(alone, rel=1e-14)
    assert gradient.tolist() == [*gradient_alone.tolist(), 0.0, 0.0]
    summary = objective.summarise(objective(logprobs, turns)[1])
    assert summary["objective/dropped_turns"] == 2
    assert objective.summarise(objective(logprobs[:2], turn_table([2], [0.5]))[1])["objective/dropped_turns"] == 0


def test_single_precision_keeps_small_residuals() -> None:
    """Mean ratio and a radius of 1e-3: p - q is about 1e-5, which a difference of two numbers near 1/2 would lose."""
    generator = torch.Generator().manual_seed(0)
    behaviour = -3 * torch.rand(800, generator=generator, dtype=torch.float64)
    step = 1e-5 * torch.randn(800, generator=generator, dtype=torch.float64)
    credit = torch.randn(100, generator=generator, dtype=torch.float64)
    objective = BernoulliKL(ratio="mean", radius=1e-3, kappa=3.0)
    x = step.view(100, 8).mean(1)
    u = (credit / 3).clamp(-1, 1)
    exact = residual(x, teacher_offset(u, 1e-3, "affine_prob"))
    single = residual(x.float(), teacher_offset(u.float(), 1e-3, "affine_prob")).double()
    naive = (torch.sigmoid(x.float()) - (0.5 + 1e-3 * u.float())).double()
    assert float((single / exact - 1).abs().max()) < 1e-5
    assert float((naive / exact - 1).abs().max()) > 1e-3

    turns = turn_table([8] * 100, credit.tolist(), behaviour=behaviour.float(), dtype=torch.float32)
    loss, gradient = loss_and_gradient(objective, (behaviour + step).float(), turns)
    assert gradient.dtype == torch.float32
    assert loss > 0


@pytest.mark.parametrize(
    "objective", [BernoulliKL(radius=0.2, kappa=1.0), BernoulliKL(ratio="sqrt", teacher="logistic")]
)
def test_single_and_double_precision_agree(objective: BernoulliKL) -> None:
    logprobs, turns = random_case(2)
    single = turn_table(
        turns.lengths.tolist(),
        turns.credit.float(),
        behaviour=turns.behaviour,
        weight=turns.weight,
        dtype=torch.float32,
    )
    loss, gradient = loss_and_gradient(objective, logprobs, turns)
    loss32, gradient32 = loss_and_gradient(objective, logprobs.float(), single)
    assert loss32 == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(gradient32.double(), gradient, rtol=1e-4, atol=1e-7)


def test_summary_by_hand() -> None:
    """Radius 0.2, kappa 1, x* = +-log 1.5 for |C| = 1/2; x chosen as multiples of x*; the last turn has no target."""
    progress = [0.85, 1.5, -0.5, 0.95, 2.0, 0.0]
    credit = [0.5, 0.5, 0.5, -0.5, -0.5, 0.0]
    targets = [math.copysign(LOG_1_5, c) if c else 0.0 for c in credit]
    x = [share * target for share, target in zip(progress, targets, strict=True)]
    weight = [0.1, 0.1, 0.1, 0.2, 0.3, 0.2]
    turns = turn_table([1] * 6, credit, behaviour=torch.zeros(6), weight=weight)
    objective = BernoulliKL(radius=0.2, kappa=1.0)
    loss, report = objective(torch.tensor(x, dtype=torch.float64), turns)
    assert report["target_log_ratio"].tolist() == pytest.approx(targets)

    def pull(value: float, q: float, w: float) -> float:
        return w * 5 * (1 / (1 + math.exp(-value)) - q)

    strength = [abs(pull(*turn)) for turn in zip(x, [0.6, 0.6, 0.6, 0.4, 0.4, 0.5], weight, strict=True)]
    assert objective.summarise(report) == pytest.approx(
        {
            "objective/loss": loss.item(),
            "objective/dropped_turns": 0.0,
            "objective/kl_behaviour": sum(math.exp(v) - v - 1 for v in x) / 6,
            "objective/log_ratio_abs_median": 0.85 * LOG_1_5,  # third of 0, .5, .85, .95, 1.5, 2
            "objective/log_ratio_abs_p95": 2 * LOG_1_5,
            "objective/progress_median": 0.95,
            "objective/reversed_share": 2 / 5,
            "objective/near_target_share": 1 / 5,
            "objective/wrong_direction_share": 1 / 5,
            "objective/reversed_negative_weight_share": strength[4] / sum(strength),
        },
        rel=1e-12,
    )


def test_progress_is_reported_for_small_radii_too() -> None:
    """A mean ratio needs delta ~ 1e-3, where no target is as far as 0.01 away (ALGORITHMS.md §1.3)."""
    objective = BernoulliKL(radius=1e-3, kappa=1.0, ratio="mean")
    turns = turn_table([1, 1], [0.5, 0.01], behaviour=torch.zeros(2))
    _, report = objective(torch.tensor([0.001, 0.5], dtype=torch.float64), turns)  # x* = 0.002; the other has none
    assert objective.summarise(report)["objective/progress_median"] == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_raise_and_name_the_turn(bad: float) -> None:
    turns = turn_table([2, 3, 1], [0.5, 0.5, 0.5])
    logprobs = turns.behaviour.clone()
    logprobs[3] = bad
    with pytest.raises(LogProbError, match=r"turn 1 .* token 1 is (nan|-?inf), and -1.0 under the behaviour") as caught:
        BernoulliKL()(logprobs, turns)
    assert caught.value.turn == 1


def test_a_behaviour_log_prob_that_is_not_finite_raises_too() -> None:
    turns = turn_table([1, 1], [0.5, 0.5], behaviour=torch.tensor([-1.0, -math.inf]))
    with pytest.raises(LogProbError, match="turn 1 "):
        BernoulliKL()(torch.tensor([-1.0, -1.0], dtype=torch.float64), turns)
