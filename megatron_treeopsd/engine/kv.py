"""Key/value memory of the embedded engine and the attention that reads it.

Two places hold keys and values. The *pool* has one slot per cached token, shared by all requests through the prefix
cache. A *row* is the contiguous working copy of one running request: filled from the pool when the request is admitted,
extended in place while it decodes, written back to the pool for others to find. Copying a prefix once per turn is much
cheaper than gathering it by slot for every token.

One forward pass carries all tokens of a scheduling step in one flat sequence: first one token for each decoding row,
then the new prompt tokens of the rows just admitted. `Layout` says which token lives where.

    rows 0 1 2 decode, row 3 prefills 4 tokens, row 4 prefills 2      token_rows   [0  1  2  3  3  3  3  4  4]
                                                                      positions    [17 9  31 12 13 14 15 0  1]
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

ATTENTION = "treeopsd_rows"
"""Name under which `attend` is registered with transformers."""

ROW_POSITIONS = 256
"""Length of a row to begin with; rows double when a request needs more."""


def _mapped(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor in a mapping of its own.

    The operating system hands out its pages when they are first touched, so unused capacity costs nothing, and gets all
    of them back with the tensor, where an allocator may keep them.
    """
    size = torch.Size(shape)
    memory = mmap.mmap(-1, size.numel() * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype, count=size.numel()).view(size)


