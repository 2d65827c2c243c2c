"""What all objectives have in common, the likelihood objective, and building them from recipes."""

from __future__ import annotations

import ast
import math
import sys
from pathlib import Path

import pytest
import torch
from turn_tables import loss_and_gradient, random_case, turn_table

import megatron_treeopsd.objective
from megatron_treeopsd import config
from megatron_treeopsd.objective import BernoulliKL, Clipped, Likelihood, LogProbError, Objective, TurnTable, build
from megatron_treeopsd.objective.segments import quantile, turn_sums

pytestmark = pytest.mark.fast

OBJECTIVES = [
    BernoulliKL(kappa=1.0),
    BernoulliKL(ratio="sqrt", teacher="affine_odds", mixture_weight=True, one_sided="negative"),
    Clipped(ratio="token"),
    Clipped(ratio="turn"),
    Clipped(ratio="turn_sum"),
    Clipped(ratio="sequence", dual_clip=3.0),
    Likelihood(),
]


def slice_table(turns: TurnTable, start: int, stop: int) -> TurnTable:
    tokens = slice(int(turns.offsets[start]), int(turns.offsets[stop]))
    per_turn = {name: getattr(turns, name)[start:stop] for name in ("credit", "weight", "leaves", "peak")}
    sequence = turns.sequence[start:stop]
    return TurnTable(
        offsets=turns.offsets[start : stop + 1] - turns.offsets[start],
        behaviour=turns.behaviour[tokens],
        sequence=sequence - sequence[0],
        **per_turn,
    )


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_an_empty_table_gives_zero_with_gradient(objective: Objective) -> None:
    turns = turn_table([], [])
    parameter = torch.ones(3, dtype=torch.float64, requires_grad=True)
    loss, report = objective(parameter[:0], turns)
    assert loss.item() == 0
    assert torch.autograd.grad(loss, parameter)[0].tolist() == [0, 0, 0]
    assert set(report) == set(objective(turn_table([1], [0.5]).behaviour, turn_table([1], [0.5]))[1])
    assert objective.summarise(report)["objective/loss"] == 0


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_losses_reports_and_gradients_add_up_over_micro_batches(objective: Objective) -> None:
    logprobs, turns = random_case(1)
    loss, gradient = loss_and_gradient(objective, logprobs, turns)
    whole = objective(logprobs, turns)[1]
    cut = int(turns.offsets[6])  # between two sequences
    parts = [(logprobs[:cut], slice_table(turns, 0, 6)), (logprobs[cut:], slice_table(turns, 6, 12))]
    results = [loss_and_gradient(objective, part, table) for part, table in parts]
    assert loss == pytest.approx(sum(result[0] for result in results), rel=1e-12)
    torch.testing.assert_close(gradient, torch.cat([result[1] for result in results]), rtol=1e-13, atol=0)
    reports = [objective(part, table)[1] for part, table in parts]
    joined = {name: torch.cat([report[name] for report in reports]) for name in whole}
    assert objective.summarise(joined) == pytest.approx(objective.summarise(whole), rel=1e-12)
    assert objective.summarise(joined)["objective/loss"] == pytest.approx(loss, rel=1e-12)
    assert not any(values.requires_grad for values in whole.values())


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_repeated_calls_give_the_same_bits(objective: Objective) -> None:
    logprobs, turns = random_case(9, count=60)
    first, second = (loss_and_gradient(objective, logprobs, turns) for _ in range(2))
    assert first[0] == second[0]
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_not_a_number_raises_and_names_the_turn(objective: Objective) -> None:
    turns = turn_table([1, 2, 3], [0.5, 0.5, 0.5])
    logprobs = turns.behaviour.clone()
    logprobs[4] = math.nan
    with pytest.raises(LogProbError, match=r"turn 2 .* token 1 is nan") as caught:
        objective(logprobs, turns)
    assert caught.value.turn == 2


def test_likelihood_by_hand() -> None:
    """Turns of two tokens and one: f = 1.5 and 3, weights by tokens give the mean over tokens."""
    turns = turn_table([2, 1], [0.0, -5.0], weight=[2 / 3, 1 / 3])
    logprobs = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    loss, gradient = loss_and_gradient(Likelihood(), logprobs, turns)
    assert loss == pytest.approx(2.0, rel=1e-15)
    assert gradient.tolist() == pytest.approx([-1 / 3] * 3, rel=1e-15)
    summary = Likelihood().summarise(Likelihood()(logprobs, turns)[1])
    assert summary == pytest.approx({"objective/loss": 2.0, "objective/nll": 2.0}, rel=1e-15)


def test_turn_sums_have_their_gradient() -> None:
    turns = turn_table([1, 3, 2], [0.0] * 3)
    values = torch.arange(6, dtype=torch.float64, requires_grad=True)
    sums = turn_sums(values, turns)
    assert sums.tolist() == [0, 6, 9]
    assert torch.autograd.grad(sums @ torch.tensor([1.0, 10, 100], dtype=torch.float64), values)[0].tolist() == [
        1, 10, 10, 10, 100, 100,
    ]  # fmt: skip


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2.0), (0.95, 4.0), (0.25, 1.0), (0.0, 1.0), (1.0, 4.0)])
def test_quantile_is_the_smallest_value_that_covers_the_share(share: float, expected: float) -> None:
    assert quantile(torch.tensor([3.0, 1.0, 4.0, 2.0]), share) == expected


def test_sections_build_their_objectives() -> None:
    section = config.BernoulliKL(
        name="bernoulli_kl", teacher="affine_odds", ratio="sqrt", radius=0.2, kappa="max", one_sided="both",
        mixture_weight=True, scale="one", max_log_ratio=3.0,
    )  # fmt: skip
    assert build(section) == BernoulliKL("affine_odds", "sqrt", 0.2, "max", "both", True, "one", 3.0)
    clipped = config.Clipped(name="clipped", ratio="turn", clip_low=0.003, clip_high=0.004, clip=False, dual_clip=3.0)
    assert build(clipped) == Clipped("turn", 0.003, 0.004, False, 3.0)
    assert build(config.Likelihood(name="likelihood")) == Likelihood()
    assert [kind.uses_behaviour for kind in (BernoulliKL, Clipped, Likelihood)] == [True, True, False]


@pytest.mark.parametrize(
    ("section", "objective"),
    [(config.BernoulliKL(name="bernoulli_kl"), BernoulliKL()), (config.Clipped(name="clipped"), Clipped())],
)
def test_defaults_of_recipe_and_class_are_the_same(section: config.BernoulliKL, objective: Objective) -> None:
    assert build(section) == objective


def test_objectives_import_torch_only() -> None:
    """At run time: what stands behind TYPE_CHECKING is never executed. Kernels, which are imported inside calls where
    they can run, import Triton besides."""
    folder = Path(megatron_treeopsd.objective.__file__).parent
    foreign = set()
    for path in folder.rglob("*.py"):
        imported = set()
        for node in ast.parse(path.read_text()).body:  # the imports of a module stand at its top level
            if isinstance(node, ast.ImportFrom):
                imported.add(node.module)
            elif isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
        known = {"torch", *sys.stdlib_module_names, *(["triton"] if path.parent.name == "kernels" else [])}
        foreign |= {name for name in imported if name.split(".")[0] not in known}
    assert foreign
    assert all((name + ".").startswith("megatron_treeopsd.objective.") for name in foreign), foreign
