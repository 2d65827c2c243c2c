"""The Megatron policy in one process: equal to transformers, trees equal to flattened sequences, honest failures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from backend_models import (
    TurnSquares,
    empty_batch,
    make_policy,
    pack_forest,
    random_forest,
    recipe,
    reference_logprobs,
)
from transformers import AutoConfig, PreTrainedModel

from megatron_treeopsd import weights
from megatron_treeopsd.backend.model import build_model, check_model
from megatron_treeopsd.backend.parallel import ParallelState, check_world
from megatron_treeopsd.backend.policy import NonFiniteError, Policy
from megatron_treeopsd.batch.context import pad_rows
from megatron_treeopsd.batch.packed import PackedTrees
from megatron_treeopsd.config import Layout, RecipeError
from megatron_treeopsd.objective import BernoulliKL, Clipped, Likelihood
from megatron_treeopsd.objective.base import Objective, Report, TurnTable

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    make_policy(folder)
    return folder


def batch(seed: int = 0, *, trees: int = 2) -> PackedTrees:
    return pack_forest(random_forest(np.random.default_rng(seed), trees=trees, turns=8), share=True)


@pytest.mark.parametrize("moe", [True, False], ids=["moe", "dense"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_log_probs_equal_transformers(moe: bool, tied: bool, state: ParallelState, tmp_path: Path) -> None:
    reference = make_policy(tmp_path, moe=moe, tied=tied)
    policy = Policy(recipe(tmp_path), state)
    forest = random_forest(np.random.default_rng(0), turns=8)
    for share in (True, False):
        packed = pack_forest(forest, share=share)
        (ours,) = policy.log_probs([packed])
        with torch.no_grad():
            expected = reference_logprobs(reference, forest, packed)
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
    assert policy.parameter_count == sum(p.numel() for p in reference.parameters())


def test_update_equals_adamw_on_transformers(state: ParallelState, tmp_path: Path) -> None:
    """Three steps against autograd over whole sequences and torch's AdamW, with clipping and no decay of norms."""
    reference = make_policy(tmp_path)
    optimizer = {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1, "clip_grad": 1.0}
    policy = Policy(recipe(tmp_path, optimizer=optimizer), state)
    decay = [p for p in reference.parameters() if p.dim() > 1]
    rest = [p for p in reference.parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), eps=1e-4)
    objective = TurnSquares()
    for step in range(3):
        forests = [random_forest(np.random.default_rng(10 * step + i)) for i in range(2)]
        batches = [pack_forest(forest, share=True) for forest in forests]
        result = policy.update([*batches, empty_batch()], objective)
        adamw.zero_grad()
        losses = [
            objective(reference_logprobs(reference, forest, packed), packed.turns)[0]
            for forest, packed in zip(forests, batches, strict=True)
        ]
        total = torch.stack(losses).sum()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        adamw.step()
        assert result.loss == pytest.approx(total.item(), abs=1e-5, rel=1e-5)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-4)
        assert result.lr == 1e-3
        assert [len(report) for report in result.reports] == [1, 1, 0]
    compare_weights(policy, reference, tolerance=2e-5)


def compare_weights(policy: Policy, reference: PreTrainedModel, *, tolerance: float) -> None:
    ours = dict(policy.named_tensors())
    for name, expected in reference.state_dict().items():
        if name.endswith("gate_up_proj"):
            for expert, fused in enumerate(expected):
                for part, value in zip(("gate_proj", "up_proj"), fused.chunk(2), strict=True):
                    found = ours[name.replace("gate_up_proj", f"{expert}.{part}.weight")]
                    torch.testing.assert_close(found, value, atol=tolerance, rtol=0)
        elif name in ours:
            torch.testing.assert_close(ours[name], expected, atol=tolerance, rtol=0)


@pytest.fixture
def double_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's router takes its softmax in float32 whatever its input; float64 tests need all of it in float64."""
    softmax = torch.softmax

    def wide(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return softmax(x, dim=dim, dtype=x.dtype if x.dtype == torch.float64 else dtype)

    monkeypatch.setattr(torch, "softmax", wide)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("double_router")
def test_tree_gradient_equals_flattened_gradient(seed: int, state: ParallelState, checkpoint: Path) -> None:
    """Float64 through the whole Megatron model; wrong positions and a wrong edge must be seen (negative controls)."""
    hf = AutoConfig.from_pretrained(checkpoint)
    model = build_model(hf, Layout(), state, dtype=torch.float64)
    weights.load_pretrained(model, checkpoint, hf)
    forest = random_forest(np.random.default_rng(seed), trees=2, turns=8)
    packed = pack_forest(forest, share=True, dtype=torch.float64)

    def gradient(packed: PackedTrees) -> tuple[float, torch.Tensor]:
        model.zero_grad()
        loss, _ = TurnSquares()(model(packed), packed.turns)
        loss.backward()
        return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])

    flat_loss, flat = gradient(pack_forest(forest, share=False, dtype=torch.float64))
    tree_loss, tree = gradient(packed)
    assert tree_loss == pytest.approx(flat_loss, rel=1e-12)
    assert (tree - flat).norm() <= 1e-10 * flat.norm()
    wrong_edges = packed.edge_rows.clone()
    wrong_edges[-1] -= 1
    for wrong in (
        replace(packed, positions=torch.arange(packed.token_count)),
        replace(packed, edge_rows=wrong_edges),
    ):
        assert (gradient(wrong)[1] - flat).norm() > 1e-3 * flat.norm()


