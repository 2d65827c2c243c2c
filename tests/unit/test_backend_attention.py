"""Tree attention against a dense mask, and against its flattened self, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from backend_models import pack_forest, random_forest

from megatron_treeopsd.backend import attention_sdpa
from megatron_treeopsd.backend.attention import (
    AttentionKernel,
    Rotate,
    check_kernel,
    choose_kernel,
    rotary_table,
    varlen_kernel,
)
from megatron_treeopsd.backend.attention_sdpa import plan_attention
from megatron_treeopsd.backend.attention_varlen import VarlenPlan
from megatron_treeopsd.backend.rows import GatherRows
from megatron_treeopsd.batch.packed import PackedTrees

pytestmark = pytest.mark.fast

HEADS, GROUPS, WIDTH = 4, 2, 8


def dense_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedTrees) -> torch.Tensor:
    """The same by a T x T mask, written from the definition: query i of a chain sees keys 0 .. k-q+i."""
    rows = packed.token_count
    visible = torch.zeros(rows, rows, dtype=torch.bool)
    for c in range(len(packed.query_offsets) - 1):
        first, last = packed.query_offsets[c : c + 2].tolist()
        path = packed.key_rows[packed.key_offsets[c] : packed.key_offsets[c + 1]]
        for i in range(last - first):
            visible[first + i, path[: len(path) - (last - first) + i + 1]] = True
    key, value = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / WIDTH**0.5
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).reshape(rows, -1)


def attend(
    kernel: AttentionKernel, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedTrees
) -> torch.Tensor:
    """What `TreeAttention` does after the rotation."""
    plan = kernel.plan(packed, query.dtype)
    keys, values = (GatherRows.apply(x, plan.key_rows) for x in (key, value))
    return kernel.attend(query, keys, values, plan, WIDTH**-0.5)


def chain_by_chain(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: VarlenPlan, scale: float, *, shift: int = 0
) -> torch.Tensor:
    """What flash attention over varying lengths computes. Another alignment of the mask hides `shift` more keys."""
    assert plan.query_offsets.dtype == plan.key_offsets.dtype == torch.int32
    outputs = []
    lengths = (plan.query_offsets.diff().tolist(), plan.key_offsets.diff().tolist())
    assert plan.max_queries == max(lengths[0])
    assert plan.max_keys == max(lengths[1])
    for q, k, v in zip(query.split(lengths[0]), keys.split(lengths[1]), values.split(lengths[1]), strict=True):
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        visible = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q) - shift)
        scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~visible, -torch.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(outputs)


SDPA = choose_kernel(torch.device("cpu"), torch.float64)
VARLEN = varlen_kernel("reference", chain_by_chain)


@pytest.mark.parametrize("kernel", ["grouped", "long runs", "varlen"])
@pytest.mark.parametrize("seed", range(5))
def test_equals_attention_with_a_dense_mask(seed: int, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradients; `long runs` attends every run without a mask, in strips and their two parts."""
    if kernel == "long runs":
        monkeypatch.setattr(attention_sdpa, "LONG", 1)
        monkeypatch.setattr(attention_sdpa, "STRIP", 5)
    packed = pack_forest(random_forest(np.random.default_rng(seed), trees=2, turns=12, length=40), share=True)
    inputs = [torch.randn(packed.token_count, n, WIDTH, dtype=torch.float64) for n in (HEADS, GROUPS, GROUPS)]
    weight = torch.randn(packed.token_count, HEADS * WIDTH, dtype=torch.float64)
    results = []
    for compute in (
        lambda q, k, v: attend(VARLEN if kernel == "varlen" else SDPA, q, k, v, packed),
        lambda q, k, v: dense_attention(q, k, v, packed),
    ):
        leaves = [x.clone().requires_grad_() for x in inputs]
        output = compute(*leaves)
        (output * weight).sum().backward()
        results.append([output.detach(), *(leaf.grad for leaf in leaves)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-12, rtol=1e-12)


def test_bfloat16_long_runs() -> None:
    """Merging two parts loses no more than rounding the result does."""
    tree = [[-1, *range(100)], [0, *range(100)], [0, *range(90)]]
    packed = pack_forest([tree], share=True)
    exact = [torch.randn(packed.token_count, n, WIDTH) for n in (HEADS, GROUPS, GROUPS)]
    rounded = attend(SDPA, *(x.bfloat16() for x in exact), packed)  # type: ignore[misc]
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), dense_attention(*exact, packed), atol=0.02, rtol=0.02)


