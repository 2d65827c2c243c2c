"""Muon against torch's, schedules against hand-computed rates, and what is refused."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from megatron_treeopsd.backend.muon import Muon, orthogonalize, qkv_split
from megatron_treeopsd.backend.optimizer import build_scheduler, check_muon
from megatron_treeopsd.config import Layout, Optimizer, RecipeError

pytestmark = pytest.mark.fast


def test_muon_equals_torch_on_a_plain_matrix() -> None:
    start, gradients = torch.randn(12, 8), [torch.randn(12, 8) for _ in range(5)]
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    optimizers = [
        Muon([{"params": [ours]}], split={}, lr=0.02, weight_decay=0.1),
        torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1),
    ]
    for gradient in gradients:
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    moved = (theirs - start).norm()
    assert moved > 0.1
    # torch iterates in bfloat16, ours in the parameter's precision
    assert (ours - theirs).norm() < 0.02 * moved


def test_muon_takes_q_k_and_v_for_three_matrices() -> None:
    """The fused matrix is [q q k v | q q k v]; training it equals training q, k and v apart."""
    groups, heads, dim, hidden = 2, 4, 3, 10
    start = torch.randn(groups * (heads // groups + 2) * dim, hidden)
    gradient = torch.randn_like(start)
    fused = start.clone().requires_grad_()
    split = qkv_split(groups=groups, dim=dim)
    fused.grad = gradient.clone()
    Muon([{"params": [fused]}], split={fused: split}, lr=0.5).step()
    for part, (initial, slope) in enumerate(zip(split(start), split(gradient), strict=True)):
        alone = initial.reshape(-1, hidden).clone().requires_grad_()
        alone.grad = slope.reshape(-1, hidden).clone()
        Muon([{"params": [alone]}], split={}, lr=0.5).step()
        assert alone.shape[0] == (heads, groups, groups)[part] * dim
        torch.testing.assert_close(split(fused.detach())[part].reshape(-1, hidden), alone.detach())


def test_orthogonalised_matrix_has_singular_values_near_one() -> None:
    for shape in ((6, 20), (20, 6)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape), steps=5))
        assert values.min() > 0.5
        assert values.max() < 1.5


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"schedule": "constant"}, [1e-3] * 6),
        ({"schedule": "constant", "warmup_steps": 4}, [0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3]),
        ({"schedule": "linear", "min_lr": 1e-4, "warmup_steps": 2}, [0.5e-3, 1e-3, 7.75e-4, 5.5e-4, 3.25e-4, 1e-4]),
        (
            {"schedule": "cosine", "warmup_steps": 2},
            [0.5e-3, 1e-3, *(1e-3 * (1 + math.cos(math.pi * i / 4)) / 2 for i in (1, 2, 3, 4))],
        ),
    ],
)
def test_learning_rates(section: dict[str, object], expected: list[float]) -> None:
    """Rates of the six steps of a run; weight decay spares the group that says so, whatever the schedule."""
    groups = [{"max_lr": 1e-3, "min_lr": section.get("min_lr", 0.0), "wd_mult": mult} for mult in (1.0, 0.0)]
    optimizer = SimpleNamespace(param_groups=groups)
    options = Optimizer.model_validate({"lr": 1e-3, "weight_decay": 0.1, **section})
    scheduler = build_scheduler(options, optimizer, total_steps=6)  # type: ignore[arg-type]
    rates = []
    for _ in expected:
        scheduler.step(1)
        rates.append(groups[0]["lr"])
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert rates == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("section", "total_steps", "message"),
    [
        ({"schedule": "cosine"}, None, "set steps=N"),
        ({"schedule": "linear", "warmup_steps": 6}, 6, "leaves nothing of the run's 6"),
    ],
)
def test_schedules_without_an_end(section: dict[str, object], total_steps: int | None, message: str) -> None:
    options = Optimizer.model_validate(section)
    with pytest.raises(RecipeError, match=message):
        build_scheduler(options, SimpleNamespace(param_groups=[]), total_steps=total_steps)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "bf16", "message"),
    [
        ({"tp": 2}, False, "layout.tp=2"),
        ({"distributed_optimizer": True}, False, "layout.distributed_optimizer=true"),
        ({}, True, "model.dtype=bfloat16"),
    ],
)
def test_muon_is_refused_where_it_would_see_pieces(layout: dict[str, object], bf16: bool, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check_muon(0.02, Layout.model_validate(layout), bf16=bf16)