def test_same_seed_same_bits(state: ParallelState, checkpoint: Path) -> None:
    runs = []
    for _ in range(2):
        policy = Policy(recipe(checkpoint, optimizer={"muon_lr": 0.02}), state)
        losses = [policy.update([batch(step), batch(step + 9)], TurnSquares()).loss for step in range(2)]
        runs.append((losses, dict(policy.named_tensors())))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(value, runs[1][1][name]) for name, value in runs[0][1].items())


def test_recompute_changes_memory_only(state: ParallelState, checkpoint: Path) -> None:
    results = []
    for recompute in (False, True):
        policy = Policy(recipe(checkpoint, model={"recompute": recompute}), state)
        result = policy.update([batch()], TurnSquares())
        results.append((result.loss, result.grad_norm))
    assert results[0] == results[1]


def test_bfloat16_trains(state: ParallelState, checkpoint: Path) -> None:
    exact = Policy(recipe(checkpoint), state).log_probs([batch()])[0]
    policy = Policy(recipe(checkpoint, model={"dtype": "bfloat16"}, optimizer={"lr": 1e-3}), state)
    (rounded,) = policy.log_probs([batch()])
    assert rounded.dtype == torch.float32
    assert (rounded - exact).abs().mean() < 0.1
    losses = [policy.update([batch()], TurnSquares()).loss for _ in range(5)]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("optimizer", [{}, {"muon_lr": 0.02}], ids=["adamw", "muon"])
