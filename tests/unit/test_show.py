from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from fake_run import decode, notes_for, search_tree, write_fake_run
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from trees import random_tree

from megatron_treeopsd.observe.decoder import decode_as_ids, decoder_of
from megatron_treeopsd.observe.run_folder import RunFolderError, RunPaths
from megatron_treeopsd.observe.show import show
from megatron_treeopsd.observe.tree_view import render_tree, telling_order
from megatron_treeopsd.observe.turn_notes import TurnNote, TurnNotes
from megatron_treeopsd.tree import ROOT, Question, RolloutTree, Turn, save_trees

pytestmark = pytest.mark.fast


def small_tree() -> tuple[RolloutTree, dict[int, str]]:
    """The worked example of tree.py with words: one search, then a right and a wrong answer."""
    tree = RolloutTree(Question("q1", "capital of mali", ("bamako",), {"hops": 1}), [1, 7])
    tree.add(Turn(ROOT, [5, 8, 6], [-0.5, -0.5, -0.2], [9, 9], action="search"))
    tree.add(Turn(0, [3, 4], [-0.1, -0.3], action="answer", terminal=True, reward=1.0), merge=False)
    tree.turns[1].multiplicity = 2
    tree.add(Turn(0, [3, 2], [-1.0, -3.0], action="answer", terminal=True, reward=0.0, finish="length"))
    words = {
        1: "<bos>",
        7: "mali",
        5: "<search>",
        8: "capital",
        6: "</search>",
        9: "found",
        3: "is",
        4: "bamako",
        2: "x",
    }
    return tree, words


def test_a_small_tree_word_for_word() -> None:
    tree, words = small_tree()
    notes = [TurnNote(0.4, 0.6, 0.0), TurnNote(0.8, 0.75, np.log(2.0)), TurnNote(-1.0, None, None)]
    text = render_tree(tree, lambda ids: " ".join(words[i] for i in ids), notes=notes, width=80).plain
    assert text.splitlines() == [
        "question  capital of mali",
        "answers   bamako",
        "tree      q1, hops 1: 3 leaves, 2 solved, mean reward 0.67, 3 turns, 7 of 11",
        "          unique tokens sampled",
        "                                              credit target  ratio   goal   logp",
        "● prompt  2 tokens",
        "│   <bos> mali",
        "● 0 search                                     +0.40   0.60   1.00   1.50  −0.40",
        "│   <search> capital </search>",
        "│   ↳ found found",
        "├─● 1 answer ×2  ✓ 1                           +0.80   0.75   2.00   3.00  −0.20",
        "│     is bamako",
        "└─● 2 answer cut off (length)  ✗ 0             −1.00                       −2.00",
        "      is x",
        "",
        "credit  what the turn is held responsible for",
        "target  where its probability p = ratio / (1 + ratio) is to go",
        "ratio   likelihood of the turn, policy after the update over policy that sampled it",
        "goal    the ratio at which p is the target",
        "logp    mean log-probability of a sampled token, in nats",
    ]


def test_without_notes_there_are_no_empty_columns() -> None:
    tree, words = small_tree()
    text = render_tree(tree, lambda ids: " ".join(words[i] for i in ids), width=80).plain
    assert "credit" not in text
    assert "logp" in text


@given(st.integers(0, 10_000), st.sampled_from([72, 100, 140]))
def test_every_turn_is_there_once_and_no_line_is_too_wide(seed: int, width: int) -> None:
    tree = random_tree(seed)
    notes = notes_for([tree]).trees[0]
    body = render_tree(tree, decode_as_ids, notes=notes, width=width).plain.split("\n\n")[0]
    turns = [line for line in body.splitlines() if "● " in line and "● prompt" not in line]
    assert sorted(int(line.split("● ")[1].split()[0]) for line in turns) == list(range(len(tree.turns)))
    assert max(map(cell_len, body.splitlines())) <= width


def test_long_texts_are_cut_unless_asked_for() -> None:
    tree = RolloutTree(Question("q", "long", ("a",)), [1])
    tree.add(Turn(ROOT, [2], [-1.0], [3], action="search"))
    tree.add(Turn(0, [2], [-1.0], action="answer", terminal=True, reward=0.5))
    texts = {1: "prompt", 2: "word " * 200, 3: "日本語" * 100}
    short, full = (render_tree(tree, lambda ids: texts[ids[0]], width=90, full=full).plain for full in (False, True))
    assert short.count("word") < 110
    assert "…" in short
    assert "~ 0.5" in short
    assert full.count("word") == 400
    assert full.count("日") == 100
    assert max(map(cell_len, full.splitlines())) <= 90


