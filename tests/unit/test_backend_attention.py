"""Tree attention against a dense mask, and against its flattened self, in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from backend_models import pack_forest, random_forest

from megatron_treeopsd.backend import attention
from megatron_treeopsd.backend.attention import GatherRows, Rotate, padded_attention, plan_attention, rotary_table
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


@pytest.mark.parametrize("mask_elements", [attention.MASK_ELEMENTS, 64])
@pytest.mark.parametrize("seed", range(5))
def test_equals_attention_with_a_dense_mask(seed: int, mask_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradients; with a small limit on masks every chain is cut into pieces."""
    monkeypatch.setattr(attention, "MASK_ELEMENTS", mask_elements)
    packed = pack_forest(random_forest(np.random.default_rng(seed), trees=2, turns=12, length=40), share=True)
    inputs = [torch.randn(packed.token_count, n, WIDTH, dtype=torch.float64) for n in (HEADS, GROUPS, GROUPS)]
    weight = torch.randn(packed.token_count, HEADS * WIDTH, dtype=torch.float64)
    results = []
    for compute in (
        lambda q, k, v: padded_attention(q, k, v, plan_attention(packed), WIDTH**-0.5),
        lambda q, k, v: dense_attention(q, k, v, packed),
    ):
        leaves = [x.clone().requires_grad_() for x in inputs]
        output = compute(*leaves)
        (output * weight).sum().backward()
        results.append([output.detach(), *(leaf.grad for leaf in leaves)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-12, rtol=1e-12)


def test_groups_do_not_multiply_the_work() -> None:
    """Padding of a realistic micro-batch stays small, and few calls are made."""
    packed = pack_forest(random_forest(np.random.default_rng(0), trees=16, turns=20, length=30), share=True)
    plan = plan_attention(packed)
    chains = packed.query_offsets.numel() - 1
    assert len(plan.groups) < chains / 2
    assert plan.query_rows.numel() < 1.3 * packed.token_count
    assert plan.key_rows.numel() < 1.2 * packed.key_rows.numel()


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
    plan = plan_attention(packed)
    before = padded_attention(q, k, v, plan, 1.0)
    k = k.index_fill(0, torch.tensor([2, 3, 4]), 9.0)
    after = padded_attention(q, k, v, plan, 1.0)
    assert torch.equal(before[5:], after[5:])
    assert not torch.equal(before[2:5], after[2:5])
    moved = replace(packed, key_rows=packed.key_rows.flip(0))
    assert not torch.allclose(padded_attention(q, k, v, plan_attention(moved), 1.0)[5:], after[5:])
