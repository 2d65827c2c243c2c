"""Files of a conversion: how long they become, room reserved for them, and what is seen of values on the way."""

from __future__ import annotations

import _thread
import ctypes
import errno
import math
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file

from megatron_treeopsd.cli import main
from megatron_treeopsd.convert import side_by_side
from megatron_treeopsd.convert.processes import Processes
from megatron_treeopsd.convert.run import convert
from megatron_treeopsd.convert.to_hf import ToHuggingFace
from megatron_treeopsd.convert.to_megatron import ToMegatron
from megatron_treeopsd.convert.watch import Stopped, Watch
from megatron_treeopsd.weights import WeightsError, output
from megatron_treeopsd.weights.extent import Files
from megatron_treeopsd.weights.output import WRITE_BYTES, Output

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files") / "source"
    make_checkpoint(folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def make(conversion: ToMegatron | ToHuggingFace, destination: Path, *, verify: bool = False) -> None:
    convert(conversion, destination, Processes(), overwrite=False, verify=verify, progress=False)


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the checkpoint were large enough to be divided."""
    monkeypatch.setattr(side_by_side, "FILE_BYTES", 20_000)


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "ep": 2, "pp": 2}, {"tp": 2, "ep": 2, "etp": 2}, {"tp": 2, "ep": 4}])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("parts", [1, 4])
def test_bytes_of_a_rank_are_those_of_its_files(
    source: Path, layout: dict[str, int], dtype: torch.dtype | None, parts: int, tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    if parts > 1:
        request.getfixturevalue("divided")
    conversion = ToMegatron(source, dtype=dtype, **layout)
    make(conversion, tmp_path / "m")
    files = {file.name: file.stat().st_size for file in (tmp_path / "m" / "release").glob("*.distcp")}
    del files[f"__0_{parts}.distcp"]  # what is no tensor
    assert {f"__{rank}_{part}.distcp": size for (rank, part), size in conversion.bytes_by_file.items()} == files
    assert list(conversion.bytes_by_rank) == list(range(conversion.cut.ranks))
    assert sum(conversion.bytes_by_rank.values()) == sum(files.values()) == conversion.nbytes
    by_part = [sum(size for (_, of), size in conversion.bytes_by_file.items() if of == part) for part in range(parts)]
    assert max(by_part) < 2 * min(by_part)


@pytest.mark.usefixtures("divided")
def test_a_checkpoint_is_divided_by_its_size_alone(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One core writes what four write, and both sides are equal bit for bit."""
    for cores in (1, 4):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        make(ToMegatron(source, dtype=None, tp=2, ep=2), tmp_path / f"m{cores}", verify=True)
        make(ToHuggingFace(tmp_path / f"m{cores}", dtype=None), tmp_path / f"hf{cores}", verify=True)
    assert contents(tmp_path / "m1") == contents(tmp_path / "m4")
    assert contents(tmp_path / "hf1") == contents(tmp_path / "hf4")
    original = load_file(source / "model.safetensors")
    files = list((tmp_path / "hf4").glob("*.safetensors"))
    assert len(files) == 4
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == original.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in original.items())


@pytest.mark.parametrize(
    ("nbytes", "files"), [(0, 1), (10**6, 1), (3 * 2**28 - 1, 2), (3 * 2**28, 3), (4 * 10**9, 4), (61 * 10**9, 4)]
)
def test_how_many_files_are_enough(nbytes: int, files: int) -> None:
    assert side_by_side.files_for(nbytes) == files


@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize(("given", "files"), [(None, 4), (10**9, 1)])
def test_a_size_that_is_given_is_kept(source: Path, tmp_path: Path, given: int | None, files: int) -> None:
    make(ToMegatron(source, dtype=None), tmp_path / "m")
    conversion = ToHuggingFace(tmp_path / "m", dtype=None, shard_bytes=given)
    assert len(conversion.files) == files


def test_one_failure_ends_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One copies without end, one fails, and one never begins."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    watch, begun, ended = Watch("test", 0, shown=False), threading.Event(), threading.Event()
    deadline = time.monotonic() + 60
    before = torch.get_num_threads()

    def endless() -> None:
        try:
            while time.monotonic() < deadline:
                watch.saw(("a",), torch.ones(3))
                begun.set()
        except Stopped:
            ended.set()
            raise

    def failing() -> None:
        begun.wait()
        raise OSError(errno.ENOSPC, "no room")

    late: list[int] = []
    with pytest.raises(OSError, match="no room"):
        side_by_side.side_by_side([endless, failing, endless, lambda: late.append(1)], watch)
    assert ended.is_set()
    assert not late
    assert torch.get_num_threads() == before


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A program started in the background ignores interrupts, and so does Python in it."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_all_threads() -> None:
    watch, ended = Watch("test", 0, shown=False), threading.Event()
    deadline = time.monotonic() + 60

    def endless() -> None:
        try:
            _thread.interrupt_main()
            while time.monotonic() < deadline:
                watch.saw(("a",), torch.ones(3))
        except Stopped:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        side_by_side.side_by_side([endless], watch)
    assert ended.wait(10)


