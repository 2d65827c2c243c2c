from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from fake_run import decode, notes_for, search_tree, write_fake_run
from hypothesis import given
from hypothesis import strategies as st
from trees import random_tree

from megatron_treeopsd.observe.charts import Axis, Series, line_chart, moving_mean, nice_ticks, reduce, share_chart
from megatron_treeopsd.observe.curves import learning_curve_svg, span_colours, span_totals
from megatron_treeopsd.observe.decoder import decode_as_ids
from megatron_treeopsd.observe.history import StepRow
from megatron_treeopsd.observe.report import write_report
from megatron_treeopsd.observe.run_folder import RunFolderError, RunPaths
from megatron_treeopsd.observe.tree_svg import draw_tree, tree_svg
from megatron_treeopsd.observe.turn_notes import TurnNote
from megatron_treeopsd.tree import ROOT, Question, RolloutTree, Turn, save_trees

pytestmark = pytest.mark.fast
STEPS = Axis("step", lambda value: f"step {value:.0f}", whole=True)
SVG = "{http://www.w3.org/2000/svg}"
EVIL = "</script><script>alert(1)</script><img src=http://evil.example/x onerror=alert(1)>\"'&\x1b[31m\x00"


class Page(HTMLParser):
    """Tags, attributes and text of a document; fails on tags that do not match."""

    VOID = frozenset({"meta", "circle", "line", "rect", "path", "br", "img", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def report_of(run: RunPaths) -> Page:
    return Page(write_report(run.root).read_text(encoding="utf-8"))


def test_the_report_has_its_sections_and_fetches_nothing(tmp_path: Path) -> None:
    run = write_fake_run(tmp_path)
    page = report_of(run)
    text = " ".join(page.text)
    for words in (
        "factbook · treeopsd", "43.2 % → 71.1 %", "+27.9", "Learning", "Before and after", "exact match, 3 hops",
        "Where the time went", "progress to target", "reversed", "gradient norm", "Tokens", "Sample trees of step 39",
        "bernoulli_kl", "evaluation, not counted",
    ):  # fmt: skip
        assert words in text, words
    assert page.count("script") == 1
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "base", "object")
        assert not {"src", "href", "action"} & attributes.keys()
        assert "url(" not in (attributes.get("style") or "")
    markup = run.report.read_text(encoding="utf-8")
    assert "prefers-color-scheme:dark" in markup
    assert set(re.findall(r"https?://[^\s\"'<]*", markup)) == {"http://www.w3.org/2000/svg"}


def test_every_box_has_its_whole_text(tmp_path: Path) -> None:
    page = report_of(write_fake_run(tmp_path, steps=2))
    boxes = [a["data-turn"] for tag, a in page.tags if tag == "g" and "data-turn" in a]
    texts = [a["data-turn"] for tag, a in page.tags if tag == "article"]
    assert len(boxes) > 30
    assert sorted(map(str, boxes)) == sorted(map(str, texts))


@pytest.mark.parametrize(
    ("options", "there", "missing"),
    [
        ({"steps": 1, "trees": False}, ["1 step, ", "Learning"], ["Sample trees"]),
        ({"steps": 60, "trees": False, "evaluations": False, "supervised": True},
         ["factbook · sft", "negative log-likelihood", "loss"], ["Before and after", "Sample trees", "tokens sampled"]),
        ({"steps": 5, "evaluations": False}, ["reward of rollouts", "Sample trees of step 4"], ["Before and after"]),
        ({"steps": 0, "trees": False, "evaluations": False}, ["No step is finished yet", "Recipe"], ["Learning"]),
    ],
)  # fmt: skip
def test_reports_of_unfinished_and_unusual_runs(
    tmp_path: Path, options: dict[str, object], there: list[str], missing: list[str]
) -> None:
    run = write_fake_run(tmp_path, **options)  # type: ignore[arg-type]
    run.summary.unlink()
    text = " ".join(report_of(run).text)
    assert [words for words in there if words not in text] == []
    assert [words for words in missing if words in text] == []


def test_a_long_run_is_drawn_with_fewer_points(tmp_path: Path) -> None:
    run = write_fake_run(tmp_path, steps=1000, trees=False)
    report_of(run)
    assert run.report.stat().st_size < 1_500_000
    assert "60 min" in run.report.read_text(encoding="utf-8")


def evil_tree() -> RolloutTree:
    tree = RolloutTree(Question(EVIL, EVIL, (EVIL,), {"hops": 1, "note": EVIL}), [1])
    tree.add(Turn(ROOT, [2], [-1.0], [3], action=EVIL))
    tree.add(Turn(0, [2], [-1.0], action="answer", terminal=True, reward=1.0, prediction=EVIL))
    tree.add(Turn(0, [4], [-1.0], action="answer", terminal=True, reward=0.0))
    return tree


def test_tool_output_stays_text(tmp_path: Path) -> None:
    run = write_fake_run(tmp_path, steps=1, trees=False)
    run.recipe.write_text(run.recipe.read_text() + "name: '<b onclick=alert(1)>'\n")
    save_trees(run.tree_file(0), [evil_tree()])
    markup = write_report(run.root, decode=lambda ids: EVIL).read_text(encoding="utf-8")
    page = Page(markup)
    assert page.count("script") == 1
    assert page.count("img") == 0
    assert not any(key.startswith("on") for _, attributes in page.tags for key in attributes)
    assert "\x1b" not in markup
    assert "\x00" not in markup
    assert any("alert(1)" in text for text in page.text)
    ET.fromstring(tree_svg(evil_tree(), None, lambda ids: EVIL))


def test_very_long_texts_are_cut_in_the_page_only(tmp_path: Path) -> None:
    run = write_fake_run(tmp_path, steps=1, trees=False)
    save_trees(run.tree_file(0), [evil_tree()])
    write_report(run.root, decode=lambda ids: "x" * 1_000_000)
    assert run.report.stat().st_size < 300_000
    assert "980000 characters more in the tree file" in run.report.read_text(encoding="utf-8")


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is not a run folder"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------------------------------------- drawings
def boxes_of(svg: str) -> dict[str, tuple[float, float, float, float]]:
    """x, y, width and height of each turn's box by `data-turn`."""
    found = {}
    for group in ET.fromstring(svg).iter(f"{SVG}g"):
        if "data-turn" in group.attrib:
            box = group.find(f"{SVG}rect")
            assert box is not None
            found[group.attrib["data-turn"]] = tuple(float(box.attrib[k]) for k in ("x", "y", "width", "height"))
    return found  # type: ignore[return-value]


@given(st.integers(0, 10_000))
def test_boxes_do_not_overlap_and_children_stand_right_of_their_parents(seed: int) -> None:
    tree = random_tree(seed, trunks=4, forks=2)
    svg = draw_tree(tree, notes_for([tree]).trees[0], lambda ids: "word " * (ids[0] % 14))  # boxes of many heights
    width, height = (float(ET.fromstring(svg).attrib[k]) for k in ("width", "height"))
    boxes = boxes_of(svg)
    assert boxes.keys() == {"prompt", *map(str, range(len(tree.turns)))}
    for index, turn in enumerate(tree.turns):
        parent = boxes["prompt" if turn.parent == ROOT else str(turn.parent)]
        assert boxes[str(index)][0] >= parent[0] + parent[2]
    placed = sorted(boxes.values())
    for a, b in pairwise(placed):
        if a[0] == b[0]:
            assert a[1] + a[3] <= b[1]
    assert all(x >= 0 and y >= 0 and x + w <= width and y + h <= height for x, y, w, h in placed)


def test_a_tree_without_turns_or_rewards_is_drawn() -> None:
    tree = RolloutTree(Question("q", "why", ()), [1, 2])
    assert boxes_of(draw_tree(tree, None, decode_as_ids)).keys() == {"prompt"}


def test_credit_and_reward_are_told_by_more_than_colour() -> None:
    tree = evil_tree()
    svg = draw_tree(tree, [TurnNote(), TurnNote(1.0, 0.75, 0.5), TurnNote(-1.0, 0.25, -0.5)], decode_as_ids)
    texts = [element.text for element in ET.fromstring(svg).iter(f"{SVG}text")]
    assert "+1.00" in texts
    assert "−1.00" in texts
    assert len(re.findall('class="onmark"', svg)) == 2
    assert svg.count('class="goal"') == svg.count('class="now"') == 2


def test_standalone_pictures_are_whole_svg_files(tmp_path: Path) -> None:
    run = write_fake_run(tmp_path, steps=20, trees=False)
    tree = search_tree(1)
    for svg in (learning_curve_svg(run), tree_svg(tree, notes_for([tree]).trees[0], decode)):
        root = ET.fromstring(svg)
        style = root.find(f"{SVG}style")
        assert style is not None
        assert "prefers-color-scheme:dark" in (style.text or "")


def test_chart_coordinates_by_hand() -> None:
    series = Series("y", np.array([0.0, 10.0]), np.array([0.0, 4.0]), "red")
    root = ET.fromstring(line_chart([series], STEPS, label="a line", width=162, height=146, y_range=(0, 4)))
    path = next(element for element in root.iter(f"{SVG}path") if element.attrib["class"] == "curve")
    # plot area: x from 48 to 162 - 14, y from 146 - 36 to 10
    assert path.attrib["d"] == "M48.0 110.0L148.0 10.0"


def test_shares_fill_the_height() -> None:
    x = np.arange(5.0)
    stacked = [Series("a", x, x + 1, "red"), Series("b", x, 3 * (x + 1), "blue")]
    root = ET.fromstring(share_chart(stacked, STEPS, label="shares", width=162, height=170))
    areas = [element.attrib["d"] for element in root.iter(f"{SVG}path")]
    # 34 at the top for the legend, so 100 % is 134 - 34 = 100 pixels high
    assert areas[0].startswith("M48.0 109.0L")
    assert areas[1].startswith("M48.0 34.0L")
    one = [Series("a", np.array([3.0]), np.array([1.0]), "red"), Series("b", np.array([3.0]), np.array([0.0]), "blue")]
    assert "M48.0 34.0L148.0 34.0" in share_chart(one, STEPS, label="one step", width=162, height=170)


@given(st.integers(1, 3000), st.integers(0, 1000))
def test_reducing_keeps_mean_and_range(count: int, seed: int) -> None:
    y = np.random.default_rng(seed).normal(size=count)
    parts = reduce(np.arange(count, dtype=np.float64), y, 100)
    assert len(parts.x) == min(count, 100)
    assert parts.low.min() == y.min()
    assert parts.high.max() == y.max()
    assert (parts.low <= parts.mean + 1e-12).all()
    assert (parts.mean <= parts.high + 1e-12).all()
    assert np.all(np.diff(parts.x) > 0)
    if count % 100 == 0:
        assert parts.mean.mean() == pytest.approx(y.mean(), abs=1e-9)


def test_moving_mean_by_hand() -> None:
    assert moving_mean(np.array([0.0, 3.0, 6.0, 9.0]), 3).tolist() == [1.5, 3.0, 6.0, 7.5]
    assert moving_mean(np.array([2.0]), 5).tolist() == [2.0]


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_round_and_cover_the_range(low: float, size: float) -> None:
    ticks = nice_ticks(low, low + size)
    assert 2 <= len(ticks) <= 8
    slack = 1e-6 * size + 1e-9 * abs(low)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= low + size - slack
    assert nice_ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert nice_ticks(3, 3)[0] < 3 < nice_ticks(3, 3)[-1]


@pytest.mark.parametrize(
    "values", [(0.0, 0.0), (0.1, 0.1 + 1e-16), (1e-15, 1e-15), (0.0, 1e-14), (3.0, 1e9), (-5.0, -5.0)]
)
def test_ticks_are_different_numbers_around_any_values(values: tuple[float, float]) -> None:
    ticks = nice_ticks(*values)
    assert len(set(ticks)) == len(ticks) > 1
    assert ticks[0] <= values[0]
    assert values[1] <= ticks[-1]


def test_spans_are_ordered_and_coloured() -> None:
    values = {"span/other": 9.0, "span/update": 1.0, "span/rollout": 2.0, "span/rollout/prefill": 1.5}
    rows = [StepRow(step, 1.0, 1.0, 0.0, values) for step in range(2)]
    assert span_totals(rows) == {"rollout": 4.0, "update": 2.0, "other": 18.0}
    many = span_colours([*"abcdefgh", "other"])
    assert len({many[name] for name in "abcdef"}) == 6
    assert many["g"] == many["h"] == many["other"] == "var(--rest)"
