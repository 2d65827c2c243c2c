"""Files of a conversion: how long they become, room reserved for them, and what is seen of values on the way."""

from __future__ import annotations

import ctypes
import errno
import math
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint

from megatron_treeopsd.convert.processes import Processes
from megatron_treeopsd.convert.run import convert
from megatron_treeopsd.convert.to_megatron import ToMegatron
from megatron_treeopsd.convert.watch import Watch
from megatron_treeopsd.weights import output
from megatron_treeopsd.weights.output import WRITE_BYTES, Output

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files") / "source"
    make_checkpoint(folder)
    return folder


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "ep": 2, "pp": 2}, {"tp": 2, "ep": 2, "etp": 2}, {"tp": 2, "ep": 4}])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_bytes_of_a_rank_are_those_of_its_file(
    source: Path, layout: dict[str, int], dtype: torch.dtype | None, tmp_path: Path
) -> None:
    conversion = ToMegatron(source, dtype=dtype, **layout)
    convert(conversion, tmp_path / "m", Processes(), overwrite=False, verify=False, progress=False)
    files = {file.name: file.stat().st_size for file in (tmp_path / "m" / "release").glob("*_0.distcp")}
    assert {f"__{rank}_0.distcp": size for rank, size in conversion.bytes_by_rank.items()} == files
    assert len(files) == conversion.cut.ranks


def refuse(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fallocate(*_: int) -> int:
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(output, "_fallocate", fallocate)


@pytest.mark.parametrize("supported", [True, False])
def test_a_file_has_its_length_from_the_start(supported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not supported:
        refuse(monkeypatch, errno.EOPNOTSUPP)
    data = bytes(range(256)) * (2 * WRITE_BYTES // 256) + b"end"
    file = Output(tmp_path / "file", 5 + len(data))
    status = (tmp_path / "file").stat()
    assert status.st_size == 5 + len(data)
    assert (status.st_blocks * 512 >= status.st_size) == supported
    file.write_at(5, data)
    file.finish()
    file.close()
    assert (tmp_path / "file").read_bytes() == bytes(5) + data


def test_lack_of_room_shows_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, errno.ENOSPC)
    with pytest.raises(OSError, match=r"No space left on device: .*full") as failure:
        Output(tmp_path / "full", 100)
    assert failure.value.errno == errno.ENOSPC


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("values", "count"),
    [
        ([], 0),
        ([math.nan], 1),
        ([math.inf, -math.inf, 1.0], 2),  # their sum is no number
        ([-math.inf] * 3, 3),
        (["max"] * 100, 0),  # their sum is infinite
        (["max", math.nan, "max"], 1),
    ],
)
def test_values_that_are_no_numbers_are_counted(dtype: torch.dtype, values: list[float | str], count: int) -> None:
    largest = torch.finfo(dtype).max
    tensor = torch.tensor([largest if value == "max" else value for value in values], dtype=dtype)
    watch = Watch("test", 0, shown=False)
    watch.saw(("a", "b"), torch.cat([torch.ones(1000, dtype=dtype), tensor]))
    watch.saw(("a", "b"), tensor)
    assert watch.not_finite == ({"a + b": 2 * count} if count else {})


def test_whole_numbers_are_numbers() -> None:
    watch = Watch("test", 0, shown=False)
    watch.saw(("a",), torch.full((9,), 2**63 - 1))
    assert not watch.not_finite