def test_what_a_tool_wrote_cannot_steer_the_terminal() -> None:
    tree, _ = small_tree()
    text = render_tree(tree, lambda ids: "\x1b[2J\x07evil\nline", width=90).plain
    assert "\x1b" not in text
    assert "evil ⏎ line" in text


def test_trees_whose_leaves_disagree_come_first() -> None:
    trees = [search_tree(0, skill=0.0), search_tree(1, skill=0.6), search_tree(2, skill=1.0)]
    variances = [trees[index].leaf_rewards().var() for index in telling_order(trees)]
    assert variances == sorted(variances, reverse=True)
    assert telling_order([trees[2], trees[2]]) == [0, 1]


def test_notes_round_trip_and_skip_what_is_not_a_number(tmp_path: Path) -> None:
    trees = [small_tree()[0]]
    nan = float("nan")
    notes = TurnNotes.from_arrays(
        credit=[np.array([0.5, -0.25, nan])], target=[np.array([0.75, nan, 0.5])], log_ratio=[np.array([0.0, 1.0, nan])]
    )
    notes.write(tmp_path / "notes.json")
    read = TurnNotes.read(tmp_path / "notes.json", trees)
    assert read == notes
    assert read.trees[0][1] == TurnNote(credit=-0.25, log_ratio=1.0)
    assert read.trees[0][0].target_ratio == pytest.approx(3.0)
    assert read.trees[0][1].ratio == pytest.approx(2.718281828)
    assert read.trees[0][1].target_ratio is None
    assert TurnNotes.from_arrays(credit=[np.zeros(1)]).trees == [[TurnNote(credit=0.0)]]
    assert TurnNotes.read(tmp_path / "missing.json", trees).trees == [[TurnNote()] * 3]


@pytest.mark.parametrize("text", ["{", '{"trees": 3}', '{"trees": [{"turns": [1]}]}', '{"trees": [{"turns": [{}]}]}'])
def test_damaged_notes_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "notes.json").write_text(text)
    with pytest.raises(RunFolderError, match=r"notes\.json: .*remove it"):
        TurnNotes.read(tmp_path / "notes.json", [small_tree()[0]])


def printed(run: RunPaths, **options: object) -> str:
    out = io.StringIO()
    show(run.root, file=out, **options)  # type: ignore[arg-type]
    return out.getvalue()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    return write_fake_run(tmp_path_factory.mktemp("show"), steps=3)


def test_show_prints_the_most_telling_tree_in_words(run: RunPaths) -> None:
    text = printed(run)
    index = telling_order([search_tree(seed) for seed in range(16)])[0]
    assert text.startswith(f"step 2, tree {index} of 16")
    assert "<search> export partners" in text
    assert "credit" in text
    assert max(map(cell_len, text.splitlines())) <= 100


def test_show_finds_trees_by_index_and_question(run: RunPaths) -> None:
    assert printed(run, tree=5) == printed(run, question="q-0005", step=2)
    assert "q-0005" in printed(run, tree=5)


def test_show_lists_what_is_saved(run: RunPaths) -> None:
    text = printed(run, listing=True)
    assert text.startswith("trees are saved of steps 2 (--step N); step 2 has 16 (--tree I):")
    assert sum("leaves" in line for line in text.splitlines()) == 16


@pytest.mark.parametrize(
    ("options", "says"),
    [({"step": 7}, "no trees of step 7 are saved; --step takes 2"), ({"tree": 16}, "--tree takes 0 to 15"),
     ({"question": "q-x"}, "no tree of question 'q-x'; --question takes q-0000, q-0001")],
)  # fmt: skip
def test_show_says_what_there_is(run: RunPaths, options: dict[str, object], says: str) -> None:
    with pytest.raises(RunFolderError, match=says):
        printed(run, **options)


def test_show_without_trees_or_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="does not exist"):
        show(tmp_path / "no")
    bare = write_fake_run(tmp_path, steps=1, trees=False)
    with pytest.raises(RunFolderError, match="no trees are saved yet"):
        show(bare.root)


def test_show_without_the_tokenizer_prints_ids_and_says_why(tmp_path: Path) -> None:
    run = write_fake_run(tmp_path, steps=1)
    (tmp_path / "policy" / "tokenizer.json").unlink()
    save_trees(run.tree_file(1), [small_tree()[0]])
    text = printed(run)
    assert "5 8 6" in text
    assert "policy/tokenizer.json is not there" in text


def test_the_tokenizer_decodes_what_the_fake_policy_sampled(run: RunPaths) -> None:
    read, complaint = decoder_of(run)
    ids = search_tree(0).turns[0].sampled_ids
    assert complaint is None
    assert read(ids) == decode(ids)