def test_groups_do_not_multiply_the_work() -> None:
    """Padding of a realistic micro-batch stays small, and few calls are made."""
    packed = pack_forest(random_forest(np.random.default_rng(0), trees=16, turns=20, length=30), share=True)
    plan = plan_attention(packed, torch.float32)
    chains = packed.query_offsets.numel() - 1
    assert len(plan.groups) < chains / 2
    assert plan.query_rows.numel() < 1.3 * packed.token_count
    assert plan.key_rows.numel() < 1.2 * packed.key_rows.numel()


def test_no_memory_grows_with_queries_times_keys() -> None:
    """A path of 4,000 with forks of 4,000: neither a mask nor anything kept for the backward pass is that large."""
    tree = [[-1, *[1] * 4000], [0, *[1] * 4000], [0, *[1] * 4000], [0, *[1] * 8]]
    packed = pack_forest([tree], share=True)
    plan = plan_attention(packed, torch.float32)
    assert sum(group.mask.numel() for group in plan.groups if group.mask is not None) < 64 * 4064
    kept = []
    q, k, v = (torch.randn(packed.token_count, 1, 8, requires_grad=True) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        attend(SDPA, q, k, v, packed)
    assert max(kept) <= plan.key_rows.numel() * 8


def test_a_kernel_that_aligns_otherwise_is_refused() -> None:
    def top_left(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: VarlenPlan, scale: float) -> Any:
        shift = int((plan.key_offsets.diff() - plan.query_offsets.diff()).max())
        return chain_by_chain(query, keys, values, plan, scale, shift=shift)

    for kernel in (SDPA, VARLEN):
        check_kernel(kernel, torch.device("cpu"), torch.float32)
    with pytest.raises(RuntimeError, match="top left does not mask as tree attention needs it"):
        check_kernel(varlen_kernel("top left", top_left), torch.device("cpu"), torch.float32)


def test_gradients_of_a_shared_row_are_summed_in_float32() -> None:
    """256 gradients of 1 and one of 2**-8 in bfloat16: adding one by one in bfloat16 would stop at 256."""
    source = torch.zeros(1, 4, dtype=torch.bfloat16, requires_grad=True)
    GatherRows.apply(source, torch.zeros(512, dtype=torch.int64)).backward(torch.ones(512, 4, dtype=torch.bfloat16))
    assert source.grad is not None
    assert source.grad.tolist() == [[512.0] * 4]


def test_rotary_table_by_hand() -> None:
    """Row at depth 3, dim 4, base 100: angles 3 and 0.3; pair (x0, x2) turns by the first, (x1, x3) by the second."""
    cos, sin = rotary_table(torch.tensor([0, 3]), dim=4, base=100.0, dtype=torch.float64)
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]] * 2, dtype=torch.float64)
    turned = Rotate.apply(x, cos, sin)
    c, s, d, t = np.cos(3), np.sin(3), np.cos(0.3), np.sin(0.3)
    expected = [1 * c - 3 * s, 2 * d - 4 * t, 3 * c + 1 * s, 4 * d + 2 * t]
    torch.testing.assert_close(turned[0], x[0])
    np.testing.assert_allclose(turned[1, 0].numpy(), expected, rtol=1e-12)


def test_rotation_gradient() -> None:
    cos, sin = rotary_table(torch.tensor([2, 5, 7]), dim=6, base=10.0, dtype=torch.float64)
    x = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: Rotate.apply(x, cos, sin), x)


def test_a_chain_sees_its_own_path_only() -> None:
    """Changing the keys of one branch changes nothing in its sibling."""
    tree = [[-1, 1, 2], [0, 3, 4, 5], [0, 6, 7]]
    packed = pack_forest([tree], share=True)
    q, k, v = (torch.randn(7, n, WIDTH) for n in (HEADS, GROUPS, GROUPS))
    before = attend(SDPA, q, k, v, packed)
    k = k.index_fill(0, torch.tensor([2, 3, 4]), 9.0)
    after = attend(SDPA, q, k, v, packed)
    assert torch.equal(before[5:], after[5:])
    assert not torch.equal(before[2:5], after[2:5])
    moved = replace(packed, key_rows=packed.key_rows.flip(0))
    assert not torch.allclose(attend(SDPA, q, k, v, moved)[5:], after[5:])
