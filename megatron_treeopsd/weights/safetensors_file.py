"""Headers of safetensors files, checked before anything is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from megatron_treeopsd.weights.extent import Extent
from megatron_treeopsd.weights.rules import WeightsError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def read_header(file: Path) -> dict[str, Extent]:
    """Name -> where the tensor lies. Raises `WeightsError` for anything but a whole, well-formed file."""
    try:
        with open(file, "rb") as handle:
            size = handle.seek(0, 2)
            handle.seek(0)
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise _damaged(file, f"its {size} bytes do not hold the header that it announces")
            header = json.loads(handle.read(length))
    except OSError as error:
        raise _damaged(file, str(error)) from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, WeightsError):
            raise
        raise _damaged(file, f"its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise _damaged(file, "its header is not a JSON object")
    header.pop("__metadata__", None)
    found = {name: _extent(file, name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for name, extent in sorted(found.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if extent.offset != end:
            raise _damaged(file, f"{name} starts at byte {extent.offset}, but what is before it ends at {end}")
        end += extent.nbytes
    if end != size:
        raise _damaged(file, f"it is {size} bytes long and its header describes {end}; was it copied completely?")
    return found


def _extent(file: Path, name: str, entry: Any, base: int) -> Extent:
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(map(int, entry["shape"])), map(int, entry["data_offsets"])
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise _damaged(file, f"its header describes {name} as {str(entry)[:200]}: {error!r}") from None
    if dtype not in DTYPES:
        raise WeightsError(f"{file}: {name} has dtype {dtype}; only {', '.join(DTYPES)} are read. Dequantise it first.")
    extent = Extent(file, base + start, shape, DTYPES[dtype])
    if stop - start != extent.nbytes or start < 0 or any(length < 0 for length in shape):
        raise _damaged(file, f"{name} {dtype} {shape} cannot take up bytes {start} to {stop}")
    return extent


def _damaged(file: Path, why: str) -> WeightsError:
    return WeightsError(f"{file}: not a readable safetensors file: {why}")
