"""Factbook: cleaning, passages, questions and their splits, and the data folder."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from factbook_data import prepared, questions, recipe, task

from megatron_treeopsd import config
from megatron_treeopsd.environment import retrieval
from megatron_treeopsd.environment.data import DataError, load_passages, load_questions
from megatron_treeopsd.environment.factbook import fields
from megatron_treeopsd.environment.factbook.corpus import passage_id, read_fact
from megatron_treeopsd.environment.factbook.folder import written_whole
from megatron_treeopsd.environment.factbook.prepare import prepare, retrieval_ceiling
from megatron_treeopsd.environment.factbook.questions import (
    Composition,
    Hop,
    build_questions,
    chain_of,
    question_text,
    split_countries,
)
from megatron_treeopsd.environment.factbook.text import first_words, name_case, plain
from megatron_treeopsd.environment.factbook.world import Country, Facts, country_name
from megatron_treeopsd.tree import Question

pytestmark = pytest.mark.fast

NAMES = ("factbook", "factbook_long")


# ------------------------------------------------------------------------------------------------------------ cleaning
def test_plain_text() -> None:
    assert plain("C&ocirc;te d&rsquo;Ivoire&nbsp;<br><strong>x</strong>\n y") == "Cote d'Ivoire x y"
    assert plain("Garaşsyz, Türkiye, Đà Nẵng") == "Garassyz, Turkiye, Da Nang"
    assert first_words("Climate: hot, dry", 3) == "Climate: hot"
    assert name_case("XI Jinping, CHARLES III, N'DJAMENA") == "Xi Jinping, Charles III, N'djamena"


@pytest.mark.parametrize(
    ("field", "text", "value", "aliases"),
    [
        ("capital", "Chisinau in Romanian (Kishinev in Russian)", "Chisinau", ["Kishinev"]),
        ("capital", "Kyiv (Kiev is the transliteration from Russian)", "Kyiv", ["Kiev"]),
        ("capital", "Porto-Novo (constitutional capital); Cotonou (seat of government)", "Porto Novo", ["Cotonou"]),
        ("capital", "Gitega (political capital), Bujumbura (commercial capital)", "Gitega", ["Bujumbura"]),
        ("capital", "Suva (on Viti Levu)", "Suva", []),
        ("capital", "no official capital; government offices in the Yaren District", None, []),
        ("highest point", "Dufourspitze on Monte Rosa 4,634 m", "Dufourspitze", []),
        ("highest point", "K2 (Mt. Godwin-Austen) 8,611 m", "K2", ["Mt Godwin Austen"]),
        ("highest point", "Mount Everest (highest peak in Asia) 8,849 m", "Mount Everest", []),
        ("highest point", "unnamed elevation 675 m; located 2.5 km southeast", None, []),
        ("highest point", "250 m SW of Mount Flagstaff summit, 383 m", None, []),
        ("lowest point", "Rhone River delta -2 m", "Rhone River delta", []),
        ("currency", "Swiss francs (CHF) per US dollar -", "Swiss francs", ["Swiss franc", "CHF"]),
        ("anthem", '"Swaziland" (Oh God, Bestower of Blessings)', "Oh God Bestower of Blessings", ["Swaziland"]),
        ("anthem", '"God Save the King"', "God Save the King", []),
        ("chief of state", "President XI Jinping (since 14 March 2013)", "Xi Jinping", []),
        ("chief of state", "President of China XI Jinping (since 14 March 2013)", None, []),
        ("chief of state", "King WILLEM-ALEXANDER of the Netherlands (since 2013)", "Willem Alexander", []),
        ("chief of state", "President (vacant)", None, []),
        ("legislature", "Parliament (Eduskunta - Riksdagen)", "Parliament", ["Eduskunta", "Riksdagen"]),
        ("independence year", "1 August 1291 (founding of the Swiss Confederation)", "1291", []),
        ("independence year", "none (territory of Norway)", None, []),
        ("national holiday", "Independence Day (or National Day), 9 September (1991)", "Independence Day", []),
        ("largest city", "231,000 YAMOUSSOUKRO (capital) (2018), 5.686 million ABIDJAN (2023)", "Abidjan", []),
        ("second largest city", "1.432 million Zurich, 441,000 BERN (capital) (2023)", "Bern", []),
        ("second largest city", "1.432 million Zurich (2023)", None, []),
    ],
)
def test_values_are_cut_out_of_entries(field: str, text: str, value: str | None, aliases: list[str]) -> None:
    (item,) = (item for item in (*fields.FIELDS, *fields.NEAR_FIELDS) if item.name == field)
    assert fields.clean(item.value(text), item.max_words) == value
    if value is not None:
        others = [fields.clean(alias, item.max_words) for alias in item.aliases(text)]
        assert [other for other in others if other and other != value] == aliases


@pytest.mark.parametrize(
    ("short", "long", "name"),
    [
        ("Switzerland", "Swiss Confederation", "Switzerland"),
        ("none", "Central African Republic", "Central African Republic"),
        ("Falkland Islands (Islas Malvinas)", "none", "Falkland Islands"),
        ("The Gambia", "Republic of The Gambia", "Gambia"),
        ("DRC", "", "Democratic Republic of the Congo"),
        ("none", "none", None),
    ],
)
def test_country_names(short: str, long: str, name: str | None) -> None:
    names = {"conventional short form": {"text": short}, "conventional long form": {"text": long}}
    assert country_name({"Government": {"Country name": names}}) == name


# ----------------------------------------------------------------------------------------------------------- questions
def country(name: str, **facts: str) -> Country:
    return Country(name, {key.replace("_", " "): value for key, value in facts.items()})


def test_question_text_reads_from_the_last_hop_back() -> None:
    chain = (
        Hop("inverse", "capital", "Bern", "Switzerland"),
        Hop("forward", "export partner", "Switzerland", "Germany"),
        Hop("forward", "currency", "Germany", "euros"),
    )
    assert question_text(chain) == "What is the currency of the export partner of the country whose capital is Bern?"
    assert question_text(chain[1:]) == "What is the currency of the export partner of Switzerland?"
    assert [hop.query for hop in chain] == ["capital Bern", "export partner Switzerland", "currency Germany"]
    assert [hop.country for hop in chain] == ["Switzerland", "Switzerland", "Germany"]


def test_an_anchor_names_one_country_and_is_not_its_name() -> None:
    world = [
        country("Jamaica", capital="Kingston", anthem="Jamaica Land We Love"),
        country("Norfolk Island", capital="kingston"),
        country("Monaco", capital="Monaco"),
    ]
    facts = Facts.index({item.name: item.facts for item in world})
    assert facts.country("capital", "Kingston") is None
    assert facts.country("capital", "Monaco") is None
    assert facts.country("anthem", "jamaica land we love") == "Jamaica"
    assert facts.value("Monaco", "capital") == "Monaco"
    assert facts.value("Monaco", "anthem") is None
    assert facts.value("Atlantis", "capital") is None


def test_all_questions_of_a_small_world() -> None:
    """Two countries that trade with each other: every question written out, trivial ones left out."""
    world = [
        country("Monaco", capital="Monaco", export_partner="Italy", anthem="Hymn"),
        country("Italy", capital="Rome", currency="euros", export_partner="Monaco"),
    ]
    found = build_questions(world, Composition(enumerate_relations=(0, 1)), prefix="t")
    texts = {question.text: question.answers for items in found.values() for question in items}
    # with two countries there is neither a test nor a dev country; Monaco's capital is its name, hence no question
    assert texts == {
        "What is the anthem of Monaco?": ("Hymn",),
        "What is the capital of the export partner of Monaco?": ("Rome",),
        "What is the currency of the export partner of Monaco?": ("euros",),
        "What is the capital of the export partner of the country whose anthem is Hymn?": ("Rome",),
        "What is the currency of the export partner of the country whose anthem is Hymn?": ("euros",),
        "What is the capital of Italy?": ("Rome",),
        "What is the currency of Italy?": ("euros",),
        "What is the currency of the country whose capital is Rome?": ("euros",),
        "What is the anthem of the export partner of Italy?": ("Hymn",),
        "What is the anthem of the export partner of the country whose capital is Rome?": ("Hymn",),
    }


@pytest.mark.parametrize("name", NAMES)
def test_counts(name: str) -> None:
    """The sizes that the task was tuned with; a change of the package or of the cleaning shows here."""
    _, summary = prepared(name)
    counts = {split: sum(hops.values()) for split, hops in summary.questions.items()}
    assert 230 <= summary.countries <= 240
    assert summary.longest_trajectory <= recipe(name).task.max_context_tokens
    if name == "factbook":
        assert 7400 <= summary.passages <= 7800
        assert 23_000 <= counts["train"] <= 28_000
        assert counts["dev"] >= 1000
        assert 6000 <= counts["test"] <= 7500
        assert list(summary.questions["test"]) == ["1", "2", "3", "4"]
        assert summary.chain_ceiling > 0.95
        assert summary.query_ceiling > 0.98
    else:
        assert 8000 <= summary.passages <= 8600
        assert min(counts.values()) >= 1000
        assert list(summary.questions["test"]) == ["3", "4", "5", "6"]
        assert summary.chain_ceiling > 0.98
    assert f"{counts['train']} questions" in str(summary)


@pytest.mark.parametrize("name", NAMES)
def test_no_test_or_dev_country_is_ever_trained_on(name: str) -> None:
    splits = split_countries(list(json.loads((prepared(name)[0] / "facts.json").read_text())))
    trained = {hop.country for question in questions(name, "train") for hop in chain_of(question)}
    trained |= {hop.value for question in questions(name, "train") for hop in chain_of(question)[:-1]}
    assert {splits[item] for item in trained} == {"train"}
    for split in ("dev", "test"):
        answered = {chain_of(question)[-1].country for question in questions(name, split)}
        assert {splits[item] for item in answered} == {split}
        assert not answered & trained
    texts = [question.text for split in ("train", "dev", "test") for question in questions(name, split)]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("name", NAMES)
def test_chains_are_true_connected_and_not_trivial(name: str) -> None:
    facts = Facts.load(prepared(name)[0] / "facts.json")
    for question in questions(name, "dev") + questions(name, "test")[::10] + questions(name, "train")[::50]:
        chain = chain_of(question)
        assert question.metadata["hops"] == len(chain)
        assert question.text == question_text(chain)
        assert question.answers[0] == chain[-1].value
        for before, after in pairwise(chain):
            assert before.value == after.subject
        for hop in chain:
            if hop.kind == "inverse":
                assert facts.country(hop.field, hop.subject) == hop.value
            else:
                assert facts.value(hop.subject, hop.field) == hop.value
        known = [hop.subject for hop in chain]
        assert question.answers[0] not in known
        countries = [hop.value for hop in chain[:-1]]
        assert len(set(countries)) == len(countries)


def test_answers_have_aliases_where_the_factbook_gives_them() -> None:
    answers = {question.text: question.answers for question in questions("factbook", "train")}
    assert answers["What is the currency of Mexico?"] == ("Mexican pesos", "Mexican peso", "MXN")
    assert answers["What is the capital of Mexico?"] == ("Mexico City", "Ciudad de Mexico")


@pytest.mark.parametrize("name", NAMES)
def test_gold_queries_find_the_gold_passage(name: str) -> None:
    """The ceiling of the summary, counted again without `retrieval_ceiling`."""
    passages = load_passages(prepared(name)[0] / "passages.jsonl")
    settings = recipe(name).task.retrieval
    retriever = retrieval.build(settings, passages)
    sample = questions(name, "test")[:150]
    complete = 0
    for question in sample:
        hits = []
        for hop in chain_of(question):
            found = retriever.search(hop.query, settings.top_k)
            hits.append(any(item.id == passage_id(hop.country, hop.field) for item in found))
        complete += all(hits)
    assert complete / len(sample) == retrieval_ceiling(sample, retriever, settings.top_k)[0] > 0.93


def test_passages_state_their_facts() -> None:
    facts = json.loads((prepared("factbook")[0] / "facts.json").read_text())
    by_id = {item.id: item for item in load_passages(prepared("factbook")[0] / "passages.jsonl")}
    for name, values in facts.items():
        for field, value in values.items():
            passage = by_id[passage_id(name, field)]
            assert passage.title == name
            assert passage.text == f"The {field} is {value}."
            assert read_fact(passage) == value
    distractors = [item for item in by_id.values() if read_fact(item) is None]
    assert len(distractors) > 2000
    near = {item.id: item for item in load_passages(prepared("factbook_long")[0] / "passages.jsonl")}
    passage = near["Switzerland: second largest city"]
    assert passage.text == "The second largest city, after Zurich, is Bern."
    assert read_fact(passage) == "Bern"


# --------------------------------------------------------------------------------------------------------- data folder
def test_preparing_again_gives_the_same_bytes(tmp_path: Path) -> None:
    folder, summary = prepared("factbook")
    assert prepare(task("factbook"), tmp_path / "again") == summary
    for file in sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file()):
        assert (folder / file).read_bytes() == (tmp_path / "again" / file).read_bytes(), file
    assert [path.name for path in tmp_path.iterdir()] == ["again"]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"holds no dataset\.json.*choose another folder"):
        prepare(task("factbook"), tmp_path / "data")
    assert [path.name for path in tmp_path.rglob("*")] == ["data", "thesis.tex"]


def test_folders_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    for text in ("old", "new"):
        with written_whole(folder, replaces="mark") as temporary:
            (temporary / "mark").write_text(text)
            if text == "new":
                assert (folder / "mark").read_text() == "old"
    assert (folder / "mark").read_text() == "new"
    with pytest.raises(OSError, match="disk full"):
        fail_halfway(folder)
    assert (folder / "mark").read_text() == "new"
    assert list(folder.parent.iterdir()) == [folder]


def fail_halfway(folder: Path) -> None:
    with written_whole(folder, replaces="mark") as temporary:
        (temporary / "mark").write_text("half")
        raise OSError("disk full")


def test_tasks_that_cannot_be_prepared(tmp_path: Path) -> None:
    with pytest.raises(
        config.RecipeError, match=r"task\.name=nq: cannot be prepared; known are factbook, factbook_long"
    ):
        prepare(task("factbook").model_copy(update={"name": "nq"}), tmp_path / "x")
    with pytest.raises(config.RecipeError, match=r"task\.max_turns=4: questions of 4 hops need 5 turns"):
        prepare(task("factbook", max_turns=4), tmp_path / "x")
    with pytest.raises(config.RecipeError, match=r"task\.max_context_tokens=200: a trajectory can reach 292 tokens"):
        prepare(task("factbook", max_context_tokens=200), tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_facts_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"facts\.json.*treeopsd prepare"):
        Facts.load(tmp_path / "facts.json")
    (tmp_path / "facts.json").write_text("{")
    with pytest.raises(DataError, match=r"facts\.json"):
        Facts.load(tmp_path / "facts.json")


def test_a_question_without_a_chain_is_named() -> None:
    with pytest.raises(ValueError, match="question nq-7 has no chain"):
        chain_of(Question("nq-7", "Who?", ("x",)))


# ------------------------------------------------------------------------------------------------------------- loaders
GOOD = '{"id": "1", "question": "Who?", "answers": ["x"]}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"q\.jsonl: the file is empty"),
        ("\n\n", r"q\.jsonl: the file is empty"),
        (GOOD + '{"id": "2", "question"\n', r"q\.jsonl, line 2: not valid JSON"),
        (GOOD + "\n[1, 2]\n", r"q\.jsonl, line 3: expected a JSON object, found list"),
        ('{"id": "1", "question": "Who?"}', r"line 1: 'answers' must be .*the keys are id, question"),
        ('{"id": "1", "question": "Who?", "answers": []}', r"line 1: 'answers' must be .*found \[\]"),
        ('{"id": "1", "question": "Who?", "answers": "x"}', r"line 1: 'answers' must be .*found 'x'"),
        ('{"id": "1", "question": " ", "answers": ["x"]}', r"line 1: 'question' must be .*found ' '"),
        ('{"id": 1, "question": "Who?", "answers": ["x"]}', r"line 1: 'id' must be .*found 1"),
        ('{"id": "1", "question": "Who?", "answers": ["x"], "metadata": 3}', "line 1: 'metadata' must be an object"),
        (GOOD + GOOD, r"q\.jsonl, line 2: id '1' is already used in line 1"),
    ],
)
def test_broken_question_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "q.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        load_questions(tmp_path / "q.jsonl")


def test_questions_are_read_as_written(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text(
        GOOD + '\n{"id": "2", "question": "É?", "answers": ["y", "z"], "metadata": {"hops": 2}}'
    )
    assert load_questions(tmp_path / "q.jsonl") == [
        Question("1", "Who?", ("x",)),
        Question("2", "É?", ("y", "z"), {"hops": 2}),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": "1"}', r"p\.jsonl, line 1: 'contents' must be a text that is not empty; the keys are id"),
        ('{"id": "1", "contents": "no title"}', "line 1: 'contents' must be a title in double quotes"),
        ('{"contents": "\\"T\\"\\ntext"}', "line 1: 'id' must be a text"),
    ],
)
def test_broken_passage_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        load_passages(tmp_path / "p.jsonl")


def test_passages_are_read_as_written(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"id": "1", "contents": "\\"A \\"B\\" C\\"\\nfirst\\nsecond"}\n')
    (passage,) = load_passages(tmp_path / "p.jsonl")
    assert (passage.id, passage.title, passage.text, passage.score) == ("1", 'A "B" C', "first\nsecond", 0.0)
    with pytest.raises(DataError, match="no such file"):
        load_passages(tmp_path / "missing.jsonl")


def test_hops_of_all_splits_are_counted() -> None:
    _, summary = prepared("factbook")
    for split, counts in summary.questions.items():
        assert Counter(str(question.metadata["hops"]) for question in questions("factbook", split)) == counts
