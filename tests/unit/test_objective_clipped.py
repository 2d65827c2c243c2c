"""The clipped policy gradient against the formulas written out with plain loops in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from turn_tables import loss_and_gradient, random_case, turn_table

from megatron_treeopsd.objective import Clipped, LogProbError, TurnTable

pytestmark = pytest.mark.fast


def plain(
    logprobs: Tensor, turns: TurnTable, *, ratio: str, low: float, high: float, clip: bool, dual: float | None
) -> Tensor:
    """sum_v W_v f_v as ALGORITHMS.md §2 and §3 state it: one token, one turn, one sequence at a time."""
    parts = (logprobs - turns.behaviour).split(turns.lengths.tolist())
    pieces = turns.sequence.tolist()
    loss = torch.zeros((), dtype=torch.float64)
    for v, part in enumerate(parts):
        credit = float(turns.credit[v])
        if ratio == "token":
            ratios = [torch.exp(token) for token in part]
        elif ratio == "turn_sum":
            ratios = [torch.exp(part.sum())]
        else:
            own = (
                [p for p, piece in zip(parts, pieces, strict=True) if piece == pieces[v]]
                if ratio == "sequence"
                else [part]
            )
            mean = torch.cat(own).mean().detach()
            ratios = [torch.exp(mean) * torch.exp(token - token.detach()) for token in part]
        terms = []
        for r in ratios:
            term = r * credit
            if clip:
                term = torch.minimum(term, r.clamp(1 - low, 1 + high) * credit)
            if dual is not None and credit < 0:
                term = torch.maximum(term, torch.tensor(dual * credit, dtype=torch.float64))
            terms.append(term)
        loss = loss - turns.weight[v] * torch.stack(terms).mean()
    return loss


@pytest.mark.parametrize("ratio", ["token", "turn", "turn_sum", "sequence"])
@pytest.mark.parametrize(("clip", "dual"), [(True, None), (False, None), (True, 1.1), (False, 1.1)])
def test_value_and_gradient_equal_the_plain_formula(ratio: str, clip: bool, dual: float | None) -> None:
    cut_terms = 0.0
    for seed, (low, high) in itertools.product(range(8), [(0.2, 0.28), (0.003, 0.004)]):
        logprobs, turns = random_case(seed, spread=0.5)
        objective = Clipped(ratio=ratio, clip_low=low, clip_high=high, clip=clip, dual_clip=dual)
        loss, gradient = loss_and_gradient(objective, logprobs, turns)
        expected = plain(logprobs, turns, ratio=ratio, low=low, high=high, clip=clip, dual=dual)
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        torch.testing.assert_close(gradient, torch.autograd.grad(expected, logprobs)[0], rtol=1e-11, atol=1e-15)
        cut_terms += float(objective(logprobs, turns)[1]["clipped"].sum())
    assert (cut_terms > 0) == (clip or dual is not None)


def test_single_precision_agrees_with_double() -> None:
    for ratio in ("token", "turn", "turn_sum", "sequence"):
        logprobs, turns = random_case(4)
        single = turn_table(
            turns.lengths.tolist(), turns.credit.float(), behaviour=turns.behaviour, weight=turns.weight,
            sequence=turns.sequence.tolist(), dtype=torch.float32,
        )  # fmt: skip
        loss, gradient = loss_and_gradient(Clipped(ratio=ratio), logprobs, turns)
        loss32, gradient32 = loss_and_gradient(Clipped(ratio=ratio), logprobs.float(), single)
        assert loss32 == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(gradient32.double(), gradient, rtol=1e-4, atol=1e-7)


def one_turn(ratio: float, credit: float, **options: object) -> tuple[float, float]:
    """Value and gradient of f_v for a turn of one token with the given probability ratio."""
    turns = turn_table([1], [credit], weight=[1.0])
    logprobs = turns.behaviour + math.log(ratio)
    loss, gradient = loss_and_gradient(Clipped(**options), logprobs, turns)
    return loss, float(gradient[0])


@pytest.mark.parametrize(
    ("ratio", "credit", "dual", "value", "gradient"),
    [
        (1.0, 2.0, None, -2.0, -2.0),
        (1.5, 2.0, None, -2.4, 0.0),  # above 1 + eps: nothing left to gain
        (0.5, 2.0, None, -1.0, -1.0),  # below 1 - eps the minimum is the unclipped term
        (0.5, -2.0, None, 1.6, 0.0),
        (1.5, -2.0, None, 3.0, 3.0),
        (4.0, -2.0, 3.0, 6.0, 0.0),  # dual clip at 3 |C|
        (2.5, -2.0, 3.0, 5.0, 5.0),
        (9.0, 0.0, None, 0.0, 0.0),
    ],
)
def test_cases_by_hand(ratio: float, credit: float, dual: float | None, value: float, gradient: float) -> None:
    got = one_turn(ratio, credit, clip_low=0.2, clip_high=0.2, dual_clip=dual)
    assert got == pytest.approx((value, gradient), rel=1e-12, abs=1e-15)


def test_turns_without_credit_have_no_loss_however_far_they_moved() -> None:
    turns = turn_table([1, 1], [0.0, 0.0], behaviour=torch.tensor([-900.0, 0.0]))
    for objective in (Clipped(ratio="turn_sum"), Clipped(ratio="turn_sum", clip=False)):
        loss, gradient = loss_and_gradient(objective, torch.tensor([0.0, -900.0], dtype=torch.float64), turns)
        assert loss == 0
        assert gradient.tolist() == [0, 0]


def test_without_the_clip_the_ratio_stays() -> None:
    assert one_turn(1.5, 2.0, clip=False) == pytest.approx((-3.0, -3.0), rel=1e-12)
    assert one_turn(9.0, 0.0, clip=False) == (0.0, 0.0)


def test_a_turn_counts_by_its_tokens_mean_not_their_number() -> None:
    """Two turns of one and three tokens at ratio one: each token's gradient is -W C / L."""
    turns = turn_table([1, 3], [1.0, -2.0], weight=[0.25, 0.75])
    for ratio in ("token", "turn", "sequence"):
        _, gradient = loss_and_gradient(Clipped(ratio=ratio), turns.behaviour, turns)
        assert gradient.tolist() == pytest.approx([-0.25, 0.5, 0.5, 0.5], rel=1e-14)
    _, gradient = loss_and_gradient(Clipped(ratio="turn_sum"), turns.behaviour, turns)
    assert gradient.tolist() == pytest.approx([-0.25, 1.5, 1.5, 1.5], rel=1e-14)