class KeyValueMemory:
    """Keys, values and final hidden states of the pool and of the rows.

    Final hidden states are kept so that the first token behind a fully cached prompt needs no forward pass.

    Attributes:
        pool: [slots, layers, 2 (key, value), kv_heads, head_dim].
        pool_hidden: [slots, hidden].
        rows: [layers, 2, rows, kv_heads, positions, head_dim].
        row_hidden: [rows, positions, hidden]; only the positions that were computed in this row are meaningful.
    """

    def __init__(self, config: PretrainedConfig, *, rows: int, slots: int, dtype: torch.dtype) -> None:
        layers, heads = config.num_hidden_layers, config.num_key_value_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._limit = config.max_position_embeddings
        positions = min(ROW_POSITIONS, self._limit)
        self.pool = _mapped(slots, layers, 2, heads, width, dtype=dtype)
        self.pool_hidden = _mapped(slots, config.hidden_size, dtype=dtype)
        # Zeros: masked positions must be finite, since attention multiplies them by zero.
        self.rows = torch.zeros(layers, 2, rows, heads, positions, width, dtype=dtype)
        self.row_hidden = torch.zeros(rows, positions, config.hidden_size, dtype=dtype)

    def clear_pool(self) -> None:
        """Give the memory of the pool back to the operating system; what it held is lost."""
        self.pool = _mapped(*self.pool.shape, dtype=self.pool.dtype)
        self.pool_hidden = _mapped(*self.pool_hidden.shape, dtype=self.pool_hidden.dtype)

    def reserve(self, length: int) -> None:
        """Make every row at least `length` tokens long."""
        positions = self.rows.shape[4]
        if length > positions:
            grown = min(max(length, 2 * positions), self._limit)
            rows, row_hidden = self.rows, self.row_hidden
            self.rows = rows.new_zeros(*rows.shape[:4], grown, rows.shape[5])
            self.row_hidden = row_hidden.new_zeros(row_hidden.shape[0], grown, row_hidden.shape[2])
            self.rows[..., :positions, :] = rows
            self.row_hidden[:, :positions] = row_hidden

    def load(self, row: int, slots: Tensor) -> None:
        """Copy a cached prefix, int64 [n] slots, from the pool to the first n positions of a row."""
        self.rows[:, :, row, :, : len(slots)] = self.pool[slots].permute(1, 2, 3, 0, 4)

    def save(self, row: int, start: int, slots: Tensor) -> None:
        """Copy the positions from `start` on of a row to `slots` of the pool."""
        end = start + len(slots)
        self.pool[slots] = self.rows[:, :, row, :, start:end].permute(3, 0, 1, 2, 4)
        self.pool_hidden[slots] = self.row_hidden[row, start:end]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one row over another."""
        self.rows[:, :, target, :, :length] = self.rows[:, :, source, :, :length]
        self.row_hidden[target, :length] = self.row_hidden[source, :length]


@dataclass(slots=True)
class Layout:
    """Where the tokens of one forward pass live.

    Attributes:
        memory: the rows to write to and to attend over.
        token_rows, positions: int64 [tokens].
        decoding: number of leading tokens that belong to decoding rows 0, 1, ... (one each).
        decode_mask: bool [decoding, 1, 1, longest]: what each of them may see.
        prefill: token index inside its row's block, int64 [tokens - decoding].
        prefill_mask: bool [prefilled rows, 1, longest block, longest].
    """

    memory: KeyValueMemory
    token_rows: Tensor
    positions: Tensor
    decoding: int
    decode_mask: Tensor
    prefill: Tensor
    prefill_mask: Tensor

    @staticmethod
    def build(memory: KeyValueMemory, decode_lengths: Tensor, prefill: list[tuple[int, int]]) -> Layout:
        """Lay out one step.

        Args:
            decode_lengths: int64 [rows], number of tokens that rows 0, 1, ... hold already.
            prefill: (position of the first new token, number of new tokens) of each row behind those.
        """
        decoding = len(decode_lengths)
        seen = torch.arange(int(decode_lengths.max()) + 1 if decoding else 0)
        starts = torch.tensor([start for start, _ in prefill], dtype=torch.int64)
        counts = torch.tensor([count for _, count in prefill], dtype=torch.int64)
        blocks = torch.repeat_interleave(torch.arange(len(prefill)), counts)
        inside = torch.arange(len(blocks)) - (counts.cumsum(0) - counts)[blocks]
        block = torch.arange(int(counts.max()) if prefill else 0)
        span = torch.arange(int((starts + counts).max()) if prefill else 0)
        return Layout(
            memory=memory,
            token_rows=torch.cat([torch.arange(decoding), decoding + blocks]),
            positions=torch.cat([decode_lengths, starts[blocks] + inside]),
            decoding=decoding,
            decode_mask=(seen[None] <= decode_lengths[:, None])[:, None, None],
            prefill=inside,
            prefill_mask=(span <= (starts[:, None] + block)[:, :, None])[:, None],
        )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    layout: Layout,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one flat sequence over the rows that its tokens belong to (transformers' attention interface).

    `query` [1, heads, tokens, head_dim] and `key`, `value` [1, kv_heads, tokens, head_dim] come in rotated. The query
    heads that share a key head are treated as further query positions of it, so that keys are never repeated.
    Returns [1, tokens, heads, head_dim].
    """
    tokens, width, kv_heads = query.shape[2], query.shape[3], key.shape[1]
    keys, values = layout.memory.rows[module.layer_idx]  # type: ignore[index]
    keys[layout.token_rows, :, layout.positions] = key[0].transpose(0, 1)
    values[layout.token_rows, :, layout.positions] = value[0].transpose(0, 1)
    query = query[0].transpose(0, 1).reshape(tokens, kv_heads, -1, width)
    decoding = layout.decoding
    parts = []
    if decoding:
        longest = layout.decode_mask.shape[-1]
        scores = (query[:decoding] * scaling) @ keys[:decoding, :, :longest].transpose(2, 3)
        weights = scores.masked_fill_(~layout.decode_mask, float("-inf")).softmax(-1)
        parts.append(weights @ values[:decoding, :, :longest])
    if tokens > decoding:
        rows, _, block, longest = layout.prefill_mask.shape
        where = (layout.token_rows[decoding:] - decoding, layout.prefill)
        padded = query.new_zeros(rows, block, *query.shape[1:])
        padded[where] = query[decoding:]
        groups = query.shape[2]
        out = F.scaled_dot_product_attention(
            padded.permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, groups * block, width),
            keys[decoding : decoding + rows, :, :longest],
            values[decoding : decoding + rows, :, :longest],
            attn_mask=layout.prefill_mask.repeat(1, 1, groups, 1),
            scale=scaling,
        )
        parts.append(out.reshape(rows, kv_heads, groups, block, width).permute(0, 3, 1, 2, 4)[where])
    return torch.cat(parts).reshape(1, tokens, -1, width), None


AttentionInterface.register(ATTENTION, attend)
