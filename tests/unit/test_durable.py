"""Folders that appear complete or not at all, also where a file system cannot exchange two of them in one step."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_treeopsd.weights import durable

pytestmark = pytest.mark.fast


def write(destination: Path, text: str) -> None:
    (durable.begin(destination) / "file").write_text(text)
    durable.commit(destination)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(params=[True, False], ids=["exchange", "two_renames"])
def _exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(durable, "_exchange", lambda *_: False)


@pytest.mark.usefixtures("_exchange")
def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    for text in ("first", "second"):
        write(tmp_path / "out", text)
        assert names(tmp_path) == ["out"]
        assert (tmp_path / "out" / "file").read_text() == text


def test_exchange_swaps_names_or_says_why(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if durable._exchange(tmp_path / "a", tmp_path / "b"):
        assert names(tmp_path / "a") == ["b"]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        durable._exchange(tmp_path / "a", tmp_path / "nowhere")


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    for leftover in (".out.partial", ".out.replaced", ".out.partial.removed", ".out.replaced.removed"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "file").touch()
    assert list(durable.begin(tmp_path / "out").iterdir()) == []
    assert names(tmp_path) == [".out.partial", "out"]
    assert (tmp_path / "out" / "file").read_text() == "old"


def test_what_was_to_be_replaced_comes_back(tmp_path: Path) -> None:
    """Killed between the two renames."""
    write(tmp_path / "out", "old")
    (tmp_path / "out").rename(tmp_path / ".out.replaced")
    durable.begin(tmp_path / "out")
    assert (tmp_path / "out" / "file").read_text() == "old"
    assert names(tmp_path) == [".out.partial", "out"]