def test_sequences_share_one_ratio() -> None:
    """Turns of 1 and 3 tokens in one sequence with sum l = 0.4: log s = 0.1 for both; a turn of its own has 0.3."""
    turns = turn_table([1, 3, 1], [1.0, 1.0, 1.0], sequence=[0, 0, 1])
    logprobs = turns.behaviour + torch.tensor([0.4, 0.0, 0.2, -0.2, 0.3], dtype=torch.float64)
    _, report = Clipped(ratio="sequence")(logprobs, turns)
    assert report["log_ratio"].tolist() == pytest.approx([0.1, 0.1, 0.3], rel=1e-12)


def test_huge_ratios_are_finite_where_the_clip_holds_and_raise_where_nothing_does() -> None:
    turns = turn_table([2, 2], [1.0, -1.0], behaviour=torch.full((4,), -700.0))
    falling = torch.tensor([0.0, 0.0, -1400.0, -1400.0], dtype=torch.float64)
    rising = falling.flip(0)
    for ratio in ("token", "turn_sum", "turn", "sequence"):
        _, gradient = loss_and_gradient(Clipped(ratio=ratio), falling, turns)
        assert (gradient == 0).all()
        _, gradient = loss_and_gradient(Clipped(ratio=ratio, dual_clip=3.0), rising, turns)
        assert torch.isfinite(gradient).all()
    with pytest.raises(LogProbError, match=r"turn 1 .*dual_clip") as caught:
        Clipped(ratio="turn_sum")(rising, turns)
    assert caught.value.turn == 1


@pytest.mark.parametrize("ratio", ["token", "turn_sum"])
def test_summary_by_hand(ratio: str) -> None:
    """Five one-token turns (a term each in both ratios): within, clipped above, clipped below, wrong way, no credit."""
    x, credit = [0.1, 0.5, -0.5, 0.2, 0.3], [1.0, 1.0, -1.0, -1.0, 0.0]
    turns = turn_table([1] * 5, credit, behaviour=torch.zeros(5))
    objective = Clipped(ratio=ratio)
    loss, report = objective(torch.tensor(x, dtype=torch.float64), turns)
    expected = -(math.exp(0.1) + 1.2 - 0.8 - math.exp(0.2)) / 5
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert objective.summarise(report) == pytest.approx(
        {
            "objective/loss": expected,
            "objective/log_ratio_abs_median": 0.3,
            "objective/log_ratio_abs_p95": 0.5,
            "objective/wrong_direction_share": 1 / 5,
            "objective/clipped_share": 2 / 5,
            "objective/kl_behaviour": sum(math.exp(v) - v - 1 for v in x) / 5,
        },
        rel=1e-12,
    )
