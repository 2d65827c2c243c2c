"""The operators of SGLang's kernel package that its generic CPU path calls, in PyTorch.

Without `torch.ops.sgl_kernel.convert_weight_packed`, SGLang takes the CPU for one without AMX and uses its plain
PyTorch layers and attention. What is left are the two bookkeeping functions and the hash below; every other name ends
in an error when it is called, not before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def assign_req_to_token_pool_cpu(
    requests: Tensor, table: Tensor, start: Tensor, end: Tensor, slots: Tensor, width: int
) -> None:
    """Write the new slots of each request, which lie one after the other in `slots`, into its row of `table`."""
    position = 0
    for row, first, last in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True):
        count = last - first
        table[row, first:last] = slots[position : position + count].to(table.dtype)
        position += count


def copy_all_layer_kv_cache_cpu(addresses: Tensor, strides: Tensor, to: Tensor, source: Tensor) -> None:
    """Copy the keys and values of some slots to other slots, in every layer's buffer."""
    for address, stride in zip(addresses.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + slot * stride, stride) for slot in source.tolist()]  # read all, then write
        for slot, row in zip(to.tolist(), rows, strict=True):
            ctypes.memmove(address + slot * stride, row, stride)


def __getattr__(name: str) -> Callable[..., Any]:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no counterpart in launch/sglang_cpu")

    return missing


# ------------------------------------------------------------------- MurmurHash3, 32 bit, of (seed, position, column)
def _times(words: Tensor, factor: int) -> Tensor:
    """Product modulo 2**32 of 32-bit words held in int64, without overflow."""
    low = (words & 0xFFFF) * factor
    high = ((words >> 16) * factor & 0xFFFF) << 16
    return (low + high) & _WORD


def _rotated(words: Tensor, bits: int) -> Tensor:
    return ((words << bits) | (words >> (32 - bits))) & _WORD


def _mixed(state: Tensor, word: Tensor) -> Tensor:
    word = _times(_rotated(_times(word, 0xCC9E2D51), 15), 0x1B873593)
    return (_times(_rotated(state ^ word, 13), 5) + 0xE6546B64) & _WORD


def murmur_hash32(seeds: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """uint32 [requests, columns]: the hash of each request's 64-bit seed and position with each column index."""
    seed = seeds.view(torch.int64) if seeds.dtype == torch.uint64 else seeds.to(torch.int64)
    state = torch.zeros_like(seed)
    for word in (seed, seed >> 32, positions.to(torch.int64)):
        state = _mixed(state, word & _WORD)
    state = _mixed(state[:, None], columns.to(torch.int64)[None] & _WORD)
    state = state ^ 16  # bytes hashed
    state = _times(state ^ (state >> 16), 0x85EBCA6B)
    state = _times(state ^ (state >> 13), 0xC2B2AE35)
    return (state ^ (state >> 16)).to(torch.uint32)


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