def test_results_come_in_order_and_a_thread_has_one_core() -> None:
    watch = Watch("test", 0, shown=False)

    def task(number: int) -> tuple[int, int]:
        return number, torch.get_num_threads()

    tasks = [partial(task, number) for number in range(9)]
    assert side_by_side.side_by_side(tasks, watch) == [(number, 1) for number in range(9)]


def test_threads_count_together() -> None:
    watch = Watch("test", 0, shown=False)
    values = torch.tensor([1.0, math.nan])

    def task() -> None:
        for _ in range(2000):
            watch.saw(("a",), values)

    threads = [threading.Thread(target=task) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert watch.not_finite == {"a": 8000}


def test_parts_are_of_about_equal_size() -> None:
    assert side_by_side.balanced([1] * 8, 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert side_by_side.balanced([5, 1, 1, 1], 2) == [0, 1, 1, 1]
    assert side_by_side.balanced([1, 1, 10, 0], 4) == [0, 0, 2, 3]  # one that is larger than a part; nothing at the end
    assert side_by_side.balanced([], 3) == []
    assert side_by_side.balanced([0, 0], 3) == [0, 0]


@pytest.mark.usefixtures("divided")
def test_files_are_of_about_equal_size(source: Path, tmp_path: Path) -> None:
    make(ToMegatron(source, dtype=None), tmp_path / "m")
    files = ToHuggingFace(tmp_path / "m", dtype=None).files
    sizes = [sum(tensor.nbytes for tensor in members) for members in files.values()]
    assert len(sizes) == 4
    assert max(sizes) < 1.5 * min(sizes)


@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize("layout", [{}, {"tp": 2, "ep": 2}])
def test_processes_share_the_bytes(source: Path, layout: dict[str, int], tmp_path: Path) -> None:
    there = ToMegatron(source, dtype=None, **layout)
    make(there, tmp_path / "m")
    for conversion in (there, ToHuggingFace(tmp_path / "m", dtype=None)):
        shares = [conversion.share_bytes(Processes(rank, 2)) for rank in range(2)]
        assert sum(shares) == conversion.nbytes
        assert max(shares) < 1.5 * min(shares)


@pytest.mark.usefixtures("divided")
def test_threads_share_the_open_files_of_a_source(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    make(ToMegatron(source, dtype=None, tp=2), tmp_path / "m")
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: opened.append(str(path)) or real(path, *rest))
    make(ToHuggingFace(tmp_path / "m", dtype=None), tmp_path / "hf")
    parts = [path for path in opened if path.endswith(".distcp")]
    assert len(parts) == 8
    assert len(set(parts)) == 8


@pytest.mark.parametrize("change", ["replaced", "written", "removed"])
def test_a_source_that_changes_is_noticed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    folder = tmp_path / "source"
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    conversion = ToMegatron(folder, dtype=None)
    write = conversion.write

    def write_and_change(*arguments: Any) -> None:
        write(*arguments)
        if change == "replaced":
            shutil.copyfile(file, tmp_path / "other")
            os.replace(tmp_path / "other", file)
        elif change == "written":
            os.utime(file, ns=(0, 0))
        else:
            file.unlink()

    monkeypatch.setattr(conversion, "write", write_and_change)
    with pytest.raises(WeightsError, match=r"model\.safetensors: changed while it was read; try again"):
        make(conversion, tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_errors_of_writing_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    file = Output(tmp_path / "file", 5)
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match=r"Input/output error: .*file") as failure:
        (file.finish if call == "fsync" else partial(file.write_at, 0, b"12345"))()
    assert failure.value.errno == errno.EIO
    file.close()


def test_too_many_open_files_say_what_to_do(source: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, hard))
        with pytest.raises(OSError, match=r"Too many open files; raise the limit \(ulimit -n\): .*out"):
            Output(tmp_path / "out", 5)
        with pytest.raises(WeightsError, match=r"in: cannot be opened: Too many open files; raise the limit"):
            Files().handle(tmp_path / "in")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(lowest)


def test_the_command_raises_the_limit_itself(source: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
        assert main(["convert", "to-megatron", str(source), str(tmp_path / "m"), "--dry-run"]) == 0
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_threads_that_cannot_start_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_to_start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse_to_start)
    with pytest.raises(WeightsError, match=r"can't start new thread; raise the limit of processes \(ulimit -u\)"):
        side_by_side.side_by_side([lambda: None], Watch("test", 0, shown=False))


def test_sigterm_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    saw = Watch.saw

    def saw_and_terminated(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        saw(*arguments)

    monkeypatch.setattr(Watch, "saw", saw_and_terminated)
    with pytest.raises(SystemExit) as ended:
        main(["convert", "to-megatron", str(source), str(tmp_path / "m")])
    assert ended.value.code == 143
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


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