def test_training_lowers_the_loss(optimizer: dict[str, object], state: ParallelState, checkpoint: Path) -> None:
    policy = Policy(recipe(checkpoint, optimizer={"lr": 1e-3, **optimizer}), state)
    losses = [policy.update([batch()], TurnSquares()).loss for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.7 * losses[0]


def test_muon_trains_the_projections_and_adamw_the_rest(state: ParallelState, checkpoint: Path) -> None:
    policy = Policy(recipe(checkpoint, optimizer={"lr": 1e-3, "muon_lr": 0.02}), state)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    policy.update([batch()], TurnSquares())
    for name, parameter in policy.model.named_parameters():
        moved = (parameter - before[name]).abs().max().item()
        if "linear_qkv" in name or "linear_proj" in name:
            assert 1.5e-3 < moved < 0.04, name
        else:
            assert 0.9e-3 < moved < 1.1e-3, name


class NotANumber(Objective):
    """Makes the loss or the gradient of one turn not a number."""

    def __init__(self, turn: int, where: str) -> None:
        self.turn, self.where = turn, where

    def __call__(self, logprobs: torch.Tensor, turns: TurnTable) -> tuple[torch.Tensor, Report]:
        one = logprobs[turns.turn_of_token == self.turn]
        if self.where == "loss":
            return logprobs.sum() + (one * torch.nan).sum(), {}
        return logprobs.sum() + (one - one.detach()).abs().sqrt().sum(), {}  # slope 0 * infinity


@pytest.mark.parametrize("where", ["loss", "gradient norm"])
def test_not_a_number_names_the_turn(where: str, state: ParallelState, checkpoint: Path) -> None:
    policy = Policy(recipe(checkpoint), state)
    packed = batch()
    with pytest.raises(NonFiniteError, match=f"{where} is nan.*: {packed.name(3)}"):
        policy.update([packed], NotANumber(3, where))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_behaviour_log_probs_that_are_no_numbers(value: float, state: ParallelState, checkpoint: Path) -> None:
    policy = Policy(recipe(checkpoint), state)
    packed = batch()
    behaviour = packed.turns.behaviour.clone()
    behaviour[packed.turns.offsets[2]] = value
    broken = replace(packed, turns=replace(packed.turns, behaviour=behaviour))
    with pytest.raises(NonFiniteError, match=f"{packed.name(2)}: the log-prob of its token 0 is"):
        policy.update([broken], BernoulliKL())


def test_log_probs_are_of_the_distribution_that_was_sampled_from(state: ParallelState, tmp_path: Path) -> None:
    """Temperature 0.7 in log-probs and objectives of sampled turns; a plain likelihood is that of the policy itself."""
    reference = make_policy(tmp_path)
    forest = random_forest(np.random.default_rng(0), turns=8)
    packed = pack_forest(forest, share=True)
    cold = Policy(recipe(tmp_path, rollout={"temperature": 0.7}), state)
    head = reference.lm_head.weight
    with torch.no_grad():
        plain = reference_logprobs(reference, forest, packed)
        reference.lm_head.weight = torch.nn.Parameter(head / 0.7)
        sampled = reference_logprobs(reference, forest, packed)
    assert (plain - sampled).abs().max() > 0.1
    torch.testing.assert_close(cold.log_probs([packed])[0], sampled, atol=1e-5, rtol=1e-5)
    turns = replace(packed.turns, behaviour=sampled.float())
    result = cold.update([replace(packed, turns=turns)], Clipped(ratio="turn_sum"))
    assert result.reports[0]["log_ratio"].abs().max() < 1e-4
    fresh = Policy(recipe(tmp_path, rollout={"temperature": 0.7}), state)
    reference.lm_head.weight = torch.nn.Parameter(head)
    nll = fresh.update([packed], Likelihood()).loss
    means = torch.stack([-part.mean() for part in plain.split(packed.turns.lengths.tolist())])
    assert nll == pytest.approx(float((packed.turns.weight * means).sum()), rel=1e-5)


def test_padding_rows_touch_nothing(state: ParallelState, checkpoint: Path) -> None:
    policy = Policy(recipe(checkpoint), state)
    packed = batch()
    padded = pad_rows(packed, packed.token_count + 5)
    assert padded.token_count == packed.token_count + 5
    torch.testing.assert_close(policy.log_probs([padded]), policy.log_probs([packed]), atol=1e-6, rtol=0)
    assert pad_rows(packed, 1) is packed


def test_no_micro_batches(state: ParallelState, checkpoint: Path) -> None:
    policy = Policy(recipe(checkpoint), state)
    assert policy.log_probs([]) == []
    assert policy.log_probs([empty_batch()])[0].shape == (0,)
    with pytest.raises(ValueError, match="at least one micro-batch"):
        policy.update([], TurnSquares())


@pytest.mark.parametrize(
    ("layout", "world", "message"),
    [
        ({"tp": 2}, 3, r"tp=2 \* cp=1 \* pp=1 = 2 processes .* world of 3 \(tp=2 cp=1 pp=1 ep=1 etp=1\)"),
        ({"tp": 2, "cp": 2}, 6, r"tp=2 \* cp=2 \* pp=1 = 4 processes .* world of 6"),
        ({"ep": 4}, 2, r"etp=1 \* ep=4 \* pp=1 = 4 processes for experts do not divide the world of 2"),
    ],
)
def test_a_layout_that_does_not_divide_the_world(layout: dict[str, int], world: int, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check_world(Layout.model_validate(layout), world)


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ({"tp": 3}, {}, "layout.tp=3 does not divide the model's num_attention_heads=4"),
        ({"tp": 4}, {}, "layout.tp=4 does not divide the model's num_key_value_heads=2"),
        ({"pp": 4}, {}, "layout.pp=4 does not divide the model's num_hidden_layers=2"),
        ({"ep": 3}, {}, "layout.ep=3 does not divide the model's num_experts=8"),
        ({"cp": 5, "etp": 5}, {}, "layout.etp=5 does not divide the model's moe_intermediate_size=32"),
        ({"tp": 2, "etp": 2, "ep": 2}, {}, "layout.etp=2 with layout.ep=2 spreads experts over ranks with other"),
        ({}, {"attention_bias": True}, "attention_bias=True is not supported, only False"),
        ({}, {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not supported"),
    ],
)
def test_what_cannot_be_built(
    layout: dict[str, int], changes: dict[str, object], message: str, checkpoint: Path
) -> None:
    hf = AutoConfig.from_pretrained(checkpoint)
    for name, value in changes.items():
        setattr(hf, name, value)
    with pytest.raises(RecipeError, match=message):
        check_model(hf, Layout.model_validate(layout))


def test_a_missing_checkpoint(state: ParallelState, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json there"):
        Policy(recipe(tmp_path / "nowhere"), state)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "gpt2"}', "model_type='gpt2' is not supported; supported: llama, qwen3, qwen3_moe"),
        ('{"model_type": ', r"config\.json: not a model configuration"),
        ("{}", r"config\.json: not a model configuration"),
    ],
)
def test_a_checkpoint_of_something_else(text: str, message: str, state: ParallelState, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RecipeError, match=message):
        Policy(recipe(tmp_path), state)
