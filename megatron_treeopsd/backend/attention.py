"""Tree attention: every chain's queries attend to the whole path in front of them, no token is computed twice.

    q, k, v [T, heads, dim] ─► rotate by depth ─► gather the keys of every chain's path ─► attention, bottom-right
    causal, chain by chain ─► rows [T, heads * dim]

Exact, not an approximation: a key that several chains share receives the sum of their gradients (PERFORMANCE.md §B).
With context parallelism the gathering goes over all ranks that share a micro-batch; nothing else changes.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_treeopsd.backend.attention_sdpa import plan_attention, sdpa_attention
from megatron_treeopsd.backend.attention_varlen import Varlen, flash_varlen, plan_varlen, torch_varlen, varlen_attention
from megatron_treeopsd.backend.rows import GatherRows
from megatron_treeopsd.batch.pack import TrainedTree, pack
from megatron_treeopsd.batch.packed import PackedTrees
from megatron_treeopsd.batch.pieces import cut
from megatron_treeopsd.tree import ROOT, Question, RolloutTree, Turn


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """A way to compute tree attention: `plan` once per micro-batch, `attend` once per layer.

    Attributes:
        name: what it is and why it was chosen, for people.
        plan: (micro-batch, dtype of queries and keys) -> a plan, with the rows of the keys to gather as `key_rows`.
        attend: (query [T, heads, dim], gathered keys and values [len(key_rows), groups, dim], plan, softmax scale)
            -> [T, heads * dim].
    """

    name: str
    plan: Callable[[PackedTrees, torch.dtype], Any]
    attend: Callable[[Tensor, Tensor, Tensor, Any, float], Tensor]


def choose_kernel(device: torch.device, dtype: torch.dtype) -> AttentionKernel:
    """The fastest kernel that is there. Called at start-up.

    Raises RuntimeError if a GPU kernel does not compute what `check_kernel` expects of it.
    """

    def sdpa(reason: str) -> AttentionKernel:
        return AttentionKernel(f"scaled dot product attention ({reason})", plan_attention, sdpa_attention)

    if device.type != "cuda":
        return sdpa("no GPU")
    if dtype not in (torch.bfloat16, torch.float16):
        return sdpa(f"flash attention does not take {dtype}; set model.dtype=bfloat16 for it")
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    if hopper and importlib.util.find_spec("flash_attn_interface") is not None:
        kernel = varlen_kernel("FlashAttention 3 (Hopper)", flash_varlen("flash_attn_interface"))
    elif importlib.util.find_spec("flash_attn") is not None:
        missing = "flash_attn_interface is not installed" if hopper else "this GPU is not a Hopper"
        kernel = varlen_kernel(f"FlashAttention 2 (no version 3: {missing})", flash_varlen("flash_attn"))
    else:
        kernel = varlen_kernel("torch's flash attention (no flash-attn package is installed)", torch_varlen)
    check_kernel(kernel, device, dtype)
    return kernel


def varlen_kernel(name: str, function: Varlen) -> AttentionKernel:
    return AttentionKernel(name, plan_varlen, partial(varlen_attention, function))


def check_kernel(kernel: AttentionKernel, device: torch.device, dtype: torch.dtype) -> None:
    """Raise RuntimeError unless `kernel` aligns its causal mask to the end of the keys.

    Aligned to the start, it would run without complaint and train something else. All scores are equal here, so every
    result is the mean of the values that its row sees: rows 0 to 3 are a path, and rows 4 and 5 fork from row 2.
    """
    tree = RolloutTree(Question("check of the attention kernel", "", ()), [0, 0, 0])
    for chain, length in enumerate((1, 2)):
        tree.add(Turn(ROOT, [0] * length, [0.0] * length, terminal=True, chain=chain), merge=False)
    item = TrainedTree(tree, np.zeros(2), [np.zeros(1), np.zeros(2)])
    packed = pack(cut(tree, 0, budget=6), [item], [np.zeros(2)]).to(device)
    plan = kernel.plan(packed, dtype)
    values = torch.arange(1.0, 7.0, device=device).to(dtype)[:, None, None].expand(6, 1, 64)
    query = torch.zeros(6, 2, 64, dtype=dtype, device=device)
    keys = torch.zeros(plan.key_rows.numel(), 1, 64, dtype=dtype, device=device)
    found = kernel.attend(query, keys, values[plan.key_rows], plan, 1.0)[:, 0].float()
    expected = found.new_tensor([1, 1.5, 2, 2.5, 2.75, 3.4])
    if not torch.allclose(found, expected, atol=0.05):
        raise RuntimeError(
            f"{kernel.name} does not mask as tree attention needs it: {found.tolist()} instead of {expected.tolist()}. "
            "It must align a causal mask to the bottom right; install another release of it"
        )


class Rotate(torch.autograd.Function):
    """Rotary embedding of [T, heads, dim] by a table of `rotary_table`; the gradient is the inverse rotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, -1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), -1)
    return (x * cos).addcmul_(swapped, sin, value=direction)


def rotary_table(
    positions: Tensor,
    *,
    dim: int,
    base: float,
    dtype: torch.dtype,
    scaling: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, dim] of every row's rotation, for pairs (i, i + dim / 2); sin is negative in the first half.

    Angles are computed in at least float32. `scaling` changes the angles per position, [dim / 2].
    """
    wide = torch.promote_types(dtype, torch.float32)
    frequencies = 1.0 / base ** (torch.arange(0, dim, 2, device=positions.device).to(wide) / dim)
    if scaling is not None:
        frequencies = scaling(frequencies)
    angles = positions.to(wide)[:, None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


@dataclass
class TreeSequence(PackedSeqParams):
    """What Megatron's layers hand through to `TreeAttention`: one flat sequence of rows, and who attends to whom.

    `routes` [T of this rank, layers, experts a token] are for the routers, see `replay.py`.
    """

    plan: Any = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    routes: Tensor | None = None


class TreeAttention(torch.nn.Module):
    """Megatron core attention over a `TreeSequence`. Rotary embedding included: Megatron's own counts rows, not depth.

    Megatron builds it by keyword; arguments it has no use for are accepted and ignored.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        kernel: AttentionKernel,
        pg_collection: ProcessGroupCollection,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)
        self.sharing = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: TreeSequence,
        **_: Any,
    ) -> Tensor:
        """query [T, heads, dim], key and value [T, groups, dim]; returns [T, heads * dim]."""
        query = Rotate.apply(query, packed_seq_params.cos, packed_seq_params.sin)
        key = Rotate.apply(key, packed_seq_params.cos, packed_seq_params.sin)
        plan = packed_seq_params.plan
        # together, so that there is one exchange between ranks and not two
        gathered = GatherRows.apply(torch.cat((key, value), 1), plan.key_rows, self.sharing)
        keys, values = gathered.split(key.shape[1], 1)
        return self.kernel.attend(query, keys, values, plan, self.scale)
